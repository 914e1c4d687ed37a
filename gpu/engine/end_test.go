package engine

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

func TestCancelKeepsWhatWasSampled(t *testing.T) {
	for _, overlap := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, Config{Overlap: overlap, PrefixReuse: true}, sim.Config{Cost: sim.Cost{Step: 1e6}})
			defer r.stop()
			want := r.run(request(40, 1, 20)).ids
			s, err := r.Submit(request(40, 1, 20))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(5500 * time.Microsecond) // in the middle of a step
			s.Cancel()
			s.Cancel()
			res := r.finish(s)
			if res.done.Reason != infer.FinishCancelled || !errors.Is(res.done.Err, ErrCancelled) || len(res.ids) != 5 {
				t.Errorf("%d tokens, done %+v", len(res.ids), res.done)
			}
			sameText(t, "before the cancel", res.ids, want[:len(res.ids)])
			s.Cancel() // after its end
			synctest.Wait()
		})
	}
}

func TestNextStopsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{}, sim.Config{Cost: sim.Cost{Step: 1e9}})
		defer r.stop()
		s, err := r.Submit(request(5, 1, 2))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		if _, _, err := s.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if res := r.finish(s); len(res.ids) != 2 {
			t.Errorf("%d tokens after the context of one Next ended, want 2", len(res.ids))
		}
	})
}

func TestDeadlinesEndSequences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{MaxBatchSize: 1, Overlap: true}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		start := time.Now()
		var seqs []*Sequence
		for _, ms := range []int64{10, 7} { // one runs, one waits
			req := request(5, 1, 100)
			req.DeadlineNS = r.cfg.Now() + ms*1e6
			s, err := r.Submit(req)
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		waited := r.finish(seqs[1])
		if at := time.Since(start); at != 7*time.Millisecond || len(waited.ids) != 0 || waited.done.Reason != infer.FinishExpired || !errors.Is(waited.done.Err, ErrDeadline) {
			t.Errorf("waiting one: after %v with %d tokens, done %+v", at, len(waited.ids), waited.done)
		}
		ran := r.finish(seqs[0])
		if at := time.Since(start); at != 10*time.Millisecond || len(ran.ids) < 8 || ran.done.Reason != infer.FinishExpired {
			t.Errorf("running one: after %v with %d tokens, done %+v", at, len(ran.ids), ran.done)
		}
		if rep := waited.done.Report; rep.FirstScheduledNS != 0 || rep.FirstTokenNS != 0 || rep.FinishedNS-rep.QueuedNS != 7e6 {
			t.Errorf("report of what never ran: %+v", rep)
		}
	})
}

var errDevice = errors.New("the device is on fire")

func TestAFailedStepEndsItsSequencesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := sim.Config{Cost: sim.Cost{Step: 1e6}, Fail: func(iter int64) error {
			if iter == 6 {
				return errDevice
			}
			return nil
		}}
		r := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 1, MaxNumTokens: 32}, dev)
		defer r.stop()
		a, err := r.Submit(request(300, 1, 20)) // the failure is in the middle of its prefill
		if err != nil {
			t.Fatal(err)
		}
		b, err := r.Submit(request(20, 2, 5))
		if err != nil {
			t.Fatal(err)
		}
		if res := r.finish(a); res.done.Reason != infer.FinishFailed || !errors.Is(res.done.Err, errDevice) {
			t.Errorf("done %+v, want the error of the device", res.done)
		}
		if res := r.finish(b); res.done.Err != nil || len(res.ids) != 5 {
			t.Errorf("the other sequence: done %+v", res.done)
		}
		// What the failed step should have written is not in the cache.
		res := r.run(request(300, 1, 20))
		if res.done.Report.CachedTokens > 5*32 {
			t.Errorf("%d tokens were reused, only %d had been written", res.done.Report.CachedTokens, 5*32)
		}
	})
}

func TestADeadDeviceEndsTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{MaxBatchSize: 1}, sim.Config{Fail: func(int64) error { return errDevice }})
		r.runs = errDevice
		defer r.stop()
		var reasons []error
		for i := range int32(5) {
			s, err := r.Submit(request(20, i, 5))
			if err != nil {
				reasons = append(reasons, err)
				continue
			}
			reasons = append(reasons, r.finish(s).done.Err)
		}
		for i, err := range reasons {
			if i < maxFailures && !errors.Is(err, errDevice) {
				t.Errorf("request %d: error %v, want the device's", i, err)
			}
		}
		if err := reasons[4]; !errors.Is(err, ErrStopped) {
			t.Errorf("the engine goes on after %d failures: %v", maxFailures, err)
		}
	})
}

