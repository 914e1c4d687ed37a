package engine

import (
	"math"
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

func TestEnergyThatIsNotMeasuredIsNotThere(t *testing.T) {
	r := newRig(t, Config{Energy: func() (float64, bool) { return 0, false }}, sim.Config{})
	if rep := r.run(request(2, 1, 3)).done.Report; rep.EnergyJ != nil {
		t.Errorf("%v joules", *rep.EnergyJ)
	}
}
