package timeline

import (
	"math"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// RankClock is the clock of the rank that ran a phase, where the rank is a process of its own: what the engine stamped is brought
// onto the clock of the node by it, and then is like the node's own stamps, but for the bound.
type RankClock struct {
	ID       clock.ID
	State    string // of the estimate; "none": the engine's stamps are left out
	OffsetNS int64  // of the rank's clock to the node's
	BoundNS  int64
}

// onNodeClock gives a part whose stamps are all of its node's clock. The record is only read. nil: they were.
func onNodeClock(p Part) (Part, *RankClock) {
	r := p.Record
	if r.Stamps.EngineClock <= 0 || r.Stamps.EngineClock >= len(r.Clocks) {
		return p, nil
	}
	c := &r.Clocks[r.Stamps.EngineClock]
	rank := &RankClock{ID: c.ID, State: stateNone}
	m := mover{rank: rank}
	if e := c.Estimate; e != nil && e.Usable() && e.Local.Epoch() == c.ID.Epoch() && e.Reference.Epoch() == r.Clocks[r.Stamps.Clock].ID.Epoch() {
		m.est, rank.State, rank.OffsetNS = e, e.State, e.OffsetNS
	}
	moved := m.part(p)
	if !m.ok() { // some were moved before the one that could not be
		moved, rank.BoundNS = m.part(p), 0
	}
	return moved, rank
}

// mover converts stamps of a rank.
type mover struct {
	est  *clock.Estimate // nil: it cannot
	rank *RankClock
}

// part moves the stamps of a part; where it cannot, they are left out.
func (m *mover) part(p Part) Part {
	own := *p.Record
	own.Stamps.EngineClock = 0
	for _, at := range own.Stamps.Engine() {
		if *at == nil {
			continue
		}
		if ns := m.move(**at); m.ok() {
			*at = &ns
		} else {
			*at = nil
		}
	}
	own.Chunks = m.chunks(p.Record.Chunks)
	p.Record, p.Steps = &own, m.steps(p.Steps)
	return p
}

func (m *mover) ok() bool { return m.est != nil }

// move converts one stamp. One that the estimate does not reach makes all of them unknown.
func (m *mover) move(ns int64) int64 {
	if m.est == nil {
		return 0
	}
	at, bound, ok := m.est.Convert(ns)
	if !ok {
		m.est, m.rank.State = nil, stateNone
	}
	m.rank.BoundNS = max(m.rank.BoundNS, bound)
	return at
}

func (m *mover) list(in []int64) []int64 {
	out := make([]int64, len(in))
	for i, ns := range in {
		out[i] = m.move(ns)
	}
	return out
}

func (m *mover) chunks(in []infer.Chunk) []infer.Chunk {
	out := make([]infer.Chunk, len(in))
	for i, c := range in {
		c.ForwardStartNS, c.ForwardEndNS, c.SampleEndNS = m.move(c.ForwardStartNS), m.move(c.ForwardEndNS), m.move(c.SampleEndNS)
		c.StageNS = m.list(c.StageNS)
		out[i] = c
	}
	if !m.ok() || len(in) == 0 {
		return nil
	}
	return out
}

func (m *mover) steps(in *infer.Steps) *infer.Steps {
	if in == nil {
		return nil
	}
	out := *in
	out.ForwardStartNS, out.ForwardEndNS, out.SampleEndNS = m.list(in.ForwardStartNS), m.list(in.ForwardEndNS), m.list(in.SampleEndNS)
	out.TokenNS = m.list(in.TokenNS)
	out.StageNS = nil
	for _, stage := range in.StageNS {
		out.StageNS = append(out.StageNS, m.list(stage))
	}
	if !m.ok() {
		return nil
	}
	return &out
}

// same is what the distance of two stamps of one record may be off: nothing on one clock.
func (s *source) same() int64 {
	if s.rank == nil {
		return 0
	}
	return s.rank.BoundNS
}

// restore gives the record of a phase its rank's clock back, and its steps if it has any, so that all is brought onto the node's
// again as it was.
func (k *RankClock) restore(r *phase.Record, s *infer.Steps) {
	c := phase.Clock{ID: k.ID, Kind: "rank"}
	if k.State != stateNone {
		c.Estimate = &clock.Estimate{
			Reference: r.Clocks[0].ID, Local: k.ID, OffsetNS: k.OffsetNS, LowerNS: k.OffsetNS - k.BoundNS, UpperNS: k.OffsetNS + k.BoundNS, State: k.State,
			ValidFromNS: math.MinInt64,
		}
	}
	r.Stamps.EngineClock, r.Clocks = len(r.Clocks), append(r.Clocks, c)
	for _, at := range r.Stamps.Engine() {
		if *at != nil {
			ns := **at - k.OffsetNS
			*at = &ns
		}
	}
	for i := range r.Chunks {
		h := &r.Chunks[i]
		h.ForwardStartNS, h.ForwardEndNS, h.SampleEndNS = h.ForwardStartNS-k.OffsetNS, h.ForwardEndNS-k.OffsetNS, h.SampleEndNS-k.OffsetNS
		for j := range h.StageNS {
			h.StageNS[j] -= k.OffsetNS
		}
	}
	if s == nil {
		return
	}
	for _, list := range append([][]int64{s.ForwardStartNS, s.ForwardEndNS, s.SampleEndNS, s.TokenNS}, s.StageNS...) {
		for i := range list {
			list[i] -= k.OffsetNS
		}
	}
}
