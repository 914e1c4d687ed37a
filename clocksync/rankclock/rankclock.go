// Package rankclock owns what a node knows of the clocks of its ranks that are processes of their own. Each answers like a node, on
// the loopback address; the node follows it with the estimator that clocksync has for nodes (clocksync/track), which also proves that
// the two read one clock where they do. It says nothing of ranks that are goroutines: they read the node's clock.
package rankclock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"meridian.internal/clocksync/respond"
	"meridian.internal/clocksync/track"
	"meridian.internal/shared/clock"
)

// Options are those of both sides.
type Options struct {
	Steady    *clock.Steady
	Key       []byte // HMAC key of the packets; empty: they are not signed
	KernelDir string // see respond.Options
	Logger    *slog.Logger
}

// Serve answers the node while rank runs, which is told where.
func Serve(ctx context.Context, o Options, rank func(addr string) error) error {
	r, err := respond.Listen("127.0.0.1:0", o.Steady, respond.Options{Key: o.Key, KernelDir: o.KernelDir, Logger: o.Logger})
	if err != nil {
		return fmt.Errorf("clock of a rank: %w", err)
	}
	inner, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- r.Serve(inner) }()
	err = rank(r.Addr().String())
	cancel()
	return errors.Join(err, <-served)
}

// Clocks follows the clocks of ranks.
type Clocks struct {
	tracker *track.Tracker
	names   map[int]string // by rank
	stop    context.CancelFunc
	stopped chan struct{}
}

// followLimit is how long it may take to know all clocks at first: an answer takes microseconds.
const followLimit = 10 * time.Second

// Follow follows the clocks of ranks until Close; addrs has where they answer. It returns when all are known: stamps of a clock that is
// not have no place in time.
func Follow(ctx context.Context, o Options, addrs map[int]string) (*Clocks, error) {
	c := &Clocks{names: map[int]string{}, stopped: make(chan struct{})}
	news := make(chan struct{}, 1)
	c.tracker = track.New(track.Options{Steady: o.Steady, Key: o.Key, KernelDir: o.KernelDir, Logger: o.Logger, OnUpdate: func(track.Update) {
		select {
		case news <- struct{}{}:
		default:
		}
	}})
	var list []track.Peer
	for rank, addr := range addrs {
		c.names[rank] = fmt.Sprintf("rank %d", rank)
		list = append(list, track.Peer{Name: c.names[rank], ClockAddr: addr})
	}
	c.tracker.SetPeers(list)
	var inner context.Context
	inner, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() { // Close waits for it
		defer close(c.stopped)
		_ = c.tracker.Run(inner)
	}()
	limited, cancel := context.WithTimeout(ctx, followLimit)
	defer cancel()
	for rank, addr := range addrs {
		for {
			if e, _ := c.Newest(rank); e.Usable() {
				break
			}
			select {
			case <-news:
			case <-limited.Done():
				c.Close()
				return nil, fmt.Errorf("clock of rank %d at %s is not known: %w", rank, addr, limited.Err())
			}
		}
	}
	return c, nil
}

// Newest is what is known of the clock of a rank now. Not ok: it is the node's own.
func (c *Clocks) Newest(rank int) (clock.Estimate, bool) {
	name, ok := c.names[rank]
	if !ok {
		return clock.Estimate{}, false
	}
	return c.tracker.Newest(name)
}

// Close ends the following.
func (c *Clocks) Close() {
	c.stop()
	<-c.stopped
}
