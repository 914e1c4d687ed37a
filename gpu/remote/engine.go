package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// Options of an engine.
type Options struct {
	Rank     int
	Deadline time.Duration // a process that is not heard of for so long is lost
	Now      func() int64  // the node's steady clock in ns
	Logger   *slog.Logger
}

// Engine is the engine of another process. Its methods are safe for concurrent use.
type Engine struct {
	o      Options
	p      *Process
	hello  Hello
	orders *caller
	kv     *caller
	heard  atomic.Bool // something came since it was last looked at
	given  atomic.Int64
	handle atomic.Int64

	reads   sync.WaitGroup
	drained chan struct{} // closed when the rank holds nothing any more
	ended   chan struct{} // closed when the rank's engine has ended by itself
	gone    chan struct{} // closed when the process is lost, with goneErr
	goneErr error
	final   *item // the answer to stop; nil: there was none

	mu      sync.Mutex // guards the fields below
	seqs    map[int64]*Sequence
	exports map[int64]*Export
	load    infer.Load
	queued  int
	taken   int64
	cards   []clock.Estimate
	tell    func(kvevent.Event)
	untold  []kvevent.Event // that came before tell: what the rank has kept on disk
}

// Open waits until the process is ready to take requests. Close ends it, also when Open has failed.
func Open(ctx context.Context, p *Process, o Options) (*Engine, error) {
	e := &Engine{
		o: o, p: p, orders: newCaller(p.orders, o.Deadline), kv: newCaller(p.kv, o.Deadline),
		drained: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
		seqs: map[int64]*Sequence{}, exports: map[int64]*Export{},
	}
	ready := make(chan error, 1)
	go func() {
		first, err := e.orders.l.receive()
		if err == nil && first.Hello == nil {
			err = errors.New("its first message is no hello")
		}
		if err == nil {
			e.hello = *first.Hello
			e.hear(first)
		}
		ready <- err
	}()
	select {
	case err := <-ready:
		if err != nil {
			return nil, fmt.Errorf("%w: rank %d: %w", ErrGone, o.Rank, p.Why(err))
		}
	case <-ctx.Done():
		_ = p.orders.Close() // the reader ends
		<-ready
		return nil, fmt.Errorf("rank %d is not ready: %w", o.Rank, ctx.Err())
	}
	why := func(err error) error {
		e.Abandon(p.Why(err))
		return fmt.Errorf("%w: %w", engine.ErrStopped, e.goneErr)
	}
	e.reads.Go(func() { e.orders.run(e.hear, why) })
	e.reads.Go(func() { e.kv.run(func(*packet) {}, why) })
	return e, nil
}

// Rank is its number.
func (e *Engine) Rank() int { return e.o.Rank }

// Hello is what the rank says of itself.
func (e *Engine) Hello() Hello { return e.hello }

// Tell has what the rank stores and drops told, from its start on. Who is told must not block. nil: nobody is.
func (e *Engine) Tell(tell func(kvevent.Event)) {
	if tell == nil {
		tell = func(kvevent.Event) {}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range e.untold {
		tell(ev)
	}
	e.tell, e.untold = tell, nil
}

// Process is where it runs.
func (e *Engine) Process() *Process { return e.p }

// Abandon gives the process up: whatever waits for it ends with the error. The first one counts.
func (e *Engine) Abandon(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.gone:
		return
	default:
	}
	e.goneErr = fmt.Errorf("%w: rank %d: %w", ErrGone, e.o.Rank, err)
	close(e.gone)
	stopped := fmt.Errorf("%w: %w", engine.ErrStopped, e.goneErr)
	for h, s := range e.seqs {
		s.end(&infer.Done{Reason: infer.FinishFailed, Err: stopped, Report: infer.Report{Rank: &e.o.Rank, PromptTokens: s.prompt}})
		delete(e.seqs, h)
	}
	for _, x := range e.exports {
		x.fail(stopped)
	}
	e.load, e.queued = infer.Load{KVMaxBlocks: e.load.KVMaxBlocks}, 0
	e.p.Links.close()
}

// hear takes in what happened.
func (e *Engine) hear(p *packet) {
	e.heard.Store(true)
	e.mu.Lock()
	e.load, e.queued, e.taken = p.Load, p.Queued, p.Taken
	if len(p.Cards) > 0 {
		e.cards = p.Cards
	}
	e.mu.Unlock()
	for i := range p.Items {
		it := &p.Items[i]
		switch {
		case it.Call != 0:
		case it.KV != nil:
			e.changed(*it.KV)
		case it.Drained:
			close(e.drained)
		case it.Ended:
			close(e.ended)
		default:
			e.happened(it)
		}
	}
}

// changed passes on what the rank stored or dropped.
func (e *Engine) changed(ev kvevent.Event) {
	e.mu.Lock()
	tell := e.tell
	if tell == nil {
		e.untold = append(e.untold, ev)
	}
	e.mu.Unlock()
	if tell != nil {
		tell(ev)
	}
}

