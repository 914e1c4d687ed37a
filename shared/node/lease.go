package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
)

const (
	// RenewEvery is how often a lease is renewed.
	RenewEvery = 500 * time.Millisecond
	// LeaseTTL is how long a lease holds without renewal, while the bus is up.
	LeaseTTL = 1500 * time.Millisecond
)

const (
	putTimeout = 2 * time.Second
	closeWait  = time.Second // for removing the key when the owner's context is over
)

// ErrBadInfo is returned when a registration lacks what others need to reach or name the process.
var ErrBadInfo = errors.New("node: bad registration")

// Lease keeps one process's entry in the registry alive. Its goroutine is the only writer of the entry.
type Lease struct {
	conn    *bus.Conn
	get     func() Info
	log     *slog.Logger
	key     string
	changed chan struct{}
	stop    context.CancelFunc
	done    chan struct{}
	once    sync.Once
	// Owned by the goroutine, and by Close after it.
	seq      int64
	revision uint64 // of the entry as it was written last; 0: it was not
}

// Register starts to put what get returns every RenewEvery and after each call of Changed; Seq is set by the lease. get is
// called on the lease's own goroutine and must not block. The bus need not be up. The lease outlives ctx, since a process
// that drains is still a member: it ends with Close.
func Register(ctx context.Context, conn *bus.Conn, get func() Info, log *slog.Logger) (*Lease, error) {
	info := get()
	if err := info.Check(); err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.Default()
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &Lease{
		conn: conn, get: get, log: log, key: Key(info.Role, info.Name),
		changed: make(chan struct{}, 1), stop: stop, done: make(chan struct{}),
	}
	go l.run(run)
	return l, nil
}

// Changed has the entry put at once.
func (l *Lease) Changed() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// Close stops the renewal and removes the entry, so that others need not wait for its lease to end; not that of another process,
// which has the name as well. Idempotent.
func (l *Lease) Close() {
	l.once.Do(func() {
		l.stop()
		<-l.done
		if !l.conn.Connected() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), closeWait)
		defer cancel()
		if err := l.remove(ctx); err != nil {
			l.log.Warn("could not remove the registration; it ends with its lease", "key", l.key, "error", err)
		}
	})
}

// remove deletes the entry if this process wrote it last: others take a deletion for the end of whoever did.
func (l *Lease) remove(ctx context.Context) error {
	if l.revision == 0 {
		return nil
	}
	kv, err := l.conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		return err
	}
	if err := kv.Delete(ctx, l.key, jetstream.LastRevision(l.revision)); !errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
		return err
	}
	return nil
}

func (l *Lease) run(ctx context.Context) {
	defer close(l.done)
	tick := time.NewTicker(RenewEvery)
	defer tick.Stop()
	var kv jetstream.KeyValue
	failures := 0
	for {
		err := l.put(ctx, &kv)
		if ctx.Err() != nil {
			return
		}
		failures = l.note(failures, err)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.changed:
		}
	}
}

// note counts failures in a row and logs when there are enough to end the lease, once; the first ones are usual while the
// process and NATS start together.
func (l *Lease) note(failures int, err error) int {
	const enough = int(LeaseTTL/RenewEvery) + 1
	if err == nil {
		if failures >= enough {
			l.log.Info("registered again", "key", l.key)
		}
		return 0
	}
	if failures++; failures == enough {
		l.log.Warn("registration is not renewed", "key", l.key, "error", err)
	}
	return failures
}

// put writes the entry. It is not cut by the end of the lease: whoever removes the entry must know what was written last.
func (l *Lease) put(ctx context.Context, kv *jetstream.KeyValue) error {
	if !l.conn.Connected() {
		return errors.New("NATS is away")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), putTimeout)
	defer cancel()
	if *kv == nil {
		bucket, err := l.conn.KV(ctx, bus.BucketNodes)
		if err != nil {
			return err
		}
		*kv = bucket
	}
	info := l.get()
	l.seq++
	info.Seq = l.seq
	b, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("encode registration: %w", err)
	}
	revision, err := (*kv).Put(ctx, l.key, b)
	if err != nil {
		*kv = nil // the bucket may have been made anew
		return fmt.Errorf("put %s: %w", l.key, err)
	}
	l.revision = revision
	return nil
}
