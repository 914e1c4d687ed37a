package ranks

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/pipeline"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

var update = flag.Bool("update", false, "write the golden files anew")

// newPipelines makes a group whose ranks are pipelines of simulated stages, each of which takes its part of the time.
func newPipelines(t testing.TB, ranks, stages int, o Options, dev sim.Config) *rig {
	t.Helper()
	start := time.Now()
	o.Engine.Now = func() int64 { return int64(time.Since(start)) + 1 }
	r := &rig{t: t}
	o.Sink.Put = func(row *rows.Row) { r.rows = append(r.rows, *row) }
	dev.Now, dev.Layers = o.Engine.Now, max(dev.Layers, 4)
	c := &dev.Cost
	for _, part := range []*float64{&c.Step, &c.PrefillToken, &c.Decode, &c.KVToken} {
		*part /= float64(stages)
	}
	for range ranks {
		dev.Cost.Step *= 1.03 // so that no two ranks end a step at the same moment of simulated time
		var all []backend.Backend
		for i := range stages {
			dev.Stage = backend.Stage{First: dev.Layers * i / stages, End: dev.Layers * (i + 1) / stages}
			d, err := sim.New(dev)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, d)
		}
		p, err := pipeline.New(all...)
		if err != nil {
			t.Fatal(err)
		}
		o.Backends = append(o.Backends, p)
	}
	return r.start(o)
}

func TestTextsOfPipelinesAreThoseOfOneDevice(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		for _, stages := range []int{2, 4} {
			synctest.Test(t, func(t *testing.T) {
				list := requests(rand.New(rand.NewPCG(uint64(stages), 5)), 60, small.Vocab)
				want := texts(t, list, small)
				dev := small
				dev.Cost = sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000}
				r := newPipelines(t, ranks, stages, Options{Engine: engine.Config{Overlap: true, PrefixReuse: true, MaxNumTokens: 40, HostKVBytes: 1 << 20}}, dev)
				var wg sync.WaitGroup
				for i, req := range list {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * 100 * time.Microsecond)
						s, err := r.Submit(req)
						if err != nil {
							t.Error(err)
							return
						}
						if got, _, err := finish(s); err != nil || !slices.Equal(got, want[i]) {
							t.Errorf("%d ranks of %d stages, request %d: %v, want %v, error %v", ranks, stages, i, got, want[i], err)
						}
					})
				}
				wg.Wait()
				r.stop()
			})
		}
	}
}

// TestStepsSayWhenEachStageRanThem: the stages of a step follow each other, each stage runs one step at a time, and they work on
// different ones at the same time.
func TestStepsSayWhenEachStageRanThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const stages = 3
		dev := small
		dev.Cost, dev.Layers = sim.Cost{Step: 3e6, PrefillToken: 10_000}, 6
		r := newPipelines(t, 1, stages, Options{Engine: engine.Config{MaxNumTokens: 16}}, dev)
		busy := make([]map[int64][2]int64, stages) // when a stage ran which iteration
		for i := range busy {
			busy[i] = map[int64][2]int64{}
		}
		note := func(iter, start int64, cuts []int64, end int64) {
			t.Helper()
			if len(cuts) != 2*(stages-1) {
				t.Fatalf("iteration %d: cuts %v of %d stages", iter, cuts, stages)
			}
			at := append(append([]int64{start}, cuts...), end)
			if !slices.IsSorted(at) {
				t.Errorf("iteration %d goes through its stages at %v", iter, at)
			}
			for i := range stages {
				busy[i][iter] = [2]int64{at[2*i], at[2*i+1]}
			}
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		for i := range 6 {
			s, err := r.Submit(infer.Request{ID: int64(i), Prompt: make([]int32, 40), MaxTokens: 20, IgnoreEOS: true, ReturnPerfMetrics: true})
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				_, done, err := finish(s)
				if err != nil || len(done.Report.Chunks) < 3 {
					t.Errorf("%d chunks, %v", len(done.Report.Chunks), err)
					return
				}
				steps, err := done.Report.Steps.Decode()
				if err != nil || len(steps.Iter) != 19 {
					t.Errorf("%d steps, %v", len(steps.Iter), err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for _, c := range done.Report.Chunks {
					note(c.Iter, c.ForwardStartNS, c.StageNS, c.ForwardEndNS)
				}
				for i, iter := range steps.Iter {
					var cuts []int64
					for _, column := range steps.StageNS {
						cuts = append(cuts, column[i])
					}
					note(iter, steps.ForwardStartNS[i], cuts, steps.ForwardEndNS[i])
				}
			})
		}
		wg.Wait()
		r.stop()
		beside := 0
		for i := range busy {
			for iter, x := range busy[i] {
				if next, ok := busy[i][iter+1]; ok && next[0] < x[1] {
					t.Errorf("stage %d begins iteration %d at %d, before it ended that before at %d", i, iter+1, next[0], x[1])
				}
				if other, ok := busy[(i+1)%stages][iter-1]; ok && other[0] < x[1] && x[0] < other[1] {
					beside++
				}
			}
		}
		if beside < 20 {
			t.Errorf("stages worked on different steps at the same time in %d cases", beside)
		}
	})
}

