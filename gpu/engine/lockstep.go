package engine

import (
	"fmt"

	"meridian.internal/gpu/collective"
	"meridian.internal/shared/rows"
)

// Peers joins an engine to those of other ranks: before each iteration it comes to a round of them, so that all build their
// iterations with the same number at the same time. A rank that has nothing to run comes along with an empty one. While no
// rank has anything to run there is no round.
type Peers struct {
	Member collective.Member[Word]
	// Tell completes what this rank says in a round. it holds what was counted since the last step if the rank is idle, else it
	// is nil: a step will tell.
	Tell func(w *Word, it *Iteration)
	// Hear is told what all ranks said. it is nil unless all are idle: then there is no iteration. Without words the engine has
	// ended.
	Hear func(words []Word, it *Iteration)
	// Gather tells whether all ranks come to another round before they go on, with what this one says in it; its answer follows
	// from the words alone, so that it is that of all. Then those of the other round count. nil: there never is one.
	Gather func(words []Word) (Word, bool)
	// Unsaid tells whether this rank has something to say though it is idle. it holds what was counted since the last step.
	Unsaid func(it *Iteration) bool
}

// Word is what a rank says in a round: its state, and the statistics of its iterations since the round before.
type Word struct {
	Idle    bool  // nothing to run, nothing in flight
	Carried bool  // it has counts that no row tells
	Made    int64 // rows that it has made since the start; 0 where they come with the words
	Rows    []rows.Row
}

// lockstep is where an engine stands between two iterations. Only the engine's goroutine uses it.
type lockstep struct {
	round   int64 // at which it has arrived, or will next
	called  bool  // others wait for it
	arrived bool
	gathers bool // at a round that follows another
	granted bool // the next iteration may be built
	barren  bool // what there is to run could not be: only something new makes another round worth it
}

// arrive comes to the next round when it can build an iteration, and has one to build or is waited for. All ranks do so at
// this one place of their loops.
func (e *Engine) arrive() error {
	p, s := e.cfg.Peers, &e.step
	for p != nil && len(e.flights) > 0 && e.flights[0].synthetic {
		// It is done. A rank that is not idle has a step on the device: it will have something to say when that ends. So the last
		// round before a pause finds all idle, and all they know is told in it.
		if err := e.collect(); err != nil {
			return err
		}
	}
	if p == nil || s.arrived || s.granted || len(e.flights) == e.depth() {
		return nil
	}
	work := !s.barren && e.sched.Due()
	idle := !work && len(e.flights) == 0
	if !work && !s.called && !(idle && e.hasSay(p)) {
		return nil
	}
	w := Word{Idle: idle}
	if idle {
		p.Tell(&w, e.look())
		e.interval.reset()
	} else {
		p.Tell(&w, nil)
	}
	s.round++
	s.arrived, s.called = true, false
	if err := p.Member.Arrive(s.round, w); err != nil {
		return fmt.Errorf("engine: rank %d: %w", e.cfg.Rank, err)
	}
	return nil
}

func (e *Engine) hasSay(p *Peers) bool {
	unsaid := p.Unsaid(e.look())
	e.interval.reset()
	return unsaid
}

// meeting are the channels of the other ranks; nil, which nobody ever hears of, if there are none.
func (e *Engine) meeting() (called <-chan struct{}, released <-chan collective.Round[Word]) {
	if p := e.cfg.Peers; p != nil {
		return p.Member.Called(), p.Member.Released()
	}
	return nil, nil
}

// released takes in the words of a round.
func (e *Engine) released(r collective.Round[Word]) error {
	if r.Err != nil {
		return fmt.Errorf("engine: rank %d: %w", e.cfg.Rank, r.Err)
	}
	p, s := e.cfg.Peers, &e.step
	s.arrived = false
	if again, more := s.gather(p, r.Words); more {
		s.round++
		s.arrived, s.called = true, false
		if err := p.Member.Arrive(s.round, again); err != nil {
			return fmt.Errorf("engine: rank %d: %w", e.cfg.Rank, err)
		}
		return nil
	}
	for i := range r.Words {
		if !r.Words[i].Idle {
			s.granted = true
			p.Hear(r.Words, nil)
			return nil
		}
	}
	p.Hear(r.Words, e.look())
	e.interval.reset()
	return nil
}

// gather tells whether another round follows that of these words, and what to say there. No third one follows.
func (s *lockstep) gather(p *Peers, words []Word) (Word, bool) {
	if p.Gather == nil || s.gathers {
		s.gathers = false
		return Word{}, false
	}
	w, more := p.Gather(words)
	s.gathers = more
	return w, more
}

// mayBuild tells whether the next iteration may be built now.
func (e *Engine) mayBuild() bool { return e.cfg.Peers == nil || e.step.granted }

// built takes note that it was.
func (e *Engine) built(entries int) {
	e.step.granted = false
	e.step.barren = entries == 0
}
