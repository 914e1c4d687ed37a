package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/gpu/backend"
)

// ErrHung is returned by Run when the device does not end a step, a copy of KV or a call.
var ErrHung = errors.New("engine: the device hangs")

const (
	// stepSlack is how many times longer a step may take than steps have lately taken.
	stepSlack = 10
	// stepTokens is how many tokens take about as long as what a step does once for all of its tokens, such as reading the weights.
	stepTokens = 32
	// paceMemory is how many steps are remembered, so that one that the process slept through does not count for ever.
	paceMemory = 64
	// looksInDeadline is how often the watch looks in the shortest time that a step may take.
	looksInDeadline = 16
	// stuckWait is how long the loop may take to hear that the device hangs. After it the loop hangs too.
	stuckWait = time.Second
	// taken is watch.calls of an engine that was ended while its loop was in a call.
	taken = -1
)

// pace is how long steps take: in proportion to their tokens and stepTokens more, as the slowest of the last ones did. It is pure.
type pace struct {
	least   time.Duration // that a step may take
	perNS   float64       // of a token
	learned bool
}

// newPace is that of an unknown device: it may take the least time for stepTokens tokens in its first step, and more for more.
func newPace(least time.Duration) pace {
	return pace{least: least, perNS: float64(least) / stepSlack / stepTokens}
}

// learn takes in a step that has ended.
func (p *pace) learn(tokens int, took int64) {
	perNS := float64(took) / float64(tokens+stepTokens)
	if p.learned {
		perNS = max(perNS, p.perNS*(1-1./paceMemory))
	}
	p.perNS, p.learned = perNS, true
}

// limit is how long a step may take.
func (p *pace) limit(tokens int) time.Duration {
	return max(p.least, time.Duration(stepSlack*p.perNS*float64(tokens+stepTokens)))
}

// watch sees that the device does not end a step, a copy of KV or a call of the back end. Whoever waits for these says so; another
// goroutine looks at them.
type watch struct {
	pace  pace          // owned by the engine's goroutine, as since is
	since int64         // when the oldest step in flight became that, in ns
	hung  chan struct{} // closed when something takes too long
	err   error         // what; to be read when hung is closed
	calls atomic.Int64  // of the back end that the loop has begun and ended: odd while it is in one

	mu     sync.Mutex // guards the fields below
	oldest running
	copies []*backend.Copy // whose end nobody has seen, in the order in which they were queued
}

// running is a step on the device.
type running struct {
	iter              int64 // 0: there is none
	sequences, tokens int
	limit             time.Duration
}

func newWatch(least time.Duration) watch {
	return watch{pace: newPace(least), hung: make(chan struct{})}
}

// begins says which step is the oldest in flight from now on; nil: none is.
func (w *watch) begins(f *flight, now int64) {
	r := running{}
	if f != nil {
		r = running{f.batch.Iter, len(f.items), f.tokens, w.pace.limit(f.tokens)}
	}
	w.since = now
	w.mu.Lock()
	w.oldest = r
	w.mu.Unlock()
}

// begun says that a copy was queued; ended or await must follow.
func (w *watch) begun(c *backend.Copy) *backend.Copy {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.copies = append(w.copies, c)
	return c
}

// await waits for a copy that has begun, or for the end of the engine: a hung device keeps the blocks, but must not hold who waits. What
// it may still write to the copy's memory goes nowhere, for nothing is handed over any more.
func (w *watch) await(c *backend.Copy) error {
	select {
	case <-c.Done():
	case <-w.hung:
		return fmt.Errorf("%w: %w", ErrStopped, w.err)
	}
	w.ended(c)
	return c.Err
}

// ended says that the end of a copy was seen.
func (w *watch) ended(c *backend.Copy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.Index(w.copies, c)
	w.copies = slices.Delete(w.copies, i, i+1)
}

// copying is the oldest copy that the device has not ended; nil: there is none. Who queued one may wait for something else before it
// says ended, such as a disk. The mutex is held.
func (w *watch) copying() *backend.Copy {
	for _, c := range w.copies {
		select {
		case <-c.Done():
		default:
			return c
		}
	}
	return nil
}

