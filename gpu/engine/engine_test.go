package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

func TestTextDoesNotDependOnHowItIsComputed(t *testing.T) {
	plain := newRig(t, Config{MaxNumTokens: 4096}, sim.Config{})
	want := plain.run(request(100, 1, 40))
	if want.done.Reason != infer.FinishLength || len(want.ids) != 40 || want.done.Report.OutputTokens != 40 {
		t.Fatalf("%d tokens, done %+v", len(want.ids), want.done)
	}
	tests := []struct {
		name string
		cfg  Config
		dev  sim.Config
	}{
		{"overlap", Config{Overlap: true}, sim.Config{}},
		{"small chunks", Config{Overlap: true, MaxBatchSize: 4, MaxNumTokens: 7}, sim.Config{}},
		{"other blocks", Config{Overlap: true, PrefixReuse: true}, sim.Config{TokensPerBlock: 5}},
		{"just enough blocks", Config{Overlap: true, PrefixReuse: true}, sim.Config{TokensPerBlock: 10, KVBlocks: 14}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, tt.cfg, tt.dev)
			sameText(t, "first run", r.run(request(100, 1, 40)).ids, want.ids)
			again := r.run(request(100, 1, 40))
			sameText(t, "second run", again.ids, want.ids)
			if tt.cfg.PrefixReuse != (again.done.Report.CachedTokens > 0) {
				t.Errorf("reuse %v, but %d cached tokens", tt.cfg.PrefixReuse, again.done.Report.CachedTokens)
			}
		})
	}
}

func TestHandOverGivesTheSameText(t *testing.T) {
	ctx := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 8, MaxNumTokens: 16}, sim.Config{})
	gen := newRig(t, Config{Overlap: true, PrefixReuse: true}, sim.Config{})
	want := newRig(t, Config{}, sim.Config{}).run(request(100, 1, 40))
	for i := range 3 {
		got, err := ctx.disaggregated(gen, request(100, 1, 40))
		if err != nil {
			t.Fatal(err)
		}
		sameText(t, "disaggregated", got.ids, want.ids)
		if cached := got.done.Report.CachedTokens; (i > 0) != (cached == 96) {
			t.Errorf("run %d: %d tokens were here already", i, cached)
		}
	}
}

// TestASequenceEndsAsAsked takes the ends from a text that is known to go on.
func TestASequenceEndsAsAsked(t *testing.T) {
	text := newRig(t, Config{}, sim.Config{}).run(request(10, 1, 12)).ids
	at := func(i int) *int32 { return &text[i] }
	tests := []struct {
		name   string
		eos    []int32
		change func(r *infer.Request)
		tokens int
		reason infer.FinishReason
		stop   *int32
	}{
		{"max_tokens", nil, func(r *infer.Request) { r.MaxTokens = 3 }, 3, infer.FinishLength, nil},
		{"one token", nil, func(r *infer.Request) { r.MaxTokens = 1 }, 1, infer.FinishLength, nil},
		{"EOS", text[4:5], func(r *infer.Request) { r.IgnoreEOS = false }, 5, infer.FinishStop, at(4)},
		{"EOS as the first token", text[:1], func(r *infer.Request) { r.IgnoreEOS = false }, 1, infer.FinishStop, at(0)},
		{"EOS is ignored", text[4:5], func(*infer.Request) {}, 12, infer.FinishLength, nil},
		{"a stop token", nil, func(r *infer.Request) { r.StopTokens = []int32{-1, text[6]} }, 7, infer.FinishStop, at(6)},
		{"EOS at max_tokens is a stop", text[2:3], func(r *infer.Request) { r.IgnoreEOS, r.MaxTokens = false, 3 }, 3, infer.FinishStop, at(2)},
		{"resumed after output", nil, func(r *infer.Request) { r.Output = text[:5] }, 7, infer.FinishLength, nil},
		{"context only", nil, func(r *infer.Request) { r.Kind = infer.ContextOnly }, 1, infer.FinishLength, nil},
	}
	for _, overlap := range []bool{false, true} {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("%s, overlap %v", tt.name, overlap), func(t *testing.T) {
				r := newRig(t, Config{EOS: tt.eos, Overlap: overlap, PrefixReuse: true}, sim.Config{})
				req := request(10, 1, 12)
				tt.change(&req)
				got := r.run(req)
				sameText(t, "text", got.ids, text[len(req.Output):len(req.Output)+tt.tokens])
				d := got.done
				if d.Reason != tt.reason || d.Err != nil || (d.StopToken == nil) != (tt.stop == nil) || (tt.stop != nil && *d.StopToken != *tt.stop) {
					t.Errorf("done %+v, want %s by %v", d, tt.reason, tt.stop)
				}
			})
		}
	}
}