// A node of any number of ranks and stages hands KV over to one of any other.
func TestKVIsHandedOverBetweenNodesOfAnyShape(t *testing.T) {
	const most = 4 // of ranks and of stages
	list := requests(rand.New(rand.NewPCG(9, 3)), 12, small.Vocab)
	for i := range list {
		list[i].MaxTokens += 2
	}
	for i := range 4 { // and some again, whose prompts are cached by then
		again := list[i]
		again.ID = int64(len(list) + 1)
		list = append(list, again)
	}
	type shape struct{ ranks, stages int }
	var shapes []shape
	for ranks := 1; ranks <= most; ranks *= 2 {
		for stages := 1; stages <= most; stages *= 2 {
			shapes = append(shapes, shape{ranks, stages})
		}
	}
	dev := small
	dev.Layers = most
	var want [][]int32
	synctest.Test(t, func(t *testing.T) { want = texts(t, list, dev) })
	dev.Cost = sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000, CopyByte: 1}
	o := Options{Engine: engine.Config{Overlap: true, PrefixReuse: true, MaxNumTokens: 40}}
	for _, from := range shapes {
		for _, to := range shapes {
			synctest.Test(t, func(t *testing.T) {
				ctx, gen := newPipelines(t, from.ranks, from.stages, o, dev), newPipelines(t, to.ranks, to.stages, o, dev)
				var reused atomic.Int64
				var wg sync.WaitGroup
				for i, req := range list {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * 300 * time.Microsecond)
						got, cached, err := handOver(ctx, gen, req)
						if err != nil || !slices.Equal(got, want[i]) {
							t.Errorf("%v to %v, request %d: %v, want %v, error %v", from, to, i, got, want[i], err)
						}
						reused.Add(int64(cached))
					})
				}
				wg.Wait()
				if reused.Load() == 0 {
					t.Errorf("%v to %v: nothing was reused", from, to)
				}
				ctx.stop()
				gen.stop()
			})
		}
	}
}

// decode runs so many sequences to their ends and gives the time that their tokens after the first took, and how many those were.
func decode(t testing.TB, r *rig, sequences, tokens int) (took time.Duration, n int) {
	t.Helper()
	var mu sync.Mutex
	var first, last int64
	var wg sync.WaitGroup
	for i := range sequences {
		s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{int32(i), 2, 3}, MaxTokens: tokens, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			_, done, err := finish(s)
			if err != nil || done.Err != nil {
				t.Errorf("%v, %v", done.Err, err)
			}
			mu.Lock()
			defer mu.Unlock()
			first, last = max(first, done.Report.FirstTokenNS), max(last, done.Report.LastTokenNS)
		})
	}
	wg.Wait()
	return time.Duration(last - first), sequences * (tokens - 1)
}

// In simulated time nothing but the stages takes any: the four of them are never idle once the micro-batches are full.
func TestFourStagesWorkAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := sim.Config{Cost: sim.Cost{Step: 8e6}, MaxSlots: 16}
		r := newPipelines(t, 1, 4, Options{Sink: rows.Sink{Interval: 1}}, dev)
		took, n := decode(t, r, 16, 100)
		r.stop()
		ideal := time.Duration(n/4) * 2060 * time.Microsecond // 4 sequences a micro-batch, a stage's time each
		if took > ideal*10/9 {
			t.Errorf("%d tokens took %v, the stages need %v", n, took, ideal)
		}
		seen := map[int64]bool{}
		for _, row := range r.rows {
			if !row.Drain {
				seen[row.Batch.Micro.V] = true
			}
		}
		if len(seen) != 4 {
			t.Errorf("rows name %d micro-batches, want 4", len(seen))
		}
	})
}

// BenchmarkPipeline gives the throughput of four stages of 2 ms with four micro-batches as a part of the ideal that the times of the
// stages allow.
func BenchmarkPipeline(b *testing.B) {
	dev := sim.Config{Cost: sim.Cost{Step: 8e6}, MaxSlots: 16, Exact: true, Shallow: true} // what is measured is the engine, not how hard a device checks its KV
	r := newPipelines(b, 1, 4, Options{Sink: rows.Sink{Interval: 1}}, dev)
	tokens := max(b.N, 20)
	took, n := decode(b, r, 16, tokens)
	r.stop()
	ideal := time.Duration(n/4) * 2060 * time.Microsecond // see newPipelines
	b.ReportMetric(100*float64(ideal)/float64(took), "%-of-ideal")
}

// TestGoldenRows holds what two ranks of two stages say of a fixed load against a file.
func TestGoldenRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := small
		dev.Cost = sim.Cost{Step: 1e6, PrefillToken: 10_000}
		r := newPipelines(t, 2, 2, Options{Engine: engine.Config{Overlap: true, PrefixReuse: true, MaxNumTokens: 16}, Sink: rows.Sink{Interval: 1}}, dev)
		for i := range 3 {
			prompt := make([]int32, 20)
			for k := range prompt {
				prompt[k] = int32(k + 100*i)
			}
			time.Sleep(170 * time.Microsecond) // at a moment of its own
			s, err := r.Submit(infer.Request{ID: int64(i + 1), Prompt: prompt, MaxTokens: 3, IgnoreEOS: true})
			if err != nil {
				t.Fatal(err)
			}
			if i == 1 {
				continue // beside the third
			}
			if _, _, err := finish(s); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		r.stop()
		checkSets(t, r.rows, 2, 1)
		e := rows.NewEncoder(rows.Static{Node: "node", ClockID: "clock", Mode: "overlap", MaxBatchSize: 8, MaxNumTokens: 16, TokensPerBlock: 8, Tier: "host"})
		var got []byte
		for i := range r.rows {
			r.rows[i].WallNS, r.rows[i].Seq = 0, int64(i+1)
			got = append(e.Append(got, &r.rows[i]), '\n')
		}
		file := filepath.Join("testdata", "dp2pp2.rows.ndjson")
		if *update {
			if err := os.WriteFile(file, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("rows differ from %s (-update writes it):\n%s", file, got)
		}
	})
}
