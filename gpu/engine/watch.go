package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrHung is returned by Run when the device does not end a step.
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
	// stuckWait is how long the loop may take to hear of a step that hangs. After it the loop hangs too.
	stuckWait = time.Second
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

// watch sees that the device does not end a step. The engine's goroutine says what runs; another one looks at it, so that it
// also sees an engine that waits inside a call of the back end.
type watch struct {
	pace  pace          // owned by the engine's goroutine, as since is
	since int64         // when the oldest step in flight became that, in ns
	hung  chan struct{} // closed when a step takes too long
	err   error         // why; to be read when hung is closed

	mu     sync.Mutex // guards oldest
	oldest running
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

// run looks until ctx ends, or a step hangs. It counts its looks and not the time between them: while the process was stopped
// the device had no chance.
func (w *watch) run(ctx context.Context) {
	every := max(w.pace.least/looksInDeadline, time.Millisecond)
	tick := time.NewTicker(every)
	defer tick.Stop()
	var seen int64
	var lasts time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		r := w.oldest
		w.mu.Unlock()
		if r.iter == 0 || r.iter != seen {
			seen, lasts = r.iter, 0
			continue
		}
		if lasts += every; lasts >= r.limit {
			w.err = fmt.Errorf("%w: step %d of %d sequences and %d tokens has not ended after %v", ErrHung, r.iter, r.sequences, r.tokens, lasts)
			close(w.hung)
			return
		}
	}
}

// Run is the loop. It returns when ctx ends, after the work in flight, with nil; or when the device is lost, with its
// error. All sequences, exports and reservations then have ended with ErrStopped. It may be called once.
//
// A device that hangs is lost too, whether or not the step comes back: nothing is known of what it will do with the memory
// of those that have ended. If it holds the loop itself, inside a call, Run returns without it, and nothing else has ended.
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
		return fmt.Errorf("%w, and so does the engine", e.watch.err)
	}
}
