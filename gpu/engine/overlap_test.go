package engine

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

const (
	stepTime = 2 * time.Millisecond
	hostTime = time.Millisecond
)

// throughput is tokens a second, in fake time, of 4 sequences with 2 ms of device and 1 ms of host work a step.
func throughput(t *testing.T, overlap bool) (rate float64) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: overlap, OnIteration: func(*Iteration) { time.Sleep(hostTime) }},
			sim.Config{Cost: sim.Cost{Step: float64(stepTime)}})
		defer r.stop()
		start := time.Now()
		var seqs []*Sequence
		for i := range int32(4) {
			s, err := r.Submit(request(5, i, 200))
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		tokens := 0
		for _, s := range seqs {
			tokens += len(r.finish(s).ids)
		}
		rate = float64(tokens) / time.Since(start).Seconds()
	})
	return rate
}

func TestOverlapHidesTheHostBehindTheDevice(t *testing.T) {
	plain, overlapped := throughput(t, false), throughput(t, true)
	t.Logf("%.0f tokens/s without overlap, %.0f with: %.2f times", plain, overlapped, overlapped/plain)
	if overlapped < 1.4*plain {
		t.Errorf("overlap gives %.2f times the throughput, want at least 1.4", overlapped/plain)
	}
}

// TestSubmitReturnsWhileTheForwardIsHeld stops the device in the middle of a forward.
func TestSubmitReturnsWhileTheForwardIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		now := clock()
		d, err := sim.New(sim.Config{Now: now, Cost: sim.Cost{Step: 1}, Sleep: func(time.Duration) { <-gate }})
		if err != nil {
			t.Fatal(err)
		}
		c := &counting{Backend: d}
		r := newRigOn(t, Config{Now: now, Overlap: true}, c)
		defer r.stop()
		s, err := r.Submit(request(5, 1, 6))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // everything stands: the device in the forward of the first step
		if n := c.submits.Load(); n != 2 {
			t.Errorf("%d steps submitted, want the second while the first is held", n)
		}
		other, err := r.Submit(request(5, 2, 6)) // the engine answers all the same
		if err != nil {
			t.Fatal(err)
		}
		other.Cancel()
		if res := r.finish(other); res.done.Reason != infer.FinishCancelled {
			t.Errorf("done %+v, want cancelled", res.done)
		}
		synctest.Wait() // the load is told after the end
		if l := r.Load(); l.Running != 1 || l.Iter != 2 {
			t.Errorf("load %+v", l)
		}
		close(gate)
		if res := r.finish(s); len(res.ids) != 6 {
			t.Errorf("%d tokens, want 6", len(res.ids))
		}
	})
}

// counting counts the steps that were submitted.
type counting struct {
	backend.Backend
	submits atomic.Int64
}

func (c *counting) Submit(b *backend.Batch) *backend.Step {
	c.submits.Add(1)
	return c.Backend.Submit(b)
}

func TestIterationsAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sum Iteration
		last := int64(0)
		r := newRig(t, Config{Overlap: true, MaxBatchSize: 4, MaxNumTokens: 8, OnIteration: func(it *Iteration) {
			if it.Iter != last+1 || it.BuiltNS > it.CollectedNS || it.Stamps.ForwardStartNS > it.Stamps.SampleEndNS || it.Err != nil {
				t.Errorf("iteration %+v after %d", it, last)
			}
			if s := it.Pool.Stats(); s.Free+s.Used+s.Leased+s.Cached != s.Max {
				t.Errorf("kv %+v", s)
			}
			last = it.Iter
			sum.ContextTokens += it.ContextTokens
			sum.OutputTokens += it.OutputTokens
			sum.NewRequests += it.NewRequests
			sum.Completed += it.Completed
			sum.Cancelled += it.Cancelled
		}}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		var seqs []*Sequence
		for i := range int32(10) {
			s, err := r.Submit(request(20, i, 10))
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		seqs[9].Cancel()
		tokens := 0
		for _, s := range seqs {
			tokens += len(r.finish(s).ids)
		}
		r.stop()
		if sum.ContextTokens != 9*20 || sum.OutputTokens != tokens || sum.NewRequests != 10 || sum.Completed != 9 || sum.Cancelled != 1 {
			t.Errorf("sums %+v, want 180 context tokens, %d output tokens, 10 new, 9 completed, 1 cancelled", sum, tokens)
		}
	})
}

func TestReportSaysWhatASequenceCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 4, MaxNumTokens: 8, MaxStepRecords: 5},
			sim.Config{TokensPerBlock: 4, Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		req := request(18, 1, 10)
		r.run(req)
		req.ReturnPerfMetrics = true
		rep := r.run(req).done.Report
		if rep.PromptTokens != 18 || rep.CachedTokens != 17 || rep.OutputTokens != 10 || rep.Preemptions != 0 {
			t.Errorf("tokens %+v", rep)
		}
		if want := (infer.KVCounts{AllocTotalBlocks: 7, AllocNewBlocks: 3, ReusedBlocks: 5, PartialBlocks: 1}); rep.KV != want {
			t.Errorf("kv %+v, want %+v", rep.KV, want)
		}
		stamps := []int64{rep.QueuedNS, rep.FirstScheduledNS, rep.Chunks[0].ForwardStartNS, rep.Chunks[0].ForwardEndNS, rep.FirstTokenNS, rep.LastTokenNS, rep.FinishedNS}
		for i, s := range stamps {
			if s == 0 || (i > 0 && s < stamps[i-1]) {
				t.Errorf("stamps %v are not in order", stamps)
				break
			}
		}
		if rep.LastIter-rep.FirstIter != 9 || len(rep.Chunks) != 1 || rep.Chunks[0].Tokens != 1 || rep.Chunks[0].KVTokens != 17 {
			t.Errorf("iterations %d to %d, chunks %+v", rep.FirstIter, rep.LastIter, rep.Chunks)
		}
		st := decoded(t, rep)
		if len(st.Step) != 5 || len(st.Iter) != 5 || len(st.TokenNS) != 5 || st.Truncated != 4 || st.KVTokens[0] != 18 || st.Step[4] != 4 || st.Iter[1] != st.Iter[0]+1 {
			t.Errorf("steps %+v", st)
		}
		if r.run(request(5, 2, 3)).done.Report.Steps != nil {
			t.Error("steps though not asked for")
		}
	})
}

// BenchmarkOverlap runs in real time; the host work is a busy wait, as real host work is.
func BenchmarkOverlap(b *testing.B) {
	for name, overlap := range map[string]bool{"off": false, "on": true} {
		b.Run(name, func(b *testing.B) {
			busy := func(*Iteration) {
				for start := time.Now(); time.Since(start) < hostTime; {
				}
			}
			r := newRig(b, Config{Overlap: overlap, OnIteration: busy}, sim.Config{Cost: sim.Cost{Step: float64(stepTime)}})
			tokens := 0
			for b.Loop() {
				tokens += len(r.run(request(5, 1, 200)).ids)
			}
			b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

// BenchmarkHost is what a step costs the engine's goroutine with a device that takes no time, at 256 sequences.
func BenchmarkHost(b *testing.B) {
	r := newRig(b, Config{Overlap: true}, sim.Config{Shallow: true, Layers: 1, KVHeads: 1, KVBlocks: 1 << 14})
	b.ReportAllocs()
	tokens := 0
	for b.Loop() {
		var seqs []*Sequence
		for i := range int32(256) {
			s, err := r.Submit(request(5, i, 200))
			if err != nil {
				b.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		for _, s := range seqs {
			tokens += len(r.finish(s).ids)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
}
