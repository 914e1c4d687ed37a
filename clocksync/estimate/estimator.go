package estimate

import (
	"math"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

// Config holds the declared limits and the thresholds of the states. The zero value means the defaults.
type Config struct {
	RhoPPM       float64       // limit on |skew|; too small a number makes bounds that miss. Default 200
	EtaPPMPerS   float64       // limit on |d skew/dt|; likewise. Default 0.1, safe for hot machines 0.5
	MaxErr       time.Duration // synced only with a bound of at most this. Default 10 ms
	VoidErr      time.Duration // a wider bound is void. Default 100 ms
	VoidAfter    time.Duration // void when no burst came for so long. Default 10 min
	History      time.Duration // how far back stamps can be converted with hindsight. Default 15 min
	MinExchanges int           // joining until so many. Default 8
}

func (c Config) withDefaults() Config {
	def := func(v *float64, d float64) {
		if *v <= 0 {
			*v = d
		}
	}
	dur := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&c.RhoPPM, 200)
	def(&c.EtaPPMPerS, 0.1)
	dur(&c.MaxErr, 10*time.Millisecond)
	dur(&c.VoidErr, 100*time.Millisecond)
	dur(&c.VoidAfter, 10*time.Minute)
	dur(&c.History, 15*time.Minute)
	if c.MinExchanges <= 0 {
		c.MinExchanges = 8
	}
	return c
}

const (
	suspectFor      = 60 * time.Second // how long a failed prediction weighs, and the cone alone is trusted
	quarantineFails = 3                // so many within suspectFor
	cleanBursts     = 16               // so many good bursts end a quarantine
	maxEtaPPMPerS   = 20
	maxClosed       = 16   // segments kept for late stamps
	instanceSlackNS = 2000 // two anchors of one kernel clock differ by far less
	rebaseAfter     = 1e13 // ns
	minInterval     = 250 * time.Millisecond
	maxInterval     = 10 * time.Second
)

// Verdict says what a burst did.
type Verdict struct {
	Impossible int  // exchanges that causality forbids; they were not used
	Step       bool // the offset moved faster than any clock can: a step
	Violation  bool // the limit on the change of skew did not hold; it was doubled
	Infeasible bool // the history contradicted itself; only its newest part was kept
}

// Bad says that something failed.
func (v Verdict) Bad() bool { return v.Impossible > 0 || v.Step || v.Violation || v.Infeasible }

// Stats count over the life of an estimator.
type Stats struct {
	Bursts, Exchanges, Impossible, Steps, Violations, Infeasible int64
	SlewChanges, Restored                                        int64
	Raw                                                          bool // the raw clocks are compared, since NTP slews
	EtaPPMPerS                                                   float64
	Constraints                                                  int // bounds on the hulls
}

// Estimator estimates one clock (local) against another (reference) within one epoch of each.
type Estimator struct {
	cfg    Config
	lim    limits
	ref    clock.ID
	local  clock.ID
	cur    *segment
	closed []*segment // older, oldest first
	forgot bool       // there were others before those
	stats  Stats
	fails  []int64 // local ns of failed predictions, newest last
	clean  int     // good bursts since the last failure
	jailed bool
	newest int64 // local ns of the newest burst
	rtt    int64
	slew   slews
}

// New returns an estimator that knows nothing yet.
func New(reference, local clock.ID, c Config) *Estimator {
	c = c.withDefaults()
	return &Estimator{cfg: c, lim: limits{c.RhoPPM * 1e-6, c.EtaPPMPerS * 1e-6 / 1e9}, ref: reference, local: local}
}

// Local returns the id of the clock that is estimated.
func (e *Estimator) Local() clock.ID { return e.local }

// Reference returns the id of the clock that it is estimated against.
func (e *Estimator) Reference() clock.ID { return e.ref }

// Rho is the declared limit on the skew, in s/s.
func (e *Estimator) Rho() float64 { return e.lim.rho }

// Stats returns the counters.
func (e *Estimator) Stats() Stats {
	s := e.stats
	s.EtaPPMPerS = e.lim.eta * 1e15
	if e.cur != nil {
		s.Constraints = len(e.cur.lo.hull) + len(e.cur.up.hull)
		s.Raw = e.cur.raw != nil
	}
	return s
}

// Restarted tells that the peer's process is another, in the same epoch: the clock is the same, its anchor is not.
func (e *Estimator) Restarted(local clock.ID) {
	if local == e.local {
		return
	}
	e.local = local
	e.slew.local.restart()
	for _, s := range append(e.closed, e.cur) {
		if s != nil {
			s.widen(instanceSlackNS)
		}
	}
}

