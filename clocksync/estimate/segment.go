package estimate

import (
	"math"

	"meridian.internal/clocksync/ntp"
)

// limits are the declared limits of one clock pair, in the units of the arithmetic.
type limits struct {
	rho float64 // s/s
	eta float64 // (s/s)/ns
}

// segment is a stretch of one epoch in which the offset moved within the limits. A step ends it. Inside, everything is
// float64 relative to the bases.
type segment struct {
	baseX, baseV int64
	lim          limits
	lo, up       chain
	points       liner
	first, last  float64 // x of the oldest and the newest bound
	coneUntil    float64 // until this x the slope limit alone is trusted
	ahead        [2]float64
	live         strip // at last; valid while liveOK
	liveOK       bool
	raw          *slews  // not nil: x and v are of the raw clocks
	rawX, rawV   float64 // shift at the base, so that the numbers stay small
}

func newSegment(e ntp.Exchange, lim limits, raw *slews) *segment {
	s := &segment{baseX: e.T2, baseV: e.Midpoint(), lim: lim, raw: raw, first: math.Inf(1), last: math.Inf(-1), coneUntil: math.Inf(-1)}
	s.lo.eta, s.up.eta = lim.eta, lim.eta
	s.ahead = [2]float64{math.Inf(-1), math.Inf(-1)}
	if raw != nil {
		s.rawV, _, s.rawX = raw.shift(s.baseX, s.baseV)
	}
	return s
}

// x is local time n in the coordinates of the segment.
func (s *segment) x(n int64) float64 {
	if s.raw == nil {
		return float64(n - s.baseX)
	}
	dn, _ := s.raw.local.diff(n)
	return float64(n-s.baseX) + dn - s.rawX
}

// v is an offset at local time n in the coordinates of the segment, and how far off the mapping may be.
func (s *segment) v(n, offset int64) (v, err float64) {
	if s.raw == nil {
		return float64(offset - s.baseV), 0
	}
	d, err, _ := s.raw.shift(n, offset)
	return float64(offset-s.baseV) + d - s.rawV, err
}

// back is the inverse of v: what to add to a value of the segment at local time n to have an offset relative to baseV.
func (s *segment) back(n int64, v float64) (add, err float64) {
	if s.raw == nil {
		return 0, 0
	}
	// The reference pair is looked up at the reference's time, for which the result is needed: it settles at once, since a
	// slew changes little over what a step of this is off.
	for range 3 {
		var d float64
		d, err, _ = s.raw.shift(n, s.baseV+int64(v+add))
		add = s.rawV - d
	}
	return add, err
}

func (s *segment) empty() bool             { return len(s.lo.all) == 0 || len(s.up.all) == 0 }
func (s *segment) lower(p point)           { s.insert(&s.lo, p, 0) }
func (s *segment) upper(p point)           { s.insert(&s.up, point{p.x, -p.v}, 1) }
func (s *segment) contains(x float64) bool { return x >= s.first && x <= s.last }

func (s *segment) insert(c *chain, p point, side int) {
	c.add(p)
	s.first, s.last = min(s.first, p.x), max(s.last, p.x)
	s.ahead[side] = max(s.ahead[side], p.v+s.lim.rho*p.x)
	s.liveOK = false
}

// halfWidth is half the distance of a burst's best bounds, dv, as if both were of one moment: they are dx apart, and the
// clock moves meanwhile. As long as its slope is not known, the limit counts.
func (s *segment) halfWidth(dx, dv float64) float64 {
	if len(s.points.mids) < windows[0] {
		return dv/2 + s.lim.rho*math.Abs(dx)
	}
	l, _ := s.points.newest()
	return (dv - l.b*dx) / 2
}

// refresh computes the possible slopes at the newest sample. Not ok: the samples contradict the limits.
func (s *segment) refresh() bool {
	if !s.liveOK {
		s.live, s.liveOK = cut(&s.lo, &s.up, s.last, s.lim.rho)
	}
	return s.liveOK
}

// bounds returns the proven interval of the offset at x. Not ok: nothing is proven, or the samples contradict.
func (s *segment) bounds(x float64) (lo, up float64, ok bool) {
	if s.empty() {
		return 0, 0, false
	}
	lo, up = s.cone(x)
	if s.last < s.coneUntil {
		return lo, up, lo <= up
	}
	m := min(max(x, s.first), s.last)
	var st strip
	if m == s.last {
		if !s.refresh() {
			return 0, 0, false
		}
		st = s.live
	} else if st, ok = cut(&s.lo, &s.up, m, s.lim.rho); !ok {
		return 0, 0, false
	}
	h := x - m
	l, u := st.rangeAt(h)
	slack := s.lim.eta / 2 * h * h
	return max(lo, l-slack), min(up, u+slack), true
}

func (s *segment) cone(x float64) (lo, up float64) {
	if x >= s.last {
		return s.ahead[0] - s.lim.rho*x, -(s.ahead[1] - s.lim.rho*x)
	}
	return s.lo.coneAt(x, s.lim.rho), -s.up.coneAt(x, s.lim.rho)
}

