package ranks

import (
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/pipeline"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// TestCPURanksGoOnUnderCancels runs four ranks, two of them pipelines, on the processors that there are, with random cancels: for a second, or as
// long as MERIDIAN_RANKS_FOR says; as goroutines and as processes. Texts that were not cut are those of one rank.
func TestCPURanksGoOnUnderCancels(t *testing.T) {
	long := time.Second
	if v := os.Getenv("MERIDIAN_RANKS_FOR"); v != "" {
		var err error
		if long, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	m, err := model.Load("")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	now := func() int64 { return int64(time.Since(start)) + 1 }
	group := func(t *testing.T, stages ...int) *rig {
		o := Options{Engine: engine.Config{Overlap: true, PrefixReuse: true, MaxNumTokens: 64, Now: now}, Sink: rows.Sink{Interval: 3}}
		r := &rig{t: t}
		o.Sink.Put = func(row *rows.Row) { r.rows = append(r.rows, *row) }
		for _, n := range stages {
			b, err := cpuDevice(m, n, now)
			if err != nil {
				t.Fatal(err)
			}
			o.Backends = append(o.Backends, b)
		}
		return r.start(o)
	}
	list := requests(rand.New(rand.NewPCG(1, 1)), 20, m.Config.Vocab)
	one := group(t, 1)
	var want [][]int32
	for _, req := range list {
		ids, _, err := run(one, req)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, ids)
	}
	one.stop()
	for name, start := range map[string]func(*testing.T) *rig{
		"goroutines": func(t *testing.T) *rig { return group(t, 1, 2, 1, 2) },
		"processes": func(t *testing.T) *rig {
			return newProcesses(t, job{Ranks: 4, CPU: true, Engine: engineJob{Overlap: true, PrefixReuse: true, MaxNumTokens: 64}, Interval: 3}, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t)
			loadWithCancels(t, r, list, want, time.Now().Add(long))
			r.stop()
			checkSets(t, r.rows, 4, 3)
		})
	}
}

// loadWithCancels sends requests until the end, some of which it cancels.
func loadWithCancels(t *testing.T, r *rig, list []infer.Request, want [][]int32, end time.Time) {
	var wg sync.WaitGroup
	for worker := range 12 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(2, uint64(worker)))
			for time.Now().Before(end) {
				i := random.IntN(len(list))
				s, err := r.Submit(list[i])
				if err != nil {
					t.Error(err)
					return
				}
				if random.IntN(3) == 0 {
					time.Sleep(time.Duration(random.IntN(5000)) * time.Microsecond)
					s.Cancel()
				}
				ids, done, err := finish(s)
				if err != nil || done.Err == nil && !slices.Equal(ids, want[i]) {
					t.Errorf("request %d on rank %d: %v, want %v, error %v", i, s.Rank(), ids, want[i], err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func run(r *rig, req infer.Request) ([]int32, infer.Done, error) {
	s, err := r.Submit(req)
	if err != nil {
		return nil, infer.Done{}, err
	}
	return finish(s)
}

// cpuDevice is a pipeline of so many stages.
func cpuDevice(m *model.Model, stages int, now func() int64) (backend.Backend, error) {
	var all []backend.Backend
	for i := range stages {
		st := backend.Stage{First: m.Config.Layers * i / stages, End: m.Config.Layers * (i + 1) / stages}
		b, err := cpu.New(m, cpu.Options{Stage: st, Threads: 1, KVBlocks: 150, MaxSlots: 8, Now: now})
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return pipeline.New(all...)
}
