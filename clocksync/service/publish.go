package service

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

const (
	maxLogQueue  = 4096
	publishLimit = 2 * time.Second
	// ensureEvery is how often is looked whether log and bucket are still there: a plain message to a stream that was deleted
	// fails silently.
	ensureEvery = time.Second
)

// publisher hands estimates to NATS. Of each pair only the newest waits; the log is bounded, and what does not fit is
// counted. run's goroutine sends.
type publisher struct {
	conn *bus.Conn
	slog *slog.Logger
	poke chan struct{}
	good time.Time // when log and bucket were last there

	mu    sync.Mutex       // guards what follows; short reads and writes only
	dirty map[string]int64 // number of the newest estimate of each key
	queue []queued
	n     int64

	published, dropped, failed atomic.Int64
}

func newPublisher(conn *bus.Conn, log *slog.Logger) *publisher {
	return &publisher{conn: conn, slog: log, poke: make(chan struct{}, 1), dirty: map[string]int64{}}
}

// newest publishes an estimate of a pair, in the bucket and in the log.
func (p *publisher) newest(e clock.Published) {
	p.add(ClockKey(e.Router, e.Node), e)
}

// queued is an estimate that waits; key is "" if it is for the log alone.
type queued struct {
	e   clock.Published
	key string
	n   int64
}

// ClockKey is the key of a pair in the bucket of the newest estimates.
func ClockKey(router, node string) string { return bus.Token(router) + "." + bus.Token(node) }

// log publishes e in the log alone.
func (p *publisher) log(e clock.Published) { p.add("", e) }

func (p *publisher) add(key string, e clock.Published) {
	p.mu.Lock()
	if len(p.queue) < maxLogQueue {
		p.n++
		p.queue = append(p.queue, queued{e, key, p.n})
		if key != "" {
			p.dirty[key] = p.n
		}
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
		p.dirty, p.queue = map[string]int64{}, nil
		p.mu.Unlock()
		p.send(ctx, dirty, queue)
	}
}

// send gives up what NATS does not take now: the next burst brings something newer.
func (p *publisher) send(ctx context.Context, dirty map[string]int64, queue []queued) {
	ctx, cancel := context.WithTimeout(ctx, publishLimit)
	defer cancel()
	// Log and bucket have to exist; a value is then written by a plain message to its subject. The acknowledgement that Put
	// would wait for costs more than the measurement, and a value that is lost has a successor in a second.
	if time.Since(p.good) > ensureEvery {
		if err := bus.EnsureStreams(ctx, p.conn.JetStream()); err != nil {
			p.slog.Debug("estimates not published", "count", len(queue), "err", err)
			p.failed.Add(int64(len(queue)))
			return
		}
		p.good = time.Now()
	}
	for _, q := range queue {
		b, err := json.Marshal(q.e)
		if err == nil {
			err = p.conn.NATS().Publish(bus.ClockSubject(q.e.Node), b)
		}
		// Of what waited for one key, only the newest goes into the bucket, by the bytes that go into the log.
		if d, ok := dirty[q.key]; ok && d == q.n {
			if err == nil {
				err = p.conn.NATS().Publish(kvSubject+q.key, b)
			}
			if err == nil {
				p.published.Add(1)
			}
			delete(dirty, q.key)
		}
		if err != nil {
			p.failed.Add(1)
		}
	}
}

// kvSubject is where JetStream stores the values of the bucket.
const kvSubject = "$KV." + bus.BucketClocks + "."
