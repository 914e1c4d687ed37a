package estimate

import (
	"math"
	"slices"
)

// point is a one-sided bound of the offset: at local time x the offset is at least (or at most) v. In ns relative to the
// bases of a segment: float64 keeps 0.02 ns over a day.
type point struct{ x, v float64 }

// chain is the hull of one side. sign +1: lower bounds, of which the upper hull binds; -1: upper bounds, kept with v
// negated, so that all arithmetic is that of lower bounds.
//
// The hull is built on w = v - eta/2·x². Moving the moment m of the expansion only adds a linear function of x, which
// changes no hull: so one hull serves every m, and a new sample costs amortized constant time.
type chain struct {
	eta  float64 // 1/ns
	all  []point // sorted by x
	hull []point // {x, w}
}

// maxPoints is when the older half of the points is thinned to the tighter of each pair.
const maxPoints = 1024

// add inserts a bound; later ones usually come last.
func (c *chain) add(p point) {
	if n := len(c.all); n > 0 && p.x < c.all[n-1].x {
		i, _ := slices.BinarySearchFunc(c.all, p, func(a, b point) int {
			switch {
			case a.x < b.x:
				return -1
			case a.x > b.x:
				return 1
			}
			return 0
		})
		c.all = slices.Insert(c.all, i, p)
		c.rebuild()
		return
	}
	c.all = append(c.all, p)
	c.push(p)
	if len(c.all) > maxPoints {
		c.thin()
	}
}

func (c *chain) thin() {
	half := len(c.all) / 2 &^ 1
	kept := c.all[:0]
	for i := 0; i < half; i += 2 {
		if c.all[i].v >= c.all[i+1].v {
			kept = append(kept, c.all[i])
		} else {
			kept = append(kept, c.all[i+1])
		}
	}
	c.all = append(kept, c.all[half:]...)
	c.rebuild()
}

// forget drops what is older than x.
func (c *chain) forget(x float64) {
	i := 0
	for i < len(c.all) && c.all[i].x < x {
		i++
	}
	if i > len(c.all)/8 { // amortize the rebuild
		c.all = append(c.all[:0], c.all[i:]...)
		c.rebuild()
	}
}

func (c *chain) rebuild() {
	c.hull = c.hull[:0]
	for _, p := range c.all {
		c.push(p)
	}
}

// push is Andrew's monotone chain.
func (c *chain) push(p point) {
	q := point{p.x, p.v - c.eta/2*p.x*p.x}
	h := c.hull
	for len(h) > 0 && h[len(h)-1].x == q.x {
		if h[len(h)-1].v >= q.v {
			return
		}
		h = h[:len(h)-1]
	}
	for len(h) >= 2 {
		a, b := h[len(h)-2], h[len(h)-1]
		if (b.v-a.v)*(q.x-a.x) > (q.v-a.v)*(b.x-a.x) {
			break
		}
		h = h[:len(h)-1]
	}
	c.hull = append(h, q)
}

// at returns vertex i relative to m: {d, v - eta/2·d²}.
func (c *chain) at(i int, m float64) point {
	p := c.hull[i]
	return point{p.x - m, p.v + c.eta*m*(p.x-m/2)}
}

// top returns the vertex with the largest y - b·d: the one that a line of slope b rests on. Slopes fall along the hull, so
// it is found by bisection.
func (c *chain) top(b, m float64) point {
	lo, hi := 0, len(c.hull)-1
	for lo < hi {
		mid := (lo + hi) / 2
		p, q := c.at(mid, m), c.at(mid+1, m)
		if q.v-p.v > b*(q.d()-p.d()) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return c.at(lo, m)
}

func (p point) d() float64 { return p.x }

// slope returns the slope of the hull at distance h from m: +inf left of it, -inf right of it.
func (c *chain) slope(h, m float64) float64 {
	n := len(c.hull)
	i, _ := slices.BinarySearchFunc(c.hull, m+h, func(p point, x float64) int {
		if p.x < x {
			return -1
		}
		return 1
	})
	switch i {
	case 0:
		return math.Inf(1)
	case n:
		return math.Inf(-1)
	}
	p, q := c.at(i-1, m), c.at(i, m)
	return (q.v - p.v) / (q.x - p.x)
}

// strip is what all lines above the lower and below the upper hull have in common, at the moment m.
type strip struct {
	lo, up *chain // up holds negated values
	m      float64
	b1, b2 float64 // possible slopes
}

// newtonSteps bounds the search for an edge; each step takes a new pair of vertices, so it ends by itself far earlier.
const newtonSteps = 200

// cut finds the slopes that are possible at m within ±rho. Not ok: no line fits, the samples contradict the limits.
func cut(lo, up *chain, m, rho float64) (strip, bool) {
	s := strip{lo: lo, up: up, m: m}
	var ok1, ok2 bool
	s.b1, ok1 = s.edge(-rho, +1, rho)
	s.b2, ok2 = s.edge(rho, -1, rho)
	return s, ok1 && ok2 && s.b1 <= s.b2
}

// gap is how far the lower hull reaches above the upper one for lines of slope b, and its derivative. Convex in b.
func (s *strip) gap(b float64) (g, dg float64) {
	p, q := s.lo.top(b, s.m), s.up.top(-b, s.m)
	return p.v - b*p.x + q.v + b*q.x, q.x - p.x
}

// edge walks from an end towards the possible slopes by Newton's method, which on a convex function never passes the
// root: it ends on the outer side, so that the interval can only be too wide.
func (s *strip) edge(b, dir, rho float64) (float64, bool) {
	for range newtonSteps {
		g, dg := s.gap(b)
		if g <= 0 {
			return b, true
		}
		if dg*dir >= 0 {
			return b, g < 1e-3 // below a thousandth of a ns it is rounding
		}
		next := b - g/dg
		if next == b {
			return b, true
		}
		b = next
		if math.Abs(b) > rho*(1+1e-9) {
			return b, false
		}
	}
	return b, true
}

// rangeAt returns the least and the largest value of all lines at distance h from m.
func (s *strip) rangeAt(h float64) (lo, up float64) {
	value := func(c *chain, b float64) float64 {
		p := c.top(b, s.m)
		return p.v + b*(h-p.x)
	}
	bl := min(max(s.lo.slope(h, s.m), s.b1), s.b2)
	bu := min(max(s.up.slope(h, s.m), -s.b2), -s.b1)
	return value(s.lo, bl), -value(s.up, bu)
}

// coneAt bounds the offset at x by |skew| <= rho alone, from all points of one side.
func (c *chain) coneAt(x, rho float64) float64 {
	best := math.Inf(-1)
	for _, p := range c.all {
		best = max(best, p.v-rho*math.Abs(x-p.x))
	}
	return best
}
