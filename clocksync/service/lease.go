package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
)

const (
	bucketLeases = "MERIDIAN_LEASES"
	leaseKey     = "clocksync"
	leaseTTL     = 3 * time.Second // a dead leader's place is free after that; with leaseTry the take-over is under 5 s
	leaseRenew   = 750 * time.Millisecond
	leaseTry     = 500 * time.Millisecond
	leaseAnswer  = time.Second
)

// lease says which daemon leads. The entry of the leader in a bucket with a time to live is renewed by it alone; whoever
// creates the entry after it has gone leads next. A leader that cannot renew stops leading before its entry ends.
type lease struct {
	conn *bus.Conn
	me   string
	log  *slog.Logger
	rev  uint64 // of our entry

	leads atomic.Bool
	till  atomic.Pointer[time.Time] // our lead ends, by our own clock; set before leads
	taken atomic.Int64
}

func newLease(conn *bus.Conn, me string, log *slog.Logger) *lease {
	return &lease{conn: conn, me: me, log: log}
}

// held says whether this daemon leads now. It looks at the time itself: run may wait for NATS, or the process was stopped.
func (l *lease) held() bool { return l.leads.Load() && time.Now().Before(*l.till.Load()) }

func (l *lease) run(ctx context.Context) error {
	if err := l.conn.Ready(ctx); err != nil {
		return nil // the context ended before NATS was there
	}
	defer l.release()
	for ctx.Err() == nil {
		wait := leaseTry
		if err := l.try(ctx); err != nil && ctx.Err() == nil {
			l.log.Debug("lease not held", "err", err)
		}
		if l.held() {
			wait = leaseRenew
		} else {
			l.set(false)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

// try renews or takes the lease.
func (l *lease) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseAnswer)
	defer cancel()
	started := time.Now()
	kv, err := l.bucket(ctx)
	if err != nil {
		return err
	}
	var rev uint64
	if l.leads.Load() {
		rev, err = kv.Update(ctx, leaseKey, []byte(l.me), l.rev)
		if errors.Is(err, jetstream.ErrKeyExists) { // somebody else's revision: the entry ended in between
			l.set(false)
		}
	} else {
		rev, err = kv.Create(ctx, leaseKey, []byte(l.me))
	}
	if err != nil {
		return fmt.Errorf("take the lease %s: %w", leaseKey, err)
	}
	till := started.Add(leaseTTL - leaseRenew)
	l.rev = rev
	l.till.Store(&till)
	l.set(true)
	return nil
}

func (l *lease) bucket(ctx context.Context) (jetstream.KeyValue, error) {
	kv, err := l.conn.KV(ctx, bucketLeases)
	if err == nil {
		return kv, nil
	}
	kv, err = l.conn.JetStream().CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket: bucketLeases, Description: "who leads", Storage: jetstream.MemoryStorage, TTL: leaseTTL, History: 1,
	})
	if err != nil {
		return nil, fmt.Errorf("make bucket %s: %w", bucketLeases, err)
	}
	return kv, nil
}

func (l *lease) set(leads bool) {
	if l.leads.Swap(leads) == leads {
		return
	}
	if leads {
		l.taken.Add(1)
	}
	l.log.Info("lead of clock synchronisation changed", "leads", leads)
}

// release frees the place at once when the daemon stops.
func (l *lease) release() {
	if !l.leads.Load() || !l.conn.Connected() {
		return
	}
	l.leads.Store(false)
	ctx, cancel := context.WithTimeout(context.Background(), leaseAnswer)
	defer cancel()
	if kv, err := l.conn.KV(ctx, bucketLeases); err == nil {
		_ = kv.Purge(ctx, leaseKey, jetstream.LastRevision(l.rev))
	}
}