// enter comes before a call of the back end by the loop. Until leave the engine may be ended by Run.
func (w *watch) enter() (call int64) { return w.calls.Add(1) }

// leave comes after the call. If the engine was ended meanwhile nothing of it is the loop's any more, and the goroutine ends here.
func (w *watch) leave(call int64) {
	if !w.calls.CompareAndSwap(call, call+1) {
		runtime.Goexit()
	}
}

// take makes the engine the caller's if the loop is in a call.
func (w *watch) take() bool {
	call := w.calls.Load()
	return call%2 == 1 && w.calls.CompareAndSwap(call, taken)
}

// watched takes note that the oldest step has ended.
func (e *Engine) watched(f *flight, now int64) {
	w := &e.watch
	if !f.synthetic {
		w.pace.learn(f.tokens, now-w.since)
	}
	if len(e.flights) == 0 {
		w.begins(nil, now)
		return
	}
	w.begins(e.flights[0], now)
}

// stare is how long the same thing has been seen, zero being none.
type stare[T comparable] struct {
	at    T
	lasts time.Duration
}

// sees takes in a look at a thing after some time.
func (s *stare[T]) sees(thing T, after time.Duration) time.Duration {
	var none T
	if thing == none || thing != s.at {
		*s = stare[T]{at: thing}
		return 0
	}
	s.lasts += after
	return s.lasts
}

// run looks until ctx ends, or something hangs. It counts its looks and not the time between them: while the process was stopped
// the device had no chance. Copies and calls may take as long as the step beside them.
func (w *watch) run(ctx context.Context) {
	every := max(w.pace.least/looksInDeadline, time.Millisecond)
	tick := time.NewTicker(every)
	defer tick.Stop()
	var step, call stare[int64]
	var copying stare[*backend.Copy]
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		r, c := w.oldest, w.copying()
		w.mu.Unlock()
		in := w.calls.Load()
		if in%2 == 0 {
			in = 0
		}
		beside := max(w.pace.least, r.limit)
		stepLasts, copyLasts, callLasts := step.sees(r.iter, every), copying.sees(c, every), call.sees(in, every)
		switch {
		case stepLasts > 0 && stepLasts >= r.limit:
			w.err = fmt.Errorf("%w: step %d of %d sequences and %d tokens has not ended after %v", ErrHung, r.iter, r.sequences, r.tokens, stepLasts)
		case copyLasts >= beside:
			w.err = fmt.Errorf("%w: a copy of KV has not ended after %v", ErrHung, copyLasts)
		case callLasts >= beside:
			w.err = fmt.Errorf("%w: its back end has not come back after %v", ErrHung, callLasts)
		default:
			continue
		}
		close(w.hung)
		return
	}
}

// Run is the loop. It returns when ctx ends, after the work in flight, with nil; or when the device is lost, with its
// error. All sequences, exports and reservations then have ended with ErrStopped. It may be called once.
//
// A device that hangs is lost too, whether or not it comes back: nothing is known of what it will do with the memory of those that
// have ended. If it holds the loop itself, inside a call, Run ends all in its place.
func (e *Engine) Run(ctx context.Context) error {
	looking, blind := context.WithCancel(context.Background())
	var looks sync.WaitGroup
	looks.Go(func() { e.watch.run(looking) })
	defer looks.Wait()
	defer blind()
	ended := make(chan error, 1)
	go func() { ended <- e.loop(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-e.watch.hung:
	}
	stuck := time.NewTimer(stuckWait)
	defer stuck.Stop()
	select {
	case err := <-ended:
		return err
	case <-stuck.C:
	}
	err := fmt.Errorf("%w, and so does the engine", e.watch.err)
	if !e.watch.take() {
		return err // it holds the loop in something else: nothing has ended
	}
	if f := e.submitting; f != nil {
		f.step = backend.NewStep(f.batch.Iter)
		e.flights = append(e.flights, f)
	}
	return e.stop(err)
}
