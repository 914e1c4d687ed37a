package ranks

import (
	"slices"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// stamped notes when a rank comes to each round.
type stamped struct {
	collective.Member[engine.Word]
	arrived *[]int64
	begin   time.Time
}

func (s stamped) Arrive(round int64, w engine.Word) error {
	*s.arrived = append(*s.arrived, int64(time.Since(s.begin)))
	return s.Member.Arrive(round, w)
}

// BenchmarkLockstep measures, by stamps, how long the engine of the last of 8 ranks hears of the end of a round after the last has
// come to it, at steps of 2 ms, with a row of each iteration. So long the ranks wait for each other's word and not for each other.
func BenchmarkLockstep(b *testing.B) {
	const ranks = 8
	dev := sim.Config{Cost: sim.Cost{Step: 2e6}, MaxSlots: 8, Shallow: true, Exact: true}
	begin := time.Now()
	var arrived, released [ranks][]int64
	r := &rig{t: b, made: func(g *Group) {
		g.put = func(*rows.Row) {}
		for rank, k := range g.ranks {
			p := k.(local).Engine.Config().Peers
			p.Member = stamped{p.Member, &arrived[rank], begin}
			hear := p.Hear
			p.Hear = func(words []engine.Word, it *engine.Iteration) {
				if words != nil {
					released[rank] = append(released[rank], int64(time.Since(begin)))
				}
				hear(words, it)
			}
		}
	}}
	r.open(Options{Engine: engine.Config{Overlap: true}, Sink: rows.Sink{Interval: 1}}, slices.Repeat([]sim.Config{dev}, ranks))
	var wg sync.WaitGroup
	for i := range ranks {
		s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: b.N + 10, IgnoreEOS: true})
		if err != nil {
			b.Fatal(err)
		}
		wg.Go(func() {
			if _, done, err := finish(s); err != nil || done.Err != nil {
				b.Errorf("%v, %v", done.Err, err)
			}
		})
	}
	wg.Wait()
	r.stop()
	var took []int64
	for round := range released[0] {
		last, heard := int64(0), int64(0)
		for rank := range ranks {
			last, heard = max(last, arrived[rank][round]), max(heard, released[rank][round])
		}
		took = append(took, heard-last)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "us-p50")
	b.ReportMetric(float64(took[len(took)*99/100])/1e3, "us-p99")
}

// BenchmarkStatistics is what 8 ranks add to a step, for each of them, to tell each other their rows and to make sets of these;
// and what of it rank 0's engine does, for all. Making a row is in gpu/stats, what becomes of it in shared/ledger.
func BenchmarkStatistics(b *testing.B) {
	const ranks = 8
	for _, gathers := range []bool{false, true} {
		b.Run(map[bool]string{false: "riding", true: "gathered"}[gathers], func(b *testing.B) {
			g := &Group{aligner: stats.NewAligner(ranks), put: func(*rows.Row) {}}
			var all []*member
			row := make([]rows.Row, ranks)
			for rank := range ranks {
				m := &member{rank: rank, gathers: gathers, collector: new(stats.Collector)}
				if rank == 0 {
					m.align, m.gathered = g.align, g.gathered
				}
				all = append(all, m)
				row[rank] = rows.Row{Rank: int64(rank), Covers: 1, Requests: rows.Requests{New: 1}, Sums: rows.Sums{Output: 256}}
			}
			first := time.Duration(0)
			b.ReportAllocs()
			for b.Loop() {
				words := make([]engine.Word, ranks)
				for rank, m := range all {
					row[rank].Iter++
					m.put(&row[rank])
					m.tell(&words[rank], nil)
				}
				if gathers {
					again := make([]engine.Word, ranks)
					for rank, m := range all {
						again[rank], _ = m.gather(words)
					}
					words = again
				}
				begin := time.Now()
				all[0].hear(words, nil)
				first += time.Since(begin)
				for _, m := range all[1:] {
					m.hear(words, nil)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/ranks, "ns/step")
			b.ReportMetric(float64(first.Nanoseconds())/float64(b.N), "ns/step-of-rank-0")
		})
	}
}