func TestFinishedTellsWhetherGenerationGoesOn(t *testing.T) {
	for _, tt := range []struct {
		name   string
		req    infer.Request
		reason infer.FinishReason
		want   bool
	}{
		{"more tokens are wanted", infer.Request{MaxTokens: 5}, infer.FinishLength, false},
		{"one token was wanted", infer.Request{MaxTokens: 1}, infer.FinishLength, true},
		{"one more was wanted", infer.Request{MaxTokens: 3, Output: []int32{1, 2}}, infer.FinishLength, true},
		{"it stopped", infer.Request{MaxTokens: 5}, infer.FinishStop, true},
		{"it failed", infer.Request{MaxTokens: 5}, infer.FinishFailed, true},
	} {
		if got := Finished(tt.req, &infer.Done{Reason: tt.reason}); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func samplings() []infer.Sampling {
	return []infer.Sampling{
		{},
		{Temperature: 2, Seed: 11},
		{Temperature: 1.5, TopP: 0.9, TopK: 12, Seed: 12, RepetitionPenalty: 1.3, FrequencyPenalty: 0.5, PresencePenalty: 0.2},
		{Logprobs: true, TopLogprobs: 3, FrequencyPenalty: 1},
	}
}

// TestCompanyAndPreemptionChangeNoText runs sequences alone, then together with too few blocks for all.
func TestCompanyAndPreemptionChangeNoText(t *testing.T) {
	dev := sim.Config{Vocab: 200, TokensPerBlock: 8}
	alone := newRig(t, Config{}, dev)
	var reqs []infer.Request
	var want [][]int32
	for i := range int32(16) {
		req := request(int(20+i), i%5, 60)
		for k := range req.Prompt {
			req.Prompt[k] %= 200
		}
		req.Sampling = samplings()[i%4]
		reqs, want = append(reqs, req), append(want, alone.run(req).ids)
	}
	for i := range reqs {
		reqs[i].ReturnPerfMetrics = true
	}
	dev.KVBlocks, dev.Cost.Step = 40, 1e6
	for _, cfg := range []Config{{}, {Overlap: true}, {Overlap: true, PrefixReuse: true, MaxBatchSize: 12, MaxNumTokens: 24}} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, cfg, dev)
			defer r.stop()
			preemptions := 0
			for i, res := range r.together(reqs) {
				sameText(t, fmt.Sprintf("request %d, overlap %v", i, cfg.Overlap), res.ids, want[i])
				if n := len(res.toks[0].Top); n != reqs[i].Sampling.TopLogprobs {
					t.Errorf("request %d: %d top logprobs, want %d", i, n, reqs[i].Sampling.TopLogprobs)
				}
				rep := res.done.Report
				preemptions += rep.Preemptions
				again := slices.IndexFunc(decoded(t, rep).Tokens, func(n int32) bool { return n > 1 }) // what was lost is computed anew
				if rep.Preemptions > 0 && (rep.PreemptedNS <= 0 || (len(rep.Chunks) < 2 && again < 0)) {
					t.Errorf("request %d was preempted for %d ns, in %d chunks", i, rep.PreemptedNS, len(rep.Chunks))
				}
			}
			if preemptions == 0 {
				t.Error("nothing was preempted: the test proves nothing")
			}
		})
	}
}

// together submits all requests at once and waits for all.
func (r *rig) together(reqs []infer.Request) []result {
	r.t.Helper()
	var seqs []*Sequence
	for _, req := range reqs {
		s, err := r.Submit(req)
		if err != nil {
			r.t.Fatal(err)
		}
		seqs = append(seqs, s)
	}
	var results []result
	for _, s := range seqs {
		results = append(results, r.finish(s))
	}
	return results
}

