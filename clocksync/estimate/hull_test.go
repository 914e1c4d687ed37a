package estimate

import (
	"math"
	"math/rand/v2"
	"testing"
)

// naive is the proof written down as it is defined, by brute force over slopes: the independent second method.
type naive struct {
	lo, up   []point
	rho, eta float64
}

func (n naive) rangeAt(m, h float64, steps int) (lo, up float64, ok bool) {
	lo, up = math.Inf(1), math.Inf(-1)
	for i := 0; i <= steps; i++ {
		b := -n.rho + 2*n.rho*float64(i)/float64(steps)
		f, g := math.Inf(-1), math.Inf(1)
		for _, p := range n.lo {
			d := p.x - m
			f = max(f, p.v-n.eta/2*d*d-b*d)
		}
		for _, p := range n.up {
			d := p.x - m
			g = min(g, p.v+n.eta/2*d*d-b*d)
		}
		if f <= g {
			lo, up, ok = min(lo, f+b*h), max(up, g+b*h), true
		}
	}
	return lo, up, ok
}

// clockPath is a random true offset within the limits, and bounds that hold of it.
func clockPath(r *rand.Rand, n int, lim limits) (lo, up []point) {
	x, v, b := 0.0, r.NormFloat64()*1e6, (r.Float64()-0.5)*lim.rho
	for range n {
		dt := 1e8 + r.Float64()*2e9
		a := (r.Float64()*2 - 1) * lim.eta
		v += b*dt + a/2*dt*dt
		b = min(max(b+a*dt, -lim.rho), lim.rho)
		x += dt
		lo = append(lo, point{x, v - 1e3 - r.ExpFloat64()*5e4})
		up = append(up, point{x + 3e3, v + b*3e3 + 1e3 + r.ExpFloat64()*5e4})
	}
	return lo, up
}

func chains(lo, up []point, eta float64) (*chain, *chain) {
	l, u := &chain{eta: eta}, &chain{eta: eta}
	for _, p := range lo {
		l.add(p)
	}
	for _, p := range up {
		u.add(point{p.x, -p.v})
	}
	return l, u
}

func TestTheHullGivesWhatTheDefinitionGives(t *testing.T) {
	lim := limits{200e-6, 0.1e-15}
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 1))
		lo, up := clockPath(r, 2+r.IntN(60), lim)
		l, u := chains(lo, up, lim.eta)
		m := up[len(up)-1].x
		h := r.Float64() * 60e9
		if seed%3 == 0 { // somewhere in the past
			m, h = lo[0].x+r.Float64()*(m-lo[0].x), 0
		}
		st, ok := cut(l, u, m, lim.rho)
		if !ok {
			t.Fatalf("seed %d: a possible history is called impossible", seed)
		}
		gotLo, gotUp := st.rangeAt(h)
		const steps = 8_000
		wantLo, wantUp, nok := naive{lo, up, lim.rho, lim.eta}.rangeAt(m, h, steps)
		if !nok {
			continue // narrower than the grid of slopes
		}
		// The grid sees only slopes inside; the exact answer is at least as wide, by at most what a step of slope moves.
		reach := max(h, m-lo[0].x, up[len(up)-1].x-m)
		tol := 2 * lim.rho / steps * reach * 2
		if gotLo > wantLo+1e-3 || gotUp < wantUp-1e-3 || gotLo < wantLo-tol-1 || gotUp > wantUp+tol+1 {
			t.Errorf("seed %d: [%f, %f], by definition [%f, %f] ± %f", seed, gotLo, gotUp, wantLo, wantUp, tol)
		}
	}
}