// happened takes in what happened to a sequence.
func (e *Engine) happened(it *item) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.exports[it.Of]; x != nil && (len(it.Spans) > 0 || it.End != nil) {
		x.add(it.Spans)
		if it.End != nil {
			x.fail(it.End.error())
		}
	}
	s := e.seqs[it.Of]
	switch {
	case s == nil:
	case it.Done != nil:
		d := it.Done.done(e.o.Rank)
		s.out.Give(it.Tokens, nil)
		s.end(d)
		delete(e.seqs, it.Of)
	case len(it.Tokens) > 0:
		s.out.Give(it.Tokens, nil)
	}
}

// Run lasts as long as the rank: until ctx ends, or its engine has, or the process is lost.
func (e *Engine) Run(ctx context.Context) error {
	inner, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { e.watch(inner) })
	select {
	case <-ctx.Done():
	case <-e.ended:
	case <-e.gone:
	}
	cancel()
	watching.Wait()
	limited, release := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
	defer release()
	it, err := e.orders.call(limited, order{Do: stop}, nil, nil)
	if it == nil {
		e.Abandon(fmt.Errorf("it does not end: %w", err))
		<-e.gone
		return e.goneErr
	}
	e.final = it
	return err
}

// stopWait is how long a rank may take to end its engine.
const stopWait = 15 * time.Second

// watch asks the rank for a sign of life, so that one that hangs is found also when nobody waits for it.
func (e *Engine) watch(ctx context.Context) {
	const signs = 4 // in a deadline
	tick := time.NewTicker(max(e.o.Deadline/signs, time.Millisecond))
	defer tick.Stop()
	for silent := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-e.gone:
			return
		case <-tick.C:
		}
		if silent++; e.heard.Swap(false) {
			silent = 0
		}
		if silent > signs {
			e.Abandon(fmt.Errorf("nothing was heard of its process %d for %v", e.p.PID(), e.o.Deadline))
			return
		}
		if silent <= 1 { // one sign is enough: a process that hangs is not buried in questions
			e.orders.tell(order{Do: sign})
		}
	}
}

// Close ends the process. Run has ended, or was never called.
func (e *Engine) Close() error {
	defer e.reads.Wait()
	if e.Lost() { // it hangs or is gone, which Run has said: it need not be waited for
		_ = e.p.Kill()
		_ = e.p.Close()
		return nil
	}
	return e.p.Close()
}

// Load is the rank's newest.
func (e *Engine) Load() infer.Load {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.load
}

// CardClocks is what the rank said last of the clocks of its cards; their reference is its own clock. The list must not be changed.
func (e *Engine) CardClocks() []clock.Estimate {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cards
}

// Queued is the number of requests that never had a slot: what the rank said, and what it was given since.
func (e *Engine) Queued() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.queued + int(max(e.given.Load()-e.taken, 0))
}

// Drain implements gpu/ranks's executor, as do the methods below; see engine.Engine.
func (e *Engine) Drain() { e.orders.tell(order{Do: drain}) }

// Drained is closed when the rank was told to drain and holds nothing any more.
func (e *Engine) Drained() <-chan struct{} { return e.drained }

// LeakedBlocks counts blocks that nobody holds. Those of a process that is lost went with it.
func (e *Engine) LeakedBlocks() int {
	n, _ := e.audit()
	return n
}

// Check verifies the books of the rank.
func (e *Engine) Check() error {
	_, err := e.audit()
	return err
}

func (e *Engine) audit() (leaked int, err error) {
	it := e.final
	if it == nil {
		if it, err = e.orders.call(context.Background(), order{Do: audit}, nil, nil); it == nil {
			if errors.Is(err, ErrGone) {
				return 0, nil
			}
			return 0, err
		}
	}
	return it.Count, it.Books.error()
}

// StartProfile opens a profile window.
func (e *Engine) StartProfile(ctx context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return rows.ProfileWindow{}, fmt.Errorf("profile of rank %d: %w", e.o.Rank, err)
	}
	return e.window(ctx, order{Do: profile, JSON: b})
}

// StopProfile ends the window.
func (e *Engine) StopProfile(ctx context.Context) (rows.ProfileWindow, error) {
	return e.window(ctx, order{Do: cease})
}

func (e *Engine) window(ctx context.Context, o order) (w rows.ProfileWindow, err error) {
	it, err := e.orders.call(ctx, o, nil, nil)
	if it != nil && len(it.JSON) > 0 {
		err = errors.Join(err, json.Unmarshal(it.JSON, &w))
	}
	return w, err
}

// Left is what the rank had not told when its engine ended: nothing of a process that is lost.
func (e *Engine) Left() (list []rows.Row, carried bool, iter int64) {
	if it := e.final; it != nil {
		return it.Rows, it.Carry, it.Iter
	}
	return nil, false, 0
}

// Lost tells whether the process was lost.
func (e *Engine) Lost() bool {
	select {
	case <-e.gone:
		return true
	default:
		return false
	}
}

// Last makes the rank tell the rest in a row of an iteration.
func (e *Engine) Last(iter int64) []rows.Row {
	ctx, cancel := context.WithTimeout(context.Background(), stopWait)
	defer cancel()
	it, err := e.orders.call(ctx, order{Do: last, Iter: iter}, nil, nil)
	if err != nil {
		e.o.Logger.Warn("the last row of a rank is lost", "rank", e.o.Rank, "error", err)
		return nil
	}
	return it.Rows
}
