package worker

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
	"meridian.internal/shared/serve"
)

// Engine is what a daemon must know of an engine. *ranks.Group is one.
type Engine interface {
	Run(ctx context.Context) error
	Drain()
	Drained() <-chan struct{}
	Load() infer.Load
	Loads() []infer.Load // of each data-parallel rank
}

// Parts are what a role adds to a daemon.
type Parts struct {
	Face      Options // Name, Role, clocks, metrics, load and records are filled in
	Engine    Engine
	Stages    int // of the pipeline of each rank; 0: it is none
	ClockAddr string
	// Beside run beside the engine, until after its last request: the clock responder, the KV listener, the registry.
	Beside []func(ctx context.Context) error
}

// drainNotice is how long a node that ends is still served after it has said so in the registry, so that routers that
// chose it just before are not turned away; one whose engine is lost says that so long to who asks it.
const drainNotice = 300 * time.Millisecond

// Run serves until ctx ends, then ends in order: it says that it drains; takes no more requests and lets the running ones
// end, up to the grace time; waits for hand-overs; stops the engine and what runs beside it; sends the records; leaves
// the registry. It returns nil, or why it could not go on.
func (d *Daemon) Run(ctx context.Context, p Parts) error {
	defer d.Close(ctx)
	face, err := d.face(&p)
	if err != nil {
		return err
	}
	base := context.WithoutCancel(ctx)
	inner, stop := context.WithCancel(base)
	defer stop()
	serving, quit := context.WithCancel(base)
	defer quit()
	beside, watched := errgroup.WithContext(inner)
	ran := make(chan struct{})
	beside.Go(func() error {
		defer close(ran)
		return d.runEngine(inner, p.Engine)
	})
	if d.Bus != nil {
		t := &teller{d: d, engine: p.Engine}
		beside.Go(func() error { return t.run(inner) })
	}
	for _, f := range append(p.Beside, d.ledgerWork()...) {
		beside.Go(func() error { return f(inner) })
	}
	var state atomic.Value
	state.Store(node.Ready)
	lease, err := d.register(ctx, &p, &state)
	if err != nil {
		stop()
		return errors.Join(err, waitFor(watched, beside, ran))
	}
	served := make(chan error, 1)
	go func() { served <- d.server.Serve(serving) }()
	d.ready.Store(true)
	d.log.Info("serving", "node", d.Name, "url", d.URL, "kv", p.Face.KVAddr, "clock", p.ClockAddr, "model", p.Face.Model.Name)
	select {
	case <-ctx.Done():
		d.log.Info("draining", "node", d.Name, "grace", d.flags.Grace)
	case <-watched.Done(): // the engine or the KV listener ended by itself
	case err := <-served:
		served <- err
	}
	state.Store(node.Draining)
	d.Ledger.Close() // those who follow rows or events would hold the server until the grace time is over
	d.cache.Close()
	if lease != nil {
		lease.Changed()
		pause(base, drainNotice)
	}
	quit()
	err = <-served
	d.drain(watched, face, p.Engine)
	stop()
	err = errors.Join(err, waitFor(watched, beside, ran))
	face.waitLast(base)
	if lease != nil {
		lease.Close()
	}
	return err
}

// endWait is how long what runs beside the engine may take to end after it. Hand-overs wait for the copies of their device,
// and those of one that hangs do not end.
const endWait = 5 * time.Second

// waitFor waits for the engine and what runs beside it, and gives the first error of any.
func waitFor(watched context.Context, beside *errgroup.Group, ran <-chan struct{}) error {
	<-ran
	ended := make(chan error, 1)
	go func() { ended <- beside.Wait() }()
	limit := time.NewTimer(endWait)
	defer limit.Stop()
	select {
	case err := <-ended:
		return err
	case <-limit.C:
		return fmt.Errorf("hand-overs do not end: %w", context.Cause(watched))
	}
}

// face fills in what the daemon knows and registers the routes.
func (d *Daemon) face(p *Parts) (*Node, error) {
	o := &p.Face
	o.Name, o.Role, o.Steady, o.Adjusted = d.Name, d.role, d.Steady, d.Adjusted
	o.Registry, o.Load, o.Logger, o.Version = d.Metrics, p.Engine.Load, d.log, serve.Version()
	o.Healthy, o.Publish = d.healthy, d.publisher()
	o.Ledger, o.ReturnPerfMetrics = d.Ledger, d.flags.ReturnPerfMetrics
	o.Profiler, _ = p.Engine.(Profiler)
	n, err := New(*o)
	if err != nil {
		return nil, err
	}
	n.Routes(d.server.Echo())
	return n, nil
}

// runEngine remembers that the engine ended by itself: the health route says so.
func (d *Daemon) runEngine(ctx context.Context, e Engine) error {
	err := e.Run(ctx)
	if err == nil && ctx.Err() == nil {
		err = errors.New("worker: the engine ended by itself")
	}
	if err != nil {
		err = fmt.Errorf("engine of %s: %w", d.Name, err)
		d.lost.Store(&err)
	}
	return err
}

func (d *Daemon) register(ctx context.Context, p *Parts, state *atomic.Value) (*node.Lease, error) {
	if d.Bus == nil {
		return nil, nil
	}
	return node.Register(ctx, d.Bus, func() node.Info {
		s := state.Load().(node.State)
		if d.healthy() != nil {
			s = node.Draining
		}
		return d.info(p, s)
	}, d.log)
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// waitLast waits for the records of hand-overs that were cut off: they ended with the KV listener, so their records come
// now, and the publisher must still be there.
func (n *Node) waitLast(base context.Context) {
	limited, cancel := context.WithTimeout(base, time.Second)
	defer cancel()
	if err := n.Wait(limited); err != nil {
		n.o.Logger.Warn("records of hand-overs are lost", "node", n.o.Name)
	}
}

// settleWait is for hand-overs that go on after the last answer; their leases end soon by themselves.
const settleWait = 3 * time.Second

// drain waits for what goes on after the last answer.
func (d *Daemon) drain(ctx context.Context, n *Node, e Engine) {
	limited, cancel := context.WithTimeout(ctx, min(d.flags.Grace, settleWait))
	defer cancel()
	e.Drain()
	select {
	case <-e.Drained():
	case <-limited.Done():
	}
	if err := n.Wait(limited); err != nil {
		d.log.Warn("hand-overs are cut off", "node", d.Name)
	}
}
