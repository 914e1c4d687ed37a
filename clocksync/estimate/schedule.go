package estimate

import (
	"math"
	"time"
)

// Interval is when to probe next so that the bound grows by little: the t for which E(t) = w + s·t + eta/2·t² reaches
// (1+a)·w, with the half width s of the slopes that are possible now. Once the history is long, s is 2·sqrt(w·eta).
func (e *Estimator) Interval() time.Duration {
	if e.cur == nil || e.stats.Exchanges < int64(e.cfg.MinExchanges) || e.jailed || e.clean < cleanBursts {
		return minInterval
	}
	w := e.floor()
	a := min(max(3000/w, 0.1), 1) // a tight bound may grow by a larger share
	b1, b2 := e.cur.skew(e.cur.last)
	s := (b2 - b1) / 2
	t := time.Duration((math.Sqrt(s*s+2*e.lim.eta*a*w) - s) / e.lim.eta)
	return min(max(t, minInterval), maxInterval)
}

// floor is the half width that the newest bursts reached at best.
func (e *Estimator) floor() float64 {
	w := math.Inf(1)
	for _, m := range e.cur.points.last(windows[0]) {
		w = min(w, m.half)
	}
	return w
}

// tightNS is a half width that only stamps of the kernel reach, on a path without a queue: there two exchanges, the first of
// which warms the path, are as good as four.
const (
	tightNS    = 2000
	tightBurst = 2
)

// joinBurst is how many exchanges a newcomer is asked for at once.
const joinBurst = 16

// BurstSize is how many exchanges the next burst should have, where normal is usual: a newcomer and a clock that just
// failed are asked more, until the history is long enough to carry the bound; one that is known very well is asked less.
func (e *Estimator) BurstSize(normal int) int {
	if e.cur == nil || e.clean < cleanBursts {
		return max(joinBurst, normal)
	}
	if e.floor() < tightNS {
		return min(tightBurst, normal)
	}
	return normal
}
