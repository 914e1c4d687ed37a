package engine

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/sim"
)

// TestJoulesAreSharedByTokens runs requests on a device that draws 100 W and tells so 20 times a second.
func TestJoulesAreSharedByTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		counter := func() (float64, bool) {
			return 5000 + 100*math.Floor(time.Since(start).Seconds()*20)/20, time.Since(start) > 30*time.Millisecond
		}
		r := newRig(t, Config{Overlap: true, MaxBatchSize: 8, Energy: counter}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		if rep := r.run(request(2, 99, 3)).done.Report; rep.EnergyJ != nil {
			t.Errorf("%v joules before the first reading", *rep.EnergyJ)
		}
		var mu sync.Mutex
		var all sync.WaitGroup
		sum, unknown := 0.0, 0
		for i := range 60 {
			all.Go(func() {
				time.Sleep(time.Duration(i) * 40 * time.Millisecond)
				rep := r.run(request(10, int32(i), 20+i*7%300)).done.Report
				mu.Lock()
				defer mu.Unlock()
				if rep.EnergyJ == nil {
					unknown++
				} else {
					sum += *rep.EnergyJ
				}
			})
		}
		all.Wait()
		if want := 100 * time.Since(start).Seconds(); math.Abs(sum/want-1) > 0.07 || unknown > 2 {
			t.Errorf("the requests used %.1f J, the device %.1f; %d do not know", sum, want, unknown)
		}
	})
}

// TestNoJouleIsLostOrMadeUp has a counter that moves with each reading. What it moved by while the engine ran is what the
// requests paid, all but rounding; what it moved by while nothing ran is nobody's.
func TestNoJouleIsLostOrMadeUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(3, 4))
		joules, busy, nobody, idle := 5e5, 0.0, 0.0, true // of the engine's goroutine
		counter := func() (float64, bool) {
			d := 0.1 + random.Float64()
			if joules += d; idle {
				nobody, idle = nobody+d, false
			} else {
				busy += d
			}
			return joules, true
		}
		r := newRig(t, Config{Overlap: true, MaxBatchSize: 8, Energy: counter, OnIdle: func(*Iteration) { idle = true }}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		paid := make([]float64, 60)
		for round := range 3 { // the engine is idle in between
			var all sync.WaitGroup
			for i := range 20 {
				all.Go(func() {
					time.Sleep(time.Duration(i*i%17) * time.Millisecond)
					if rep := r.run(request(10, int32(i), 5+i*7%90)).done.Report; rep.EnergyJ != nil {
						paid[20*round+i] = *rep.EnergyJ
					}
				})
			}
			all.Wait()
			time.Sleep(time.Second)
		}
		r.stop()
		sum := 0.0
		for i, j := range paid {
			if sum += j; j <= 0 {
				t.Errorf("request %d used %v J", i, j)
			}
		}
		if math.Abs(sum-busy) > 1e-6 || nobody <= 0 {
			t.Errorf("the requests used %.9f J, the iterations %.9f; %.3f are nobody's", sum, busy, nobody)
		}
	})
}

func TestEnergyThatIsNotMeasuredIsNotThere(t *testing.T) {
	r := newRig(t, Config{Energy: func() (float64, bool) { return 0, false }}, sim.Config{})
	if rep := r.run(request(2, 1, 3)).done.Report; rep.EnergyJ != nil {
		t.Errorf("%v joules", *rep.EnergyJ)
	}
}
