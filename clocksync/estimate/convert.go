package estimate

import (
	"math"

	"meridian.internal/shared/clock"
)

// Interval is the offset at one moment: the truth lies within [LowerNS, UpperNS], OffsetNS is the best guess inside.
type Interval struct{ OffsetNS, LowerNS, UpperNS int64 }

// BoundNS is how far OffsetNS may be from the truth.
func (i Interval) BoundNS() int64 { return max(i.UpperNS-i.OffsetNS, i.OffsetNS-i.LowerNS) }

// At returns the offset at local time n, past or future, from all samples taken so far: those after n too. Not ok: nothing
// is known of n.
func (e *Estimator) At(n int64) (Interval, bool) {
	if e.cur == nil {
		return Interval{}, false
	}
	if e.cur.x(n) >= e.cur.first || len(e.closed) == 0 {
		return e.cur.at(n)
	}
	next := e.cur
	for i := len(e.closed) - 1; i >= 0; i-- {
		s := e.closed[i]
		if s.x(n) > s.last { // between the segments nobody knows when the step was: both are possible
			a, ok1 := s.at(n)
			b, ok2 := next.at(n)
			return union(a, b), ok1 && ok2
		}
		if s.contains(s.x(n)) || i == 0 && !e.forgot {
			return s.at(n)
		}
		next = s
	}
	return Interval{}, false
}

func union(a, b Interval) Interval {
	lo, up := min(a.LowerNS, b.LowerNS), max(a.UpperNS, b.UpperNS)
	return Interval{OffsetNS: lo + (up-lo)/2, LowerNS: lo, UpperNS: up}
}

func (s *segment) at(n int64) (Interval, bool) {
	x := s.x(n)
	lo, up, ok := s.bounds(x)
	if !ok || lo > up {
		return Interval{}, false
	}
	p := (lo + up) / 2
	if g, ok := s.guess(x); ok {
		p = min(max(g, lo), up)
	}
	add, err := s.back(n, p)
	lo, p, up = lo+add-err, p+add, up+add+err
	return Interval{
		OffsetNS: s.baseV + int64(math.Round(p)),
		LowerNS:  s.baseV + int64(math.Floor(lo)) - 1,
		UpperNS:  s.baseV + int64(math.Ceil(up)) + 1,
	}, true
}

// guess is the point estimate at x: with bursts on both sides of x nothing is extrapolated.
func (s *segment) guess(x float64) (float64, bool) {
	if n := len(s.points.mids); n > 0 && x < s.points.mids[n-1].x {
		return s.points.around(x)
	}
	l, ok := s.points.newest()
	return l.at(x), ok
}

// Skew returns d(offset)/d(local) at n and how far it may be off, in ppb.
func (e *Estimator) Skew(n int64) (ppb, errPPB int64) {
	if e.cur == nil {
		return 0, 0
	}
	b1, b2 := e.cur.skew(e.cur.x(n))
	b := (b1 + b2) / 2
	if l, ok := e.cur.points.newest(); ok {
		b = min(max(l.b, b1), b2)
	}
	half := max(b2-b, b-b1)
	if e.cur.raw != nil {
		rr, er := e.slew.ref.rate()
		rn, en := e.slew.local.rate()
		b, half = b+rn-rr, half+er+en
	}
	return int64(math.Round(b * 1e9)), int64(math.Ceil(half*1e9)) + 1
}

// Duration is how long n1 to n2 lasted on the reference clock, for two stamps of the local clock, and how far that may be
// off: the rate alone, not the difference of two offsets with a bound each.
func (e *Estimator) Duration(n1, n2 int64) (ns, errNS int64) {
	ppb, err := e.Skew(n2)
	d := float64(n2 - n1)
	eta := e.lim.eta * d * d
	return n2 - n1 + int64(math.Round(d*float64(ppb)*1e-9)), int64(math.Ceil(math.Abs(d)*float64(err)*1e-9 + eta))
}

// Estimate states what is known at local time n, as it travels. It is also right for other moments, with the growth that
// it carries.
func (e *Estimator) Estimate(n int64) clock.Estimate {
	r := clock.Estimate{Reference: e.ref, Local: e.local, AtNS: n, State: clock.Joining, RTTNS: e.rtt, Samples: e.stats.Exchanges}
	iv, ok := e.At(n)
	if !ok {
		if e.cur != nil {
			r.State = clock.Void
		}
		return r
	}
	r.OffsetNS, r.LowerNS, r.UpperNS = iv.OffsetNS, iv.LowerNS, iv.UpperNS
	r.SkewPPB, r.SkewErrPPB = e.Skew(n)
	r.EtaPPBPerS = int64(math.Ceil(e.lim.eta * 1e18))
	r.ValidFromNS = e.validFrom()
	r.VoidAfterNS = e.newest + int64(e.cfg.VoidAfter)
	r.State = e.state(n, iv)
	return r
}

// preStart is how long before the first sample stamps may be converted, backwards along the cone: a node that joins has
// perhaps stamped something already.
const preStart = 60e9

// validFrom is where the current segment begins: an earlier stamp belongs to the time before a step.
func (e *Estimator) validFrom() int64 {
	from := e.cur.when(e.cur.first)
	if len(e.closed) == 0 {
		return from - preStart
	}
	return from
}

func (e *Estimator) state(n int64, iv Interval) clock.State {
	age := n - e.newest
	switch {
	case e.jailed:
		return clock.Quarantined
	case e.stats.Exchanges < int64(e.cfg.MinExchanges):
		return clock.Joining
	case iv.BoundNS() > int64(e.cfg.VoidErr) || age > int64(e.cfg.VoidAfter):
		return clock.Void
	case len(e.fails) > 0 && n-e.fails[len(e.fails)-1] <= int64(suspectFor):
		return clock.Suspect
	case age > 3*int64(e.Interval())+int64(minInterval):
		return clock.Holdover
	case iv.BoundNS() > int64(e.cfg.MaxErr):
		return clock.Joining
	}
	return clock.Synced
}

// LocalAt is about what the local clock shows when the reference shows ref.
func (e *Estimator) LocalAt(ref int64) int64 {
	if e.cur == nil {
		return ref
	}
	n := ref - e.cur.baseV
	l, ok := e.cur.points.newest()
	for i := 0; ok && i < 3; i++ {
		v := l.at(e.cur.x(n))
		add, _ := e.cur.back(n, v)
		n = ref - e.cur.baseV - int64(v+add)
	}
	return n
}

// Past states what is known by now of local time n, for a stamp that was taken then, and for others of the same segment, with
// the growth that it carries. A clock that is stale by now was not stale then, so only the bound and a quarantine decide.
func (e *Estimator) Past(n int64) clock.Estimate {
	r := e.Estimate(n)
	if r.State == clock.Holdover || r.State == clock.Joining && r.LowerNS < r.UpperNS && r.BoundNS() <= int64(e.cfg.VoidErr) {
		r.State = clock.Synced
	}
	if r.Usable() && n < e.validFrom() { // of a segment that has ended: the rate of the current one says nothing about it
		r.ValidFromNS, r.VoidAfterNS = n, n
	}
	return r
}

// Newest is the local time of the newest burst. Not ok: there was none.
func (e *Estimator) Newest() (n int64, ok bool) { return e.newest, e.cur != nil }

// RTTNS is the least round trip of the newest burst.
func (e *Estimator) RTTNS() int64 { return e.rtt }
