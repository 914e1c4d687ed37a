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
func (r *liner) newest() (line, bool) { return fit(r.last(r.window())) }

// around is the line through the bursts on both sides of x: with hindsight nothing is extrapolated.
func (r *liner) around(x float64) (line, bool) {
	n := r.window()
	i, _ := slices.BinarySearchFunc(r.mids, x, func(m middle, x float64) int {
		if m.x < x {
			return -1
		}
		return 1
	})
	return fit(r.mids[max(0, i-n/2):min(len(r.mids), i+n/2)])
}

// fit is a weighted least-squares line. The weight is chrony's (sourcestats.c): 1 at the least width, less the more a
// burst was delayed, measured by how widths spread.
func fit(ms []middle) (line, bool) {
	switch len(ms) {
	case 0:
		return line{}, false
	case 1, 2:
		return best(ms), true
	}
	var buf [64]float64
	halves := buf[:0]
	for _, m := range ms {
		halves = append(halves, m.half)
	}
	slices.Sort(halves)
	least := halves[0]
	spread := min(max((halves[len(halves)/2]-least)/0.7, minHalf), max(least, minHalf))
	x0 := ms[len(ms)-1].x
	y0 := ms[len(ms)-1].y
	var sw, sx, sy, sxx, sxy float64
	for _, m := range ms {
		w := 1 + (m.half-least)/spread
		w = 1 / (w * w)
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
