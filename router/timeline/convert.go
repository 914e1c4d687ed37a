package timeline

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// stateNone marks a phase that could not be aligned.
const stateNone = "none"

// Clocks says how stamps get onto the reference clock.
type Clocks struct {
	// Reference is used when the request has no record of its router.
	Reference clock.ID
	// Estimate gives the estimate of a clock (by its id) that was valid when the clock showed localNS. nil: none.
	Estimate func(id clock.ID, localNS int64) (clock.Estimate, bool)
	// Wall turns a stamp of the reference clock into UTC. nil: lines carry no wall time.
	Wall func(referenceNS int64) int64
}

// estimate picks what converts a stamp of c: the merge's own estimate, else the one that the record's process knew. Equal
// epochs prove nothing by themselves: machines cloned from one snapshot have them too.
func (c Clocks) estimate(ref clock.ID, from phase.Clock, ns int64) (clock.Estimate, bool) {
	fits := func(e clock.Estimate) bool {
		_, _, ok := e.Convert(ns)
		return ok && e.Reference.Epoch() == ref.Epoch() && e.Local.Epoch() == from.ID.Epoch()
	}
	if from.ID.Epoch() == "" || ref.Epoch() == "" {
		return clock.Estimate{}, false
	}
	if from.ID == ref { // the same process
		return clock.Estimate{Reference: ref, Local: from.ID, AtNS: ns, State: clock.Identity}, true
	}
	if c.Estimate != nil {
		if e, ok := c.Estimate(from.ID, ns); ok && fits(e) {
			return e, true
		}
	}
	if from.Estimate != nil && fits(*from.Estimate) {
		return *from.Estimate, true
	}
	return clock.Estimate{}, false
}

// point is a stamp on the reference clock, relative to the line's start.
type point struct {
	at, bound int64
	ok        bool // the stamp exists and could be converted
}

// source is one record with everything that its conversion needs.
type source struct {
	Part
	rank   *RankClock // nil: all stamps are the node's
	clock  phase.Clock
	est    clock.Estimate
	ok     bool              // aligned
	bound  int64             // largest so far
	origin int64             // reference ns of the line's start
	points [pointCount]point // see pointNames
}

// place converts one raw stamp: the only place where that happens.
func (s *source) place(ns int64) point {
	if !s.ok {
		return point{}
	}
	ref, bound, ok := s.est.Convert(ns)
	if !ok {
		return point{}
	}
	bound += s.same()
	s.bound = max(s.bound, bound)
	return point{at: ref - s.origin, bound: bound, ok: true}
}

func (s *source) stamp(ns *int64) point {
	if ns == nil {
		return point{}
	}
	return s.place(*ns)
}

// choose takes the clock of the record, and the estimate by its first stamp.
func (s *source) choose(c Clocks, ref clock.ID) {
	r := s.Record
	if i := r.Stamps.Clock; i >= 0 && i < len(r.Clocks) {
		s.clock = r.Clocks[i]
	} else {
		s.clock = phase.Clock{ID: r.Instance}
	}
	for _, f := range r.Stamps.All() {
		if *f.NS != nil {
			s.est, s.ok = c.estimate(ref, s.clock, **f.NS)
			break
		}
	}
}
