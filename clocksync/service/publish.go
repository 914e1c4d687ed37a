package service

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

const (
	maxLogQueue  = 4096
	publishLimit = 2 * time.Second
)

// publisher hands estimates to NATS. Of each pair only the newest waits; the log is bounded, and what does not fit is
// counted. run's goroutine sends.
type publisher struct {
	conn *bus.Conn
	slog *slog.Logger
	poke chan struct{}

	mu    sync.Mutex // guards what follows; short reads and writes only
	dirty map[string]clock.Published
	queue []clock.Published

	published, dropped, failed atomic.Int64
}

func newPublisher(conn *bus.Conn, log *slog.Logger) *publisher {
	return &publisher{conn: conn, slog: log, poke: make(chan struct{}, 1), dirty: map[string]clock.Published{}}
}

// newest publishes an estimate of a pair, in the bucket and in the log.
func (p *publisher) newest(e clock.Published) {
	p.mu.Lock()
	p.dirty[ClockKey(e.Router, e.Node)] = e
	p.mu.Unlock()
	p.log(e)
}

// ClockKey is the key of a pair in the bucket of the newest estimates.
func ClockKey(router, node string) string { return bus.Token(router) + "." + bus.Token(node) }

// log publishes e in the log alone.
func (p *publisher) log(e clock.Published) {
	p.mu.Lock()
	if len(p.queue) < maxLogQueue {
		p.queue = append(p.queue, e)
	} else {
		p.dropped.Add(1)
	}
	p.mu.Unlock()
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

func (p *publisher) run(ctx context.Context) error {
	if err := p.conn.Ready(ctx); err != nil {
		return nil // the context ended before NATS was there
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.poke:
		}
		p.mu.Lock()
		dirty, queue := p.dirty, p.queue
		p.dirty, p.queue = map[string]clock.Published{}, nil
		p.mu.Unlock()
		p.send(ctx, dirty, queue)
	}
}

// send gives up what NATS does not take now: the next burst brings something newer.
func (p *publisher) send(ctx context.Context, dirty map[string]clock.Published, queue []clock.Published) {
	ctx, cancel := context.WithTimeout(ctx, publishLimit)
	defer cancel()
	if len(dirty) > 0 {
		kv, err := p.conn.KV(ctx, bus.BucketClocks)
		if err != nil {
			p.failed.Add(int64(len(dirty)))
			dirty = nil
		}
		for key, e := range dirty {
			p.put(ctx, kv, key, e)
		}
	}
	for _, e := range queue {
		b, err := json.Marshal(e)
		if err != nil {
			p.failed.Add(1)
			continue
		}
		if err := p.conn.NATS().Publish(bus.ClockSubject(e.Node), b); err != nil {
			p.failed.Add(1)
		}
	}
}

func (p *publisher) put(ctx context.Context, kv jetstream.KeyValue, key string, e clock.Published) {
	b, err := json.Marshal(e)
	if err == nil {
		_, err = kv.Put(ctx, key, b)
	}
	if err != nil {
		p.failed.Add(1)
		p.slog.Debug("estimate not published", "key", key, "err", err)
		return
	}
	p.published.Add(1)
}