func TestContradictionsAreFound(t *testing.T) {
	for _, c := range []struct {
		name   string
		lo, up []point
		ok     bool
	}{
		{"bounds that leave room", []point{{0, -10}, {1e9, -10}}, []point{{0, 10}, {1e9, 10}}, true},
		{"a lower bound above an upper one", []point{{0, 20}}, []point{{0, 10}}, false},
		{"a move within the slope limit", []point{{0, -10}, {1e9, 150_000}}, []point{{0, 10}, {1e9, 150_020}}, true},
		{"a move faster than the slope limit", []point{{0, -10}, {1e9, 250_000}}, []point{{0, 10}, {1e9, 250_020}}, false},
		{"a bend sharper than the limit", []point{{0, -10}, {1e9, 50_000}, {2e9, -10}}, []point{{0, 10}, {1e9, 50_020}, {2e9, 10}}, false},
	} {
		l, u := chains(c.lo, c.up, 0.1e-15)
		if _, ok := cut(l, u, c.up[len(c.up)-1].x, 200e-6); ok != c.ok {
			t.Errorf("%s: possible %v, want %v", c.name, ok, c.ok)
		}
	}
}

func TestOrderOfArrivalDoesNotMatter(t *testing.T) {
	lim := limits{200e-6, 0.1e-15}
	r := rand.New(rand.NewPCG(7, 7))
	lo, up := clockPath(r, 40, lim)
	a, b := chains(lo, up, lim.eta)
	r.Shuffle(len(lo), func(i, j int) { lo[i], lo[j] = lo[j], lo[i] })
	r.Shuffle(len(up), func(i, j int) { up[i], up[j] = up[j], up[i] })
	c, d := chains(lo, up, lim.eta)
	m := 20e9
	s1, ok1 := cut(a, b, m, lim.rho)
	s2, ok2 := cut(c, d, m, lim.rho)
	l1, u1 := s1.rangeAt(3e9)
	l2, u2 := s2.rangeAt(3e9)
	if !ok1 || !ok2 || math.Abs(l1-l2) > 1e-3 || math.Abs(u1-u2) > 1e-3 {
		t.Errorf("[%f, %f] and [%f, %f]", l1, u1, l2, u2)
	}
}

func TestThinningOnlyWidens(t *testing.T) {
	lim := limits{200e-6, 0.1e-15}
	r := rand.New(rand.NewPCG(3, 3))
	lo, up := clockPath(r, 900, lim)
	l, u := chains(lo, up, lim.eta)
	m := up[len(up)-1].x
	full, _ := cut(l, u, m, lim.rho)
	fl, fu := full.rangeAt(1e9)
	l.thin()
	u.thin()
	thin, ok := cut(l, u, m, lim.rho)
	tl, tu := thin.rangeAt(1e9)
	if !ok || tl > fl+1e-3 || tu < fu-1e-3 || len(l.all) >= 900 {
		t.Errorf("thinned [%f, %f], full [%f, %f]", tl, tu, fl, fu)
	}
}

func FuzzCut(f *testing.F) {
	f.Add(uint64(1), uint8(5), 0.5)
	f.Add(uint64(2), uint8(200), -3.0)
	f.Fuzz(func(t *testing.T, seed uint64, n uint8, at float64) {
		if n == 0 || math.IsNaN(at) || math.Abs(at) > 1e4 {
			return
		}
		r := rand.New(rand.NewPCG(seed, 9))
		l, u := &chain{eta: 1e-16}, &chain{eta: 1e-16}
		for range n { // no truth behind these: anything may contradict
			l.add(point{r.Float64() * 1e12, r.NormFloat64() * 1e6})
			u.add(point{r.Float64() * 1e12, -1e5 + r.NormFloat64()*1e6})
		}
		st, ok := cut(l, u, at*1e9, 200e-6)
		if !ok {
			return
		}
		lo, up := st.rangeAt(1e9)
		if math.IsNaN(lo) || math.IsNaN(up) || lo > up+1 {
			t.Fatalf("range [%f, %f]", lo, up)
		}
	})
}

func BenchmarkCut(b *testing.B) {
	lim := limits{200e-6, 0.1e-15}
	lo, up := clockPath(rand.New(rand.NewPCG(3, 3)), 900, lim)
	l, u := chains(lo, up, lim.eta)
	for b.Loop() {
		st, _ := cut(l, u, up[899].x, lim.rho)
		st.rangeAt(1e9)
	}
}
