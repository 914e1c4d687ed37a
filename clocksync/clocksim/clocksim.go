// Package clocksim owns simulated clocks and networks with an exactly known truth, and the one check that every estimate
// is put through: does the bound cover the truth, how large is the error, when is a fault found. It touches no real clock.
package clocksim

import (
	"math"
	"math/rand/v2"
	"time"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

// Delay is a one-way delay: a floor, an exponential part, and now and then a spike.
type Delay struct {
	Floor, Exp, Spike time.Duration
	SpikeShare        float64
}

func (d Delay) draw(r *rand.Rand) float64 {
	v := float64(d.Floor) + r.ExpFloat64()*float64(d.Exp)
	if r.Float64() < d.SpikeShare {
		v += r.ExpFloat64() * float64(d.Spike)
	}
	return v
}

// Scenario is a simulation. Zero fields mean the defaults of clock.md: 50 ppm and a slow thermal sine, a quiet LAN.
type Scenario struct {
	Name          string
	SkewPPM       float64       // constant part
	ThermalPPM    float64       // amplitude of the sine
	ThermalPeriod time.Duration // 0: 10 min
	Fwd, Rev      Delay
	Loss          float64
	Burst         int           // exchanges a burst
	Every         time.Duration // 0: as the estimator wishes
	Length        time.Duration // measured time, after Warm
	Warm          time.Duration
	OutageAt      time.Duration // from then on, for OutageFor, nothing comes back
	OutageFor     time.Duration
	StepAt        time.Duration // the local clock jumps back by Step
	Step          time.Duration
	OffsetNS      int64
	Config        estimate.Config
	Hindsight     time.Duration
	Seed          uint64
}

// Result is what a scenario gave. Times in ns.
type Result struct {
	Evaluations, Misses, Void int
	Err                       []float64 // |error| of the point just before each burst, sorted
	HindErr                   []float64 // the same with hindsight, sorted
	Bound                     []float64 // stated half width, sorted
	WorstMissNS               float64
	StepFoundBursts           int // bursts from the step to its detection; -1: not found
	FirstBoundNS              int64
	SkewErrPPB                map[time.Duration]float64 // |skew - truth| after 10 s and 60 s
	SkewBoundPPB              map[time.Duration]float64
	OutageBoundNS             int64 // the bound at the end of the outage
	Stats                     estimate.Stats
	StateAtEnd                clock.State
}

// P returns the q-quantile of a sorted series.
func P(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// world is the truth. Real time is the reference clock; the local clock is a function of it.
type world struct {
	s     Scenario
	r     *rand.Rand
	phase float64
}

// offset is reference - local at real time t (ns).
func (w *world) offset(t float64) float64 {
	period := float64(w.s.ThermalPeriod)
	om := 2 * math.Pi / period
	o := float64(w.s.OffsetNS%1e9) + w.s.SkewPPM*1e-6*t - w.s.ThermalPPM*1e-6/om*(math.Cos(om*t+w.phase)-math.Cos(w.phase))
	if w.s.StepAt > 0 && t >= float64(w.s.StepAt) {
		o += float64(w.s.Step)
	}
	return o
}

func (w *world) skewPPB(t float64) float64 {
	om := 2 * math.Pi / float64(w.s.ThermalPeriod)
	return w.s.SkewPPM*1e3 + w.s.ThermalPPM*1e3*math.Sin(om*t+w.phase)
}

const whole = 1_000_000_000 // part of the offset that float64 is kept away from

// local is the local clock at real time t.
func (w *world) local(t float64) int64 {
	return int64(math.Round(t-w.offset(t))) - w.s.OffsetNS/whole*whole
}

// truth is the offset (reference - local) when the local clock shows what it shows at real time t.
func (w *world) truth(t float64) float64 { return w.offset(t) }

func (w *world) exchange(t float64) (x ntp.Exchange, end float64, ok bool) {
	arrive := t + w.s.Fwd.draw(w.r)
	leave := arrive + 2000 + w.r.ExpFloat64()*1000
	end = leave + w.s.Rev.draw(w.r)
	x = ntp.Exchange{T1: int64(math.Floor(t)), T2: w.local(arrive), T3: w.local(leave), T4: int64(math.Ceil(end)), ErrNS: 2}
	lost := w.r.Float64() < w.s.Loss || (t >= float64(w.s.OutageAt) && t < float64(w.s.OutageAt+w.s.OutageFor))
	return x, end, !lost
}

// Defaults fills the zero fields of s.
func (s Scenario) Defaults() Scenario {
	if s.SkewPPM == 0 {
		s.SkewPPM = 50
	}
	if s.ThermalPPM == 0 {
		s.ThermalPPM = 0.5
	}
	if s.ThermalPeriod == 0 {
		s.ThermalPeriod = 10 * time.Minute
	}
	if s.Fwd == (Delay{}) {
		s.Fwd = LAN
	}
	if s.Rev == (Delay{}) {
		s.Rev = s.Fwd
	}
	if s.Burst == 0 {
		s.Burst = 4
	}
	if s.Length == 0 {
		s.Length = time.Minute
	}
	if s.OffsetNS == 0 {
		s.OffsetNS = -123_456_789_012_345
	}
	if s.Hindsight == 0 {
		s.Hindsight = 5 * time.Second
	}
	return s
}

// The paths of clock.md §5.
var (
	LAN       = Delay{50 * time.Microsecond, 30 * time.Microsecond, 3 * time.Millisecond, 0.02}
	Loaded    = Delay{50 * time.Microsecond, 200 * time.Microsecond, 5 * time.Millisecond, 0.30}
	KernelLAN = Delay{10 * time.Microsecond, 3 * time.Microsecond, 3 * time.Millisecond, 0.02}
	KernelLo  = Delay{300 * time.Nanosecond, 100 * time.Nanosecond, 3 * time.Millisecond, 0.02}
	WANFwd    = Delay{2 * time.Millisecond, time.Millisecond, 20 * time.Millisecond, 0.02}
	WANRev    = Delay{3 * time.Millisecond, time.Millisecond, 20 * time.Millisecond, 0.02}
)
