package clocksim

import (
	"testing"
	"time"

	"meridian.internal/clocksync/estimate"
)

// The table with few seeds; cmd/clocktruth runs it with a hundred.
func TestEveryScenarioReachesItsGoals(t *testing.T) {
	seeds := 4
	if testing.Short() {
		seeds = 1
	}
	evaluations := 0
	for _, r := range Rows() {
		t.Run(r.Name, func(t *testing.T) {
			if r.Seeds > 0 {
				r.Seeds = 1 // a day takes a while
			}
			s := r.Summarise(seeds)
			for _, f := range s.Failures {
				t.Error(f)
			}
			evaluations += s.Evaluations
			t.Logf("%d evaluations, error %.2f/%.2f us, bound %.2f us", s.Evaluations, P(s.Err, .5)/1e3, P(s.Err, .99)/1e3, P(s.Bound, .5)/1e3)
		})
	}
	if evaluations < 50_000 {
		t.Errorf("only %d evaluations", evaluations)
	}
}

func TestTheFirstBoundComesAtOnceAndIsSoonTight(t *testing.T) {
	for seed := range uint64(10) {
		r := Run(Scenario{Seed: seed, Warm: 5 * time.Second, Length: 2 * time.Second})
		if r.FirstBoundNS <= 0 || r.FirstBoundNS > int64(20*time.Millisecond) {
			t.Errorf("seed %d: first bound after %v", seed, time.Duration(r.FirstBoundNS))
		}
		if b := P(r.Bound, 1); !(b <= 85_000) {
			t.Errorf("seed %d: bound after 5 s %.0f ns", seed, b)
		}
	}
}

func TestTheSkewIsKnownSoon(t *testing.T) {
	for seed := range uint64(10) {
		r := Run(Scenario{Seed: seed, Length: 70 * time.Second})
		if e, b := r.SkewErrPPB[10*time.Second], r.SkewBoundPPB[10*time.Second]; e > b || b > 13_000 {
			t.Errorf("seed %d, 10 s: error %.0f ppb, bound %.0f ppb", seed, e, b)
		}
		if e, b := r.SkewErrPPB[60*time.Second], r.SkewBoundPPB[60*time.Second]; e > b || b > 6_000 {
			t.Errorf("seed %d, 60 s: error %.0f ppb, bound %.0f ppb", seed, e, b)
		}
	}
}

// A check that cannot fail proves nothing: with limits that the clock does not keep, it must find misses or violations.
func TestAClockBeyondItsDeclaredLimitsIsNoticed(t *testing.T) {
	r := Run(Scenario{Seed: 1, ThermalPPM: 60, ThermalPeriod: 20 * time.Second, Fwd: KernelLAN, Warm: time.Minute, Length: 5 * time.Minute,
		Config: estimate.Config{EtaPPMPerS: 0.02}})
	if r.Stats.Violations == 0 || r.Stats.EtaPPMPerS <= 0.02 {
		t.Errorf("stats %+v with %d misses", r.Stats, r.Misses)
	}
}

func TestQuantiles(t *testing.T) {
	s := []float64{1, 2, 3, 4}
	if P(s, 0) != 1 || P(s, .5) != 3 || P(s, 1) != 4 {
		t.Errorf("quantiles %v %v %v", P(s, 0), P(s, .5), P(s, 1))
	}
	if v := P(nil, .5); v == v {
		t.Errorf("quantile of nothing is %v", v)
	}
}

func TestADayIsHeldAgainstAnHour(t *testing.T) {
	row := func(name string, err float64) Summary {
		return Summary{Row: Row{Scenario: Scenario{Name: name}}, Result: Result{Err: []float64{err}}}
	}
	if f := Across([]Summary{row("LAN, after 1 h", 1000), row("LAN, after 1 day", 1190)}); f != nil {
		t.Errorf("failures %v", f)
	}
	if f := Across([]Summary{row("LAN, after 1 h", 1000), row("LAN, after 1 day", 1210)}); len(f) != 1 {
		t.Errorf("failures %v", f)
	}
}