// skew returns the possible slopes at the newest sample, widened to x.
func (s *segment) skew(x float64) (b1, b2 float64) {
	if s.empty() || s.last < s.coneUntil || !s.refresh() {
		return -s.lim.rho, s.lim.rho
	}
	d := s.lim.eta * math.Abs(x-s.last)
	return max(s.live.b1-d, -s.lim.rho), min(s.live.b2+d, s.lim.rho)
}

// suffix returns a segment of the newest samples only: the longest that no longer contradict.
func (s *segment) suffix() *segment {
	from, to := 0, len(s.lo.all)-1 // the newest lower bound alone is always possible with the newest upper one
	for from < to {
		mid := (from + to) / 2
		if t := s.between(s.lo.all[mid].x, math.Inf(1)); t.refresh() {
			to = mid
		} else {
			from = mid + 1
		}
	}
	return s.between(s.lo.all[to].x, math.Inf(1))
}

// between returns a segment of the samples in [x, end), with the newest upper bound if there is no end.
func (s *segment) between(x, end float64) *segment {
	t := &segment{baseX: s.baseX, baseV: s.baseV, lim: s.lim, raw: s.raw, rawX: s.rawX, rawV: s.rawV, first: math.Inf(1), last: math.Inf(-1), coneUntil: s.coneUntil}
	t.lo.eta, t.up.eta = s.lim.eta, s.lim.eta
	t.ahead = [2]float64{math.Inf(-1), math.Inf(-1)}
	for _, p := range s.lo.all {
		if p.x >= x && p.x < end {
			t.insert(&t.lo, p, 0)
		}
	}
	for i, p := range s.up.all {
		if p.x >= x && p.x < end || math.IsInf(end, 1) && i == len(s.up.all)-1 {
			t.insert(&t.up, p, 1)
		}
	}
	for _, m := range s.points.mids {
		if m.x >= x && m.x < end {
			t.points.add(m)
		}
	}
	return t
}

// widen loosens all bounds by ns on each side: what follows was measured against another anchor of the same clock.
func (s *segment) widen(ns float64) {
	for _, c := range []*chain{&s.lo, &s.up} {
		for i := range c.all {
			c.all[i].v -= ns
		}
		c.rebuild()
	}
	s.ahead[0] -= ns
	s.ahead[1] -= ns
	s.liveOK = false
}

// forget drops samples older than x. The cone keeps what they proved.
func (s *segment) forget(x float64) {
	if len(s.lo.all) > 0 && s.lo.all[0].x < x {
		s.lo.forget(x)
		s.up.forget(x)
		if !s.empty() {
			s.first = min(s.lo.all[0].x, s.up.all[0].x)
		}
		s.liveOK = false
	}
}

// rebase moves the bases to the newest sample, so that the numbers stay small over months.
func (s *segment) rebase() {
	dx := math.Trunc(s.last)
	l, ok := s.points.newest()
	if !ok {
		return
	}
	dv := math.Trunc(l.at(s.last))
	s.baseX += int64(dx)
	s.baseV += int64(dv)
	for _, side := range []struct {
		c    *chain
		sign float64
	}{{&s.lo, 1}, {&s.up, -1}} {
		for i := range side.c.all {
			side.c.all[i].x -= dx
			side.c.all[i].v -= side.sign * dv
		}
		side.c.rebuild()
	}
	s.ahead[0] += -dv - s.lim.rho*dx
	s.ahead[1] += dv - s.lim.rho*dx
	s.points.kept = false
	for i := range s.points.mids {
		s.points.mids[i].x -= dx
		s.points.mids[i].y -= dv
	}
	s.first, s.last, s.coneUntil = s.first-dx, s.last-dx, s.coneUntil-dx
	s.liveOK = false
}

// translate returns the segment in the coordinates that raw asks for. The way there and back costs the errors of the
// pairs, which widen the bounds.
func (s *segment) translate(raw *slews) *segment {
	t := &segment{baseX: s.baseX, baseV: s.baseV, lim: s.lim, raw: raw, first: math.Inf(1), last: math.Inf(-1)}
	t.lo.eta, t.up.eta = s.lim.eta, s.lim.eta
	t.ahead = [2]float64{math.Inf(-1), math.Inf(-1)}
	if raw != nil {
		t.rawV, _, t.rawX = raw.shift(t.baseX, t.baseV)
	}
	move := func(p point) (point, float64) {
		n := s.when(p.x)
		add, e1 := s.back(n, p.v)
		v, e2 := t.v(n, s.baseV+int64(math.Round(p.v+add)))
		return point{t.x(n), v}, e1 + e2 + 1
	}
	for _, p := range s.lo.all {
		q, e := move(p)
		t.lower(point{q.x, q.v - e})
	}
	for _, p := range s.up.all {
		q, e := move(point{p.x, -p.v})
		t.upper(point{q.x, q.v + e})
	}
	for _, m := range s.points.mids {
		q, e := move(point{m.x, m.y})
		t.points.add(middle{q.x, q.v, m.half + e})
	}
	t.coneUntil = t.x(s.when(max(s.coneUntil, s.first-1)))
	return t
}

// when is local time at x.
func (s *segment) when(x float64) int64 {
	n := s.baseX + int64(math.Round(x))
	if s.raw == nil {
		return n
	}
	for range 3 {
		dn, _ := s.raw.local.diff(n)
		n = s.baseX + int64(math.Round(x-dn+s.rawX))
	}
	return n
}
