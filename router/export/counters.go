package export

import (
	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/rows"
)

// counter is the value that a track of numbers has from a moment on.
type counter struct {
	process, track string
	at, value      int64
}

// axis is where the stamps of a clock are on the axis of the trace, as the newest line tells that refers to it.
type axis struct {
	estimate clock.Estimate
	shift    int64 // of the reference clock
	boundNS  int64 // 0: it is the reference clock, or no bound is known
}

// at is where a stamp of the clock is.
func (a axis) at(ns int64) int64 { return ns + a.estimate.OffsetAt(ns) + a.shift }

// maxClocks bounds how many clocks are known at a time; a process has one.
const maxClocks = 1 << 16

// clock notes the clock of a phase, and counts its bound.
func (y *layout) clock(l *timeline.Line, p *timeline.Phase) {
	c := &p.Clock
	if c.OffsetNS == nil {
		return
	}
	if y.clocks == nil || len(y.clocks) > maxClocks {
		y.clocks = map[clock.ID]axis{}
	}
	at := base(l)
	a := axis{estimate: clock.Estimate{OffsetNS: *c.OffsetNS, SkewPPB: c.SkewPPB, AtNS: c.AtNS}, shift: at - l.StartNS}
	if c.BoundNS != nil {
		a.boundNS = *c.BoundNS
	}
	y.clocks[c.ID] = a
	if k := p.Rank; k != nil && k.State != "none" { // a rank that is a process stamps with a clock of its own
		a.estimate.OffsetNS += k.OffsetNS
		a.estimate.AtNS -= k.OffsetNS
		a.boundNS += k.BoundNS
		y.clocks[k.ID] = a
	}
	if begun, ok := p.At("receive_ns"); ok && c.BoundNS != nil && c.ID != l.Reference {
		y.counters = append(y.counters, counter{p.Node, "clock bound (ns)", at + begun, *c.BoundNS})
	}
}

// row gives what a row of iterations counts. Rows of a clock that no line refers to cannot be placed.
func (y *layout) row(s *rows.Static, r *rows.Row) (list []counter) {
	id := s.ClockID
	if r.RankClock != "" {
		id = r.RankClock
	}
	where, ok := y.clocks[clock.ID(id)]
	if !ok {
		return nil
	}
	at := where.at(r.StartNS)
	rank := "" // a node of one rank does not number it
	if r.Rank > 0 {
		rank = ranked(int(r.Rank))
	}
	add := func(track string, v int64) { list = append(list, counter{s.Node, track, at, v}) }
	if r.KV.Sampled {
		add("KV blocks used"+rank, r.KV.Used)
	}
	if r.Rank == 0 { // whose the queue is
		add("requests waiting", r.Requests.Queued)
	}
	add("requests running"+rank, r.Requests.Active)
	return list
}