// bestOf is the split minimum of a burst: the best lower and the best upper bound, each with its own time. They are
// compared along the slope that the clock is believed to have, since it moves during a burst.
type bestOf struct {
	lo, up   int64
	loX, upX int64
	ok       bool
	slope    float64
}

func (b *bestOf) take(x ntp.Exchange) {
	if l := x.Lower(); !b.ok || l > b.lo+b.moved(b.loX, x.T2) {
		b.lo, b.loX = l, x.T2
	}
	if u := x.Upper(); !b.ok || u < b.up+b.moved(b.upX, x.T3) {
		b.up, b.upX = u, x.T3
	}
	b.ok = true
}

func (b *bestOf) moved(from, to int64) int64 { return int64(float64(to-from) * b.slope) }

// excluded says that the two bounds contradict each other, even for a clock as fast as the limit allows.
func (b *bestOf) excluded(rho float64) bool {
	return float64(b.lo-b.up) > rho*math.Abs(float64(b.loX-b.upX))+1
}

// Burst is what one burst proved, with the pairs of both sides when they are known.
type Burst struct {
	Exchanges  []ntp.Exchange
	Ref, Local *ntp.Pair
}

// Add takes a burst: it is first held against what was predicted, then it becomes part of the proof.
func (e *Estimator) Add(b Burst) Verdict {
	var v Verdict
	best := bestOf{slope: e.slope()}
	now := int64(math.MinInt64)
	for _, x := range b.Exchanges {
		if !x.Possible(e.lim.rho) {
			v.Impossible++
			now = max(now, x.T3)
			continue
		}
		best.take(x)
		e.stats.Exchanges++
		e.rtt = x.Delay()
	}
	for _, x := range b.Exchanges {
		if x.Possible(e.lim.rho) {
			e.rtt = min(e.rtt, x.Delay())
		}
	}
	e.stats.Bursts++
	e.stats.Impossible += int64(v.Impossible)
	if best.ok && best.excluded(e.lim.rho) { // two exchanges of one burst that exclude each other
		v.Impossible, best.ok = len(b.Exchanges), false
		now = max(best.loX, best.upX)
	}
	if best.ok {
		now = max(best.loX, best.upX)
		e.followSlew(b, now)
		e.enter(best, now, &v)
	}
	e.judge(v, now)
	return v
}

func (e *Estimator) enter(b bestOf, now int64, v *Verdict) {
	first := e.cur == nil
	e.absorb(b, now, v)
	if first || now > e.newest {
		e.newest = now
	}
}

// in gives the two bounds in the coordinates of a segment, widened by what the mapping may err.
func (b *bestOf) in(s *segment) (lo, up float64) {
	lo, e1 := s.v(b.loX, b.lo)
	up, e2 := s.v(b.upX, b.up)
	return lo - e1, up + e2
}

// followSlew takes the pairs of a burst, and goes over to the raw clocks, or back, when a slew asks for it or has long
// been steady.
func (e *Estimator) followSlew(b Burst, now int64) {
	if e.slew.add(b.Ref, b.Local) {
		e.stats.SlewChanges++
	}
	if e.cur == nil {
		return
	}
	if want := e.mapping(now); (want == nil) != (e.cur.raw == nil) {
		e.cur = e.cur.translate(want)
		for i, s := range e.closed {
			if (want == nil) != (s.raw == nil) {
				e.closed[i] = s.translate(want)
			}
		}
	}
}

// mapping says by what the clocks are compared: nil, as they are.
func (e *Estimator) mapping(now int64) *slews {
	ref := now
	if e.cur != nil {
		ref += e.cur.baseV
	}
	if e.slew.recent(ref, now, int64(e.cfg.History)) {
		return &e.slew
	}
	return nil
}

func (e *Estimator) slope() float64 {
	if e.cur == nil {
		return 0
	}
	l, _ := e.cur.points.newest()
	return l.b
}

