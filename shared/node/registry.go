package node

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
)

const (
	expireEvery = 100 * time.Millisecond
	watchRetry  = 300 * time.Millisecond
	// watchStale: a watch that is silent for so long while NATS is connected hangs on a bucket that is gone.
	watchStale = 3 * time.Second
)

// Registry is the set of processes, kept up to date by Run. One goroutine (Run's) changes it.
type Registry struct {
	conn    *bus.Conn
	log     *slog.Logger
	onEvent func(Event)

	mu sync.Mutex // guards m
	m  *members
}

// NewRegistry returns an empty registry. onEvent (may be nil) is called on Run's goroutine and must not block. The process
// that watches must be registered itself: its own renewals are how it knows that the bus still speaks.
func NewRegistry(conn *bus.Conn, log *slog.Logger, onEvent func(Event)) *Registry {
	if log == nil {
		log = slog.Default()
	}
	if onEvent == nil {
		onEvent = func(Event) {}
	}
	return &Registry{conn: conn, log: log, onEvent: onEvent, m: newMembers(time.Now())}
}

// Watch calls fn for each change of the membership until ctx ends.
func Watch(ctx context.Context, conn *bus.Conn, fn func(Event)) error {
	return NewRegistry(conn, nil, fn).Run(ctx)
}

// Nodes is a snapshot: the living, and for a minute the lost. While NATS is away the last known membership stays.
func (r *Registry) Nodes() []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.m.list()
}

// Has says whether a registered process is reached at a host and port. No registry has none.
func (r *Registry) Has(host string) bool {
	return r != nil && slices.ContainsFunc(r.Nodes(), func(e Entry) bool {
		u, err := url.Parse(e.Info.URL)
		return err == nil && u.Host == host
	})
}

// Run watches until ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		err := r.watch(ctx)
		if err != nil && ctx.Err() == nil && !errors.Is(err, errStale) && r.conn.Connected() {
			r.log.Warn("watch of the registry ended; trying again", "error", err)
		}
		r.idle(ctx, watchRetry)
	}
	return nil
}

var errStale = errors.New("node: watch is silent")

// idle waits between two watches; leases go on to end.
func (r *Registry) idle(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	r.expire()
}

func (r *Registry) watch(ctx context.Context) error {
	if err := r.conn.Ready(ctx); err != nil {
		return err
	}
	kv, err := r.conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		return err
	}
	w, err := kv.WatchAll(ctx)
	if err != nil {
		return err
	}
	defer w.Stop() //nolint:errcheck // the subscription may be gone already
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case u, open := <-w.Updates():
			if !open {
				return errors.New("watch was closed")
			}
			last = time.Now()
			r.update(u)
		case <-tick.C:
			r.expire()
			if r.conn.Connected() && time.Since(last) > watchStale {
				return errStale
			}
		}
	}
}

func (r *Registry) update(u jetstream.KeyValueEntry) {
	if u == nil { // the end of the values that were there before
		return
	}
	if u.Operation() != jetstream.KeyValuePut {
		r.mu.Lock()
		ev, known := r.m.remove(u.Key(), time.Now())
		r.mu.Unlock()
		if known {
			r.onEvent(ev)
		}
		return
	}
	info, err := Parse(u.Value())
	if err != nil {
		r.log.Warn("ignoring a registration", "key", u.Key(), "error", err)
		return
	}
	r.mu.Lock()
	ev, fresh := r.m.put(u.Key(), info, time.Now())
	r.mu.Unlock()
	switch {
	case !fresh:
	case ev.Kind == contested:
		r.log.Warn("two processes have one name: this one is ignored", "key", u.Key(), "url", info.URL, "clock", info.ClockID)
	default:
		r.onEvent(ev)
	}
}

func (r *Registry) expire() {
	r.mu.Lock()
	lost := r.m.expire(time.Now())
	r.mu.Unlock()
	for _, ev := range lost {
		r.onEvent(ev)
	}
}
