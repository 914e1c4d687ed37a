package estimate

import (
	"math"
	"slices"
)

// middle is a burst as the point estimate sees it: the middle between its best lower and its best upper bound, which may
// come from different exchanges, and half their distance.
type middle struct{ x, y, half float64 }

// windows are the lengths among which the regression chooses; the largest of those that predict about equally well wins.
// From linuxptp's linreg servo.
var windows = [...]int{8, 16, 32, 64}

const (
	maxMiddles = 1024
	emaGain    = 0.1  // weight of the newest prediction error
	tie        = 1.05 // within 5 % of the best, the larger window is the quieter one
	minHalf    = 1.0  // ns; a burst cannot be better than the resolution of the stamps
)

// liner is the point estimate: a weighted line through the middles of the newest bursts.
type liner struct {
	mids []middle
	ema  [len(windows)]float64
	seen [len(windows)]bool
	line line // newest, while fresh
	ok   bool
	kept bool
}

// line is offset y at x with slope b.
type line struct{ x, y, b float64 }

func (l line) at(x float64) float64 { return l.y + l.b*(x-l.x) }

// add scores every window by how well it foretold m, and keeps m.
func (r *liner) add(m middle) {
	m.half = max(m.half, minHalf)
	for i, w := range windows {
		l, ok := fit(r.last(w))
		if !ok {
			continue
		}
		e := min(math.Abs(l.at(m.x)-m.y)/m.half, 100)
		if !r.seen[i] {
			r.ema[i], r.seen[i] = e, true
			continue
		}
		r.ema[i] += emaGain * (e - r.ema[i])
	}
	r.kept = false
	r.mids = append(r.mids, m)
	if len(r.mids) > maxMiddles {
		r.mids = append(r.mids[:0], r.mids[maxMiddles/4:]...)
	}
}

func (r *liner) last(n int) []middle { return r.mids[max(0, len(r.mids)-n):] }

// window is the length that predicts best now.
func (r *liner) window() int {
	best := math.Inf(1)
	for i := range windows {
		if r.seen[i] {
			best = min(best, r.ema[i])
		}
	}
	pick := windows[0]
	for i, w := range windows {
		// A window longer than the history is the same as the next shorter one.
		if r.seen[i] && r.ema[i] <= best*tie && (i == 0 || len(r.mids) > windows[i-1]) {
			pick = w
		}
	}
	return pick
}

// newest is the line to extrapolate from.
func (r *liner) newest() (line, bool) {
	if !r.kept {
		r.line, r.ok = fit(r.last(r.window()))
		r.kept = true
	}
	return r.line, r.ok
}

// around is the offset at x by a weighted parabola through the bursts on both sides: with hindsight nothing is
// extrapolated, and a slow change of temperature bends the curve more than the noise of so many bursts.
func (r *liner) around(x float64) (float64, bool) {
	w := r.window()
	n := w + 32
	i, _ := slices.BinarySearchFunc(r.mids, x, func(m middle, x float64) int {
		if m.x < x {
			return -1
		}
		return 1
	})
	from := max(0, min(i-n/2, len(r.mids)-n)) // near the newest burst the window leans back and keeps its length
	ms := r.mids[from:min(len(r.mids), from+n)]
	if len(ms) < 8 || w < 32 {
		// Few bursts, or a clock that bends so fast that short windows predict best.
		from = max(0, i-w/2)
		l, ok := fit(r.mids[from:min(len(r.mids), i+w/2)])
		return l.at(x), ok
	}
	return parabola(ms, x)
}

// weights is chrony's weight (sourcestats.c): 1 at the least width, less the more a burst was delayed, measured by how
// the widths spread.
type weights struct{ least, spread float64 }

func weightsOf(ms []middle) weights {
	var buf [128]float64
	halves := buf[:0]
	for _, m := range ms {
		halves = append(halves, m.half)
	}
	least := slices.Min(halves)
	spread := min(max((nth(halves, len(halves)/2)-least)/0.7, minHalf), max(least, minHalf))
	return weights{least, spread}
}

func (w weights) of(m middle) float64 {
	d := 1 + (m.half-w.least)/w.spread
	return 1 / (d * d)
}

// parabola is the value at x of the weighted least-squares parabola through ms.
func parabola(ms []middle, x float64) (float64, bool) {
	weights := weightsOf(ms)
	x0, y0 := ms[len(ms)/2].x, ms[len(ms)/2].y
	scale := max(ms[len(ms)-1].x-ms[0].x, 1)
	var s [5]float64 // sums of w·u^k
	var t [3]float64 // sums of w·u^k·y
	for _, m := range ms {
		w, u, y := weights.of(m), (m.x-x0)/scale, m.y-y0
		p := w
		for k := range s {
			s[k] += p
			if k < len(t) {
				t[k] += p * y
			}
			p *= u
		}
	}
	det := s[0]*(s[2]*s[4]-s[3]*s[3]) - s[1]*(s[1]*s[4]-s[3]*s[2]) + s[2]*(s[1]*s[3]-s[2]*s[2])
	if math.Abs(det) < 1e-12 {
		l, ok := fit(ms)
		return l.at(x), ok
	}
	// Cramer's rule.
	a := t[0]*(s[2]*s[4]-s[3]*s[3]) - s[1]*(t[1]*s[4]-s[3]*t[2]) + s[2]*(t[1]*s[3]-s[2]*t[2])
	b := s[0]*(t[1]*s[4]-t[2]*s[3]) - t[0]*(s[1]*s[4]-s[3]*s[2]) + s[2]*(s[1]*t[2]-t[1]*s[2])
	c := s[0]*(s[2]*t[2]-s[3]*t[1]) - s[1]*(s[1]*t[2]-t[1]*s[2]) + t[0]*(s[1]*s[3]-s[2]*s[2])
	u := (x - x0) / scale
	return y0 + (a+b*u+c*u*u)/det, true
}

// nth returns what xs[k] would be if xs were sorted (Hoare's selection), and reorders xs.
func nth(xs []float64, k int) float64 {
	for lo, hi := 0, len(xs)-1; lo < hi; {
		pivot := xs[k]
		i, j := lo, hi
		for i <= j {
			for xs[i] < pivot {
				i++
			}
			for xs[j] > pivot {
				j--
			}
			if i <= j {
				xs[i], xs[j] = xs[j], xs[i]
				i++
				j--
			}
		}
		if j < k {
			lo = i
		}
		if i > k {
			hi = j
		}
	}
	return xs[k]
}

// fit is a weighted least-squares line.
func fit(ms []middle) (line, bool) {
	switch len(ms) {
	case 0:
		return line{}, false
	case 1, 2:
		return best(ms), true
	}
	weights := weightsOf(ms)
	x0 := ms[len(ms)-1].x
	y0 := ms[len(ms)-1].y
	var sw, sx, sy, sxx, sxy float64
	for _, m := range ms {
		w := weights.of(m)
		x, y := m.x-x0, m.y-y0
		sw += w
		sx += w * x
		sy += w * y
		sxx += w * x * x
		sxy += w * x * y
	}
	det := sw*sxx - sx*sx
	if det <= 0 {
		return best(ms), true
	}
	b := (sw*sxy - sx*sy) / det
	return line{x0, y0 + (sy-b*sx)/sw, b}, true
}

// best is a flat line through the narrowest burst.
func best(ms []middle) line {
	m := ms[0]
	for _, o := range ms[1:] {
		if o.half < m.half {
			m = o
		}
	}
	return line{m.x, m.y, 0}
}