// absorb puts the bounds of a burst into the current segment, or starts another.
func (e *Estimator) absorb(b bestOf, now int64, v *Verdict) {
	mid := ntp.Exchange{T1: b.lo + b.loX, T2: b.loX, T3: b.upX, T4: b.up + b.upX}
	if e.cur == nil {
		e.cur = newSegment(mid, e.lim, e.mapping(now))
	} else if e.foretold(b, v); v.Step || v.Violation {
		e.close()
		if v.Violation {
			e.lim.eta = min(e.lim.eta*2, maxEtaPPMPerS*1e-15)
		}
		e.cur = newSegment(mid, e.lim, e.mapping(now))
		e.cur.coneUntil = e.cur.x(now) + float64(suspectFor)
	}
	s := e.cur
	lx, ux := s.x(b.loX), s.x(b.upX)
	lv, uv := b.in(s)
	s.lower(point{lx, lv})
	s.upper(point{ux, uv})
	s.points.add(middle{(lx + ux) / 2, (lv + uv) / 2, s.halfWidth(ux-lx, uv-lv)})
	e.keepPossible(v)
	s.forget(s.last - float64(e.cfg.History))
	if s.last > rebaseAfter {
		s.rebase()
	}
}

// keepPossible drops the oldest samples until the rest no longer contradicts the limits.
func (e *Estimator) keepPossible(v *Verdict) {
	if e.cur.refresh() {
		return
	}
	v.Infeasible = true
	e.stats.Infeasible++
	rest := e.cur.suffix()
	if e.cur = e.cur.between(math.Inf(-1), rest.lo.all[0].x); !e.cur.empty() {
		e.close()
	}
	e.cur = rest
}

// foretold holds the new bounds, each at its own time, against the prediction made from all earlier ones. A prediction
// that fails on the steady clocks and holds on the raw ones was a slew too young for the pairs to show it.
func (e *Estimator) foretold(b bestOf, v *Verdict) {
	e.cur.hold(b, v)
	if !v.Step && !v.Violation {
		return
	}
	if e.cur.raw == nil && len(e.slew.local.pairs) >= 2 && len(e.slew.ref.pairs) >= 2 {
		raw := e.cur.translate(&e.slew)
		var again Verdict
		if raw.hold(b, &again); !again.Step && !again.Violation {
			e.cur, *v = raw, again
			e.slew.local.suspect()
			return
		}
	}
	if v.Step {
		e.stats.Steps++
	} else {
		e.stats.Violations++
	}
}

// hold says in v whether the bounds contradict the segment.
func (s *segment) hold(b bestOf, v *Verdict) {
	xl, xu := s.x(b.loX), s.x(b.upX)
	_, up, ok1 := s.bounds(xl)
	lo, _, ok2 := s.bounds(xu)
	blo, bup := b.in(s)
	if !ok1 || !ok2 || (blo <= up && bup >= lo) {
		return
	}
	_, cup := s.cone(xl)
	clo, _ := s.cone(xu)
	if blo > cup || bup < clo {
		v.Step = true
		return
	}
	v.Violation = true
}

func (e *Estimator) close() {
	e.closed = append(e.closed, e.cur)
	if len(e.closed) > maxClosed {
		e.closed, e.forgot = e.closed[1:], true
	}
}

// judge keeps the record of failures that the states follow from.
func (e *Estimator) judge(v Verdict, now int64) {
	if !v.Bad() {
		e.clean++
		if e.clean >= cleanBursts {
			e.jailed = false
		}
		return
	}
	e.clean = 0
	e.fails = append(e.fails, now)
	if n := len(e.fails); n > quarantineFails {
		e.fails = e.fails[n-quarantineFails:]
	}
	if len(e.fails) == quarantineFails && now-e.fails[0] <= int64(suspectFor) {
		e.jailed = true
	}
}

// Hint takes a single exchange that came for free (a routed request, a KV transfer). It tightens bounds and never
// moves the point; one that contradicts is ignored and reported false.
func (e *Estimator) Hint(x ntp.Exchange) bool {
	if e.cur == nil || !x.Possible(e.lim.rho) {
		return false
	}
	s := e.cur
	b := bestOf{}
	b.take(x)
	xl, xu := s.x(x.T2), s.x(x.T3)
	if xl < s.first && len(e.closed) > 0 {
		return true // it began before the step that the segment follows, and must not stretch the segment back over that
	}
	blo, bup := b.in(s)
	lo2, up2, ok1 := s.bounds(xl)
	lo3, up3, ok2 := s.bounds(xu)
	if !ok1 || !ok2 || blo > up2 || bup < lo3 {
		return false
	}
	// Only what improves is kept: most hints are wider than the probes.
	if blo > lo2 {
		s.lower(point{xl, blo})
	}
	if bup < up3 {
		s.upper(point{xu, bup})
	}
	var v Verdict
	e.keepPossible(&v)
	return !v.Infeasible
}