func TestBadRequestsAreRefused(t *testing.T) {
	r := newRig(t, Config{}, sim.Config{ContextLen: 100, KVBlocks: 4, TokensPerBlock: 16, Vocab: 50})
	ok := infer.Request{Prompt: []int32{1, 2}, MaxTokens: 2}
	for _, tt := range []struct {
		name   string
		change func(q *infer.Request)
		want   error
	}{
		{"no prompt", func(q *infer.Request) { q.Prompt = nil }, ErrInvalid},
		{"no tokens wanted", func(q *infer.Request) { q.MaxTokens = 0 }, ErrInvalid},
		{"all tokens given already", func(q *infer.Request) { q.Output = []int32{1, 2} }, ErrInvalid},
		{"a token outside the vocabulary", func(q *infer.Request) { q.Prompt = []int32{50} }, ErrInvalid},
		{"a negative token", func(q *infer.Request) { q.Output = []int32{-1} }, ErrInvalid},
		{"beyond the context", func(q *infer.Request) { q.MaxTokens = 99 }, ErrTooLong},
		{"a sum that overflows", func(q *infer.Request) { q.MaxTokens = 1<<63 - 1 }, ErrTooLong},
		{"beyond the KV of the device", func(q *infer.Request) { q.MaxTokens = 63 }, ErrTooLong},
		{"a generation without reservation", func(q *infer.Request) { q.Kind = infer.GenerationOnly }, ErrInvalid},
	} {
		req := ok
		tt.change(&req)
		if s, err := r.Submit(req); !errors.Is(err, tt.want) || s != nil {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
		}
	}
	if _, err := r.Reserve(context.Background(), ok); !errors.Is(err, ErrInvalid) {
		t.Errorf("an aggregated request was reserved: %v", err)
	}
}

func TestBadConfigIsRefused(t *testing.T) {
	now := clock()
	d, err := sim.New(sim.Config{MaxSlots: 8, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for name, cfg := range map[string]Config{
		"no clock":             {},
		"more than the slots":  {Now: now, MaxBatchSize: 9},
		"too few tokens":       {Now: now, MaxBatchSize: 8, MaxNumTokens: 7},
		"negative queue":       {Now: now, MaxWaiting: -1},
		"negative step record": {Now: now, MaxStepRecords: -1},
	} {
		if _, err := New(cfg, d); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestTheQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{MaxBatchSize: 1, MaxWaiting: 2}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		var seqs []*Sequence
		submit := func() error {
			s, err := r.Submit(request(5, 1, 4))
			if err == nil {
				seqs = append(seqs, s)
			}
			return err
		}
		for i := range 3 { // one runs, two wait
			if err := submit(); err != nil {
				t.Fatalf("request %d: %v", i, err)
			}
			synctest.Wait()
		}
		if err := submit(); !errors.Is(err, ErrQueueFull) {
			t.Errorf("error %v, want ErrQueueFull", err)
		}
		if l := r.Load(); l.Running != 1 || l.Waiting != 2 || l.WaitingTokens != 10 || l.KVUsedBlocks != 1 || l.KVMaxBlocks != 1024 {
			t.Errorf("load %+v", l)
		}
		for _, s := range seqs {
			r.finish(s)
		}
		if err := submit(); err != nil {
			t.Errorf("after the queue was empty: %v", err)
		}
		r.finish(seqs[3])
	})
}

func TestDrainEndsRunningWorkAndRefusesNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		defer r.stop()
		s, err := r.Submit(request(5, 1, 4))
		if err != nil {
			t.Fatal(err)
		}
		r.Drain()
		synctest.Wait()
		select {
		case <-r.Drained():
			t.Error("drained while a sequence runs")
		default:
		}
		if _, err := r.Submit(request(5, 1, 4)); !errors.Is(err, ErrDraining) {
			t.Errorf("error %v, want ErrDraining", err)
		}
		if res := r.finish(s); len(res.ids) != 4 {
			t.Errorf("%d tokens, want 4", len(res.ids))
		}
		<-r.Drained()
	})
}

func TestStopEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, MaxBatchSize: 3}, sim.Config{Cost: sim.Cost{Step: 1e6}})
		var seqs []*Sequence
		for range 4 {
			s, err := r.Submit(request(5, 1, 400))
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		waiting := make(chan error, 1)
		go func() {
			_, err := r.Reserve(context.Background(), infer.Request{Kind: infer.GenerationOnly, Prompt: []int32{1}, MaxTokens: 2})
			waiting <- err
		}()
		synctest.Wait()
		r.stop()
		for _, s := range seqs {
			if res := r.finish(s); res.done.Reason != infer.FinishFailed || !errors.Is(res.done.Err, ErrStopped) {
				t.Errorf("done %+v, want ErrStopped", res.done)
			}
		}
		if err := <-waiting; !errors.Is(err, ErrStopped) {
			t.Errorf("reservation: %v, want ErrStopped", err)
		}
		if _, err := r.Submit(request(5, 1, 4)); !errors.Is(err, ErrStopped) {
			t.Errorf("error %v, want ErrStopped", err)
		}
	})
}
