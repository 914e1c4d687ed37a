package clocksim

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"meridian.internal/clocksync/estimate"
)

// run is one simulation under way.
type run struct {
	world
	est      *estimate.Estimator
	res      Result
	pending  []float64 // real times that hindsight will look at
	stepSeen bool
	sinceHit int
}

// Run simulates s.
func Run(s Scenario) Result {
	s = s.Defaults()
	r := rand.New(rand.NewPCG(s.Seed, 0x9e3779b97f4a7c15))
	x := &run{world: world{s: s, r: r, phase: r.Float64() * 2 * math.Pi}}
	x.est = estimate.New("00000000000000aa.00000001", "00000000000000bb.00000002", s.Config)
	x.res.StepFoundBursts = -1
	x.res.SkewErrPPB, x.res.SkewBoundPPB = map[time.Duration]float64{}, map[time.Duration]float64{}
	t, end := 1e6, float64(s.Warm+s.Length)
	for t < end {
		t = x.burst(t, x.est.BurstSize(s.Burst))
		every := s.Every
		if every == 0 {
			every = x.est.Interval()
		}
		next := t + float64(every)*(0.9+0.2*r.Float64())
		x.skewMarks(t)
		x.evaluate(t, next)
		t = next
	}
	x.finish(end)
	return x.res
}

func (x *run) burst(t float64, n int) float64 {
	var b estimate.Burst
	start := t
	for range n {
		e, done, ok := x.exchange(t)
		t = done + 1000
		if ok {
			b.Exchanges = append(b.Exchanges, e)
		} else {
			t += float64(5 * time.Millisecond)
		}
	}
	if len(b.Exchanges) == 0 {
		return t
	}
	v := x.est.Add(b)
	if x.res.FirstBoundNS == 0 {
		x.res.FirstBoundNS = int64(t - start)
	}
	if x.s.StepAt > 0 && start >= float64(x.s.StepAt) && !x.stepSeen {
		x.sinceHit++
		if v.Step || v.Violation || v.Infeasible {
			x.stepSeen, x.res.StepFoundBursts = true, x.sinceHit
		}
	}
	return t
}

func (x *run) skewMarks(t float64) {
	for _, at := range []time.Duration{10 * time.Second, 60 * time.Second} {
		if _, done := x.res.SkewErrPPB[at]; !done && t >= float64(at) {
			ppb, err := x.est.Skew(x.local(t))
			x.res.SkewErrPPB[at] = math.Abs(float64(ppb) - x.skewPPB(t))
			x.res.SkewBoundPPB[at] = float64(err)
		}
	}
}

// evaluate looks just before the next burst, the worst moment, and at some others between; and back with hindsight.
func (x *run) evaluate(t, next float64) {
	if t < float64(x.s.Warm) {
		return
	}
	// Between a step and the burst after it nothing can know.
	if at := float64(x.s.StepAt); at > 0 && next >= at && !x.stepSeen {
		return
	}
	for _, at := range []float64{next - 1, t + (next-t)*x.r.Float64()} {
		e, ok := x.look(at)
		if ok && at == next-1 {
			x.res.Err = append(x.res.Err, math.Abs(e.err))
			x.res.Bound = append(x.res.Bound, e.bound)
			x.pending = append(x.pending, at)
		}
	}
	if out := float64(x.s.OutageAt + x.s.OutageFor); x.s.OutageFor > 0 && next < out {
		if e, ok := x.look(next); ok {
			x.res.OutageBoundNS = int64(e.bound)
		}
	}
	for len(x.pending) > 0 && x.pending[0] < t-float64(x.s.Hindsight) {
		if e, ok := x.look(x.pending[0]); ok {
			x.res.HindErr = append(x.res.HindErr, math.Abs(e.err))
		}
		x.pending = x.pending[1:]
	}
}

type looked struct{ err, bound float64 }

func (x *run) look(at float64) (looked, bool) {
	iv, ok := x.est.At(x.local(at))
	if !ok {
		x.res.Void++
		return looked{}, false
	}
	whole := x.s.OffsetNS / whole * whole
	truth := x.truth(at)
	lo, up := float64(iv.LowerNS-whole), float64(iv.UpperNS-whole)
	x.res.Evaluations++
	if miss := max(lo-truth, truth-up) - 1; miss > 0 {
		x.res.Misses++
		x.res.WorstMissNS = max(x.res.WorstMissNS, miss)
	}
	return looked{float64(iv.OffsetNS-whole) - truth, float64(iv.BoundNS())}, true
}

func (x *run) finish(end float64) {
	for _, s := range [][]float64{x.res.Err, x.res.HindErr, x.res.Bound} {
		slices.Sort(s)
	}
	x.res.Stats = x.est.Stats()
	x.res.StateAtEnd = x.est.Estimate(x.local(end)).State
}
