package collective

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkRelease measures, by stamps, how long the last of 8 ranks hears of the end of a round after the last has arrived, with
// work of 2 ms between two rounds.
func BenchmarkRelease(b *testing.B) {
	const ranks, step = 8, 2 * time.Millisecond
	h := New[int64](ranks, time.Minute)
	released := make([][]int64, ranks)
	arrived := make([]int64, b.N) // by the word of who was last
	begin := time.Now()
	var wg sync.WaitGroup
	for rank := range ranks {
		wg.Go(func() {
			m := h.Member(rank)
			for round := range b.N {
				time.Sleep(step)
				if err := m.Arrive(int64(round+1), int64(time.Since(begin))); err != nil {
					b.Error(err)
					return
				}
				r := <-m.Released()
				released[rank] = append(released[rank], int64(time.Since(begin)))
				if rank == 0 {
					arrived[round] = slices.Max(r.Words)
				}
			}
		})
	}
	wg.Wait()
	took := make([]int64, b.N)
	for round := range took {
		for rank := range ranks {
			took[round] = max(took[round], released[rank][round]-arrived[round])
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "us-p50")
	b.ReportMetric(float64(took[len(took)*99/100])/1e3, "us-p99")
}