// export submits a context request and waits for its first token.
func (r *rig) export(req infer.Request) (*Export, result) {
	r.t.Helper()
	req.Kind = infer.ContextOnly
	s, err := r.Submit(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.Export(), r.finish(s)
}

func TestAnExportExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{PrefixReuse: true, ExportDeadline: time.Second}, sim.Config{})
		defer r.stop()
		x, _ := r.export(request(40, 1, 5))
		span, err := x.NextSpan(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(900 * time.Millisecond)
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 2 {
			t.Errorf("%d blocks used under the lease, want 2", l.KVUsedBlocks)
		}
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 0 {
			t.Errorf("%d blocks used after the lease, want 0", l.KVUsedBlocks)
		}
		if _, err := x.NextSpan(context.Background()); !errors.Is(err, ErrDeadline) {
			t.Errorf("NextSpan: %v, want ErrDeadline", err)
		}
		if err := x.Read(context.Background(), span, make([]byte, SpanBytes(r.Info(), span))); !errors.Is(err, ErrDeadline) {
			t.Errorf("Read: %v, want ErrDeadline", err)
		}
		x.Release()
	})
}

func TestSpansComeWhilePrefillRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 4, MaxNumTokens: 32}, sim.Config{Cost: sim.Cost{Step: 4e6}})
		defer r.stop()
		r.run(request(32, 1, 1)) // the first block is cached
		start := time.Now()
		req := request(100, 1, 5)
		copy(req.Prompt, prompt(32, 1))
		req.Kind = infer.ContextOnly
		s, err := r.Submit(req)
		if err != nil {
			t.Fatal(err)
		}
		x := s.Export()
		want := []infer.Span{{LayerTo: 4, TokenTo: 32}}
		at := []time.Duration{0}
		for chunk, to := range []int{64, 96, 100} {
			for layer := range 4 {
				want = append(want, infer.Span{LayerFrom: layer, LayerTo: layer + 1, TokenFrom: 32 * (chunk + 1), TokenTo: to})
				at = append(at, time.Duration(4*chunk+layer+1)*time.Millisecond)
			}
		}
		for i := range want {
			span, err := x.NextSpan(context.Background())
			if err != nil || span != want[i] || time.Since(start) != at[i] {
				t.Fatalf("span %d: %+v after %v, error %v; want %+v after %v", i, span, time.Since(start), err, want[i], at[i])
			}
		}
		r.finish(s)
		x.Release()
	})
}

func TestAnExportEndsWithItsSequence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, MaxBatchSize: 1, MaxNumTokens: 16}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		req := request(100, 1, 5)
		req.Kind = infer.ContextOnly
		s, err := r.Submit(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Export().NextSpan(context.Background()); err != nil {
			t.Fatal(err)
		}
		s.Cancel()
		for {
			if _, err := s.Export().NextSpan(context.Background()); err != nil {
				if !errors.Is(err, ErrCancelled) {
					t.Errorf("NextSpan: %v, want ErrCancelled", err)
				}
				break
			}
		}
		r.finish(s)
		other, err := r.Submit(req) // released before it ran: prefill goes on, nothing is leased
		if err != nil {
			t.Fatal(err)
		}
		other.Export().Release()
		if res := r.finish(other); res.done.Err != nil {
			t.Errorf("done %+v", res.done)
		}
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 0 {
			t.Errorf("%d blocks used, want 0", l.KVUsedBlocks)
		}
	})
}

func TestTheLeaseLastsAsLongAsTheCopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{ExportDeadline: time.Second}, sim.Config{Cost: sim.Cost{CopyByte: 1e6}})
		defer r.stop()
		x, _ := r.export(request(40, 1, 5))
		span, err := x.NextSpan(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		go func() { read <- x.Read(context.Background(), span, make([]byte, SpanBytes(r.Info(), span))) }()
		synctest.Wait()
		x.Release()
		x.Release()
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 2 {
			t.Errorf("%d blocks used while the copy runs, want 2", l.KVUsedBlocks)
		}
		if err := <-read; err != nil {
			t.Errorf("the copy in flight: %v", err)
		}
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 0 {
			t.Errorf("%d blocks used after the copy, want 0", l.KVUsedBlocks)
		}
		if err := x.Read(context.Background(), span, make([]byte, SpanBytes(r.Info(), span))); !errors.Is(err, ErrCancelled) {
			t.Errorf("Read after Release: %v", err)
		}
	})
}

// Peers still ask while the node of an engine that has ended leaves: its pool is nobody's then.
func TestAnEngineThatHasEndedLendsNothing(t *testing.T) {
	r := newRig(t, Config{PrefixReuse: true}, sim.Config{})
	r.run(request(200, 1, 4))
	r.stop()
	var peers sync.WaitGroup
	for range 4 {
		peers.Go(func() {
			for range 50 {
				if r.Lend(prompt(200, 1)) != nil {
					t.Error("it lent something")
				}
			}
		})
	}
	peers.Wait()
}
