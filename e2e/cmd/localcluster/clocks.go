package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// clocks is the truth test of a whole cluster: what every daemon says of a clock is held against what the clock really shows.
type clocks struct {
	layout
	For         time.Duration `help:"How long." default:"20s"`
	Concurrency int           `help:"Requests at a time, all the while." default:"2"`
	Disturb     bool          `help:"Meanwhile kill and restart clocksync, a node and the router, twice each."`
}

const (
	watchEvery = 250 * time.Millisecond
	downFor    = 2 * time.Second // between a kill and the restart
)

// Run plays it; the error says every miss.
func (k *clocks) Run(ctx context.Context, log *slog.Logger) error {
	if k.For <= 0 || k.Concurrency < 0 {
		return fmt.Errorf("--for %v --concurrency %d: want a time, and 0 or more requests", k.For, k.Concurrency)
	}
	if len(k.TimeShift) == 0 && len(k.Shuttle) == 0 && len(k.NodeFlag) == 0 { // the usual: a node of each kind
		k.Gen = max(k.Gen, 2)
		k.TimeShift = map[string]time.Duration{"gen0": 1_000_000 * time.Second}
		k.Shuttle = map[string]string{"gen1": "1ms/5ms"}
	}
	cfg, err := k.config(log)
	if err != nil {
		return err
	}
	if len(k.TimeShift)+len(k.Shuttle) > 0 {
		if err := cluster.CanPlace(); err != nil {
			return err
		}
	}
	c, err := start(ctx, cfg)
	if err != nil {
		return err
	}
	watch := newClockWatch(cfg.Places)
	err = k.play(ctx, c, watch)
	err = errors.Join(err, c.Stop(), watch.lines(c.Traces()))
	watch.print()
	return errors.Join(err, watch.verdict(), runTimeline(ctx, c.Traces(), "check"))
}

// play looks at the clocks while requests run, until the time is over.
func (k *clocks) play(ctx context.Context, c *cluster.Cluster, watch *clockWatch) error {
	ctx, cancel := context.WithTimeout(ctx, k.For)
	defer cancel()
	var all sync.WaitGroup
	defer all.Wait()
	var sent counts
	model := modelName(ctx, c)
	for i := range k.Concurrency {
		all.Go(func() { sent.load(ctx, c.URL(), model, i) })
	}
	all.Go(func() { watch.run(ctx, c.Clock.URL, c.URL()) })
	var err error
	if k.Disturb {
		err = k.disturb(ctx, c)
	}
	<-ctx.Done()
	all.Wait()
	fmt.Printf("%d requests answered, %d not\n", sent.answered, sent.failed)
	return err
}

// disturb kills one process after the other, evenly over the time.
func (k *clocks) disturb(ctx context.Context, c *cluster.Cluster) error {
	victims := []*cluster.Process{c.Clock, c.Nodes[len(c.Nodes)-1], c.Routers[0], c.Clock, c.Find("gen0"), c.Routers[0]}
	tick := time.NewTicker(k.For / time.Duration(len(victims)+1))
	defer tick.Stop()
	for _, p := range victims {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := p.Signal(syscall.SIGKILL); err != nil {
			return err
		}
		_ = p.Wait(ctx) // it says that it was killed
		pause(ctx, downFor)
		if ctx.Err() != nil {
			return nil
		}
		if err := c.Restart(ctx, p); err != nil {
			return err
		}
		fmt.Printf("%s was killed and is back\n", p.Name)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// counts are requests by how they ended.
type counts struct {
	mu               sync.Mutex
	answered, failed int
}

const loadTimeout = 10 * time.Second

// load sends one request after the other. Those that a kill cuts off are no fault here.
func (n *counts) load(ctx context.Context, url, model string, first int) {
	cl := client.New(url, 1)
	defer cl.Close()
	for i := first; ctx.Err() == nil; i++ {
		one, cancel := context.WithTimeout(ctx, loadTimeout)
		_, err := cl.Do(one, client.Request{ID: fmt.Sprintf("clocks-%d-%d", first, i), Fields: map[string]any{
			"model": model, "prompt": prompt(i), "max_tokens": 16, "stream": true, "temperature": 0,
		}})
		cancel()
		n.mu.Lock()
		if err == nil {
			n.answered++
		} else if ctx.Err() == nil {
			n.failed++
		}
		n.mu.Unlock()
		if err != nil {
			pause(ctx, 100*time.Millisecond) // the router may be away
		}
	}
}
