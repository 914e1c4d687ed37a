package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

// storm drives two engines with random requests of all kinds and checks each text against the same request run alone.
type storm struct {
	t        *testing.T
	ctx, gen *rig
	reqs     []infer.Request
	texts    [][]int32

	mu     sync.Mutex // guards counts
	counts map[string]int
}

func (st *storm) count(what string, n int) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.counts[what] += n
}

// newStorm makes the requests and their texts.
func newStorm(t *testing.T, rng *rand.Rand, dev sim.Config) *storm {
	st := &storm{t: t, counts: map[string]int{}}
	alone := newRig(t, Config{}, sim.Config{Vocab: dev.Vocab, Layers: dev.Layers, Windows: dev.Windows})
	for i := range int32(40) {
		req := request(1+rng.IntN(120), i%7, 1+rng.IntN(50))
		for k := range req.Prompt {
			req.Prompt[k] %= int32(dev.Vocab)
		}
		req.Sampling = samplings()[rng.IntN(4)]
		req.Priority = rng.IntN(3) - 1
		st.reqs = append(st.reqs, req)
		st.texts = append(st.texts, alone.run(req).ids)
	}
	alone.stop()
	cost := sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000, KVToken: 10, CopyByte: 3}
	dev.Cost = cost
	dev.KVBlocks = 60
	st.ctx = newRig(t, Config{Overlap: true, PrefixReuse: true, HostKVBytes: 100 << 20, MaxBatchSize: 6, MaxNumTokens: 40, ExportDeadline: 20 * time.Millisecond}, dev)
	dev.KVBlocks = 36
	st.gen = newRig(t, Config{Overlap: true, PrefixReuse: true, HostKVBytes: 10 << 10, MaxBatchSize: 8, MaxNumTokens: 64, ReserveDeadline: 20 * time.Millisecond}, dev)
	return st
}

// one runs one request in one of many ways.
func (st *storm) one(id int, rng *rand.Rand) {
	i := rng.IntN(len(st.reqs))
	req, text := st.reqs[i], st.texts[i]
	req.ID = int64(id)
	if rng.IntN(4) == 0 && len(text) > 1 {
		given := rng.IntN(len(text))
		req.Output, text = text[:given], text[given:]
	}
	if rng.IntN(8) == 0 {
		req.DeadlineNS = st.gen.cfg.Now() + rng.Int64N(30e6) + 1
	}
	var ids []int32
	var done infer.Done
	var err error
	if rng.IntN(3) == 0 {
		ids, done, err = st.aggregated(req, rng)
	} else {
		ids, done, err = st.twoLegs(req, rng)
	}
	if err != nil {
		st.count("refused", 1)
		if !errors.Is(err, ErrDeadline) && !errors.Is(err, ErrCancelled) && !errors.Is(err, context.DeadlineExceeded) {
			st.t.Errorf("request %d: %v", id, err)
		}
		return
	}
	st.count(string(done.Reason), 1)
	st.count("preemptions", done.Report.Preemptions)
	st.count("cached tokens", done.Report.CachedTokens)
	if done.Err == nil && len(ids) != len(text) {
		st.t.Errorf("request %d: %d tokens, want %d", id, len(ids), len(text))
	}
	sameText(st.t, fmt.Sprintf("request %d (%s)", id, done.Reason), ids, text[:min(len(ids), len(text))])
}

func (st *storm) aggregated(req infer.Request, rng *rand.Rand) ([]int32, infer.Done, error) {
	on := st.gen
	if rng.IntN(2) == 0 {
		on = st.ctx
	}
	s, err := on.Submit(req)
	if err != nil {
		return nil, infer.Done{}, err
	}
	st.perhapsCancel(s, rng)
	res, err := drain(s)
	return res.ids, res.done, err
}

// perhapsCancel cancels at a random moment of a quarter of the sequences.
func (st *storm) perhapsCancel(s *Sequence, rng *rand.Rand) {
	if rng.IntN(4) > 0 {
		return
	}
	time.Sleep(time.Duration(rng.Int64N(4e6)))
	s.Cancel()
}

// twoLegs runs prefill and decode apart and lets go in the middle of some.
func (st *storm) twoLegs(req infer.Request, rng *rand.Rand) ([]int32, infer.Done, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	req.Kind = infer.GenerationOnly
	h, err := st.gen.Reserve(ctx, req)
	if err != nil {
		return nil, infer.Done{}, err
	}
	defer h.Cancel()
	req.Kind = infer.ContextOnly
	s, err := st.ctx.Submit(req)
	if err != nil {
		return nil, infer.Done{}, err
	}
	switch x := s.Export(); rng.IntN(10) {
	case 0: // the generation leg is gone while the transfer runs
		go func(after time.Duration) { time.Sleep(after); h.Cancel() }(time.Duration(rng.Int64N(5e6)))
	case 1: // the context leg is gone
		go func(after time.Duration) { time.Sleep(after); s.Cancel() }(time.Duration(rng.Int64N(5e6)))
	case 2: // nobody fetches the KV: the deadline takes it
		res, err := drain(s)
		if res.done.Err == nil {
			res.done.Reason, res.done.Err = "abandoned", ErrDeadline
		}
		return res.ids, res.done, err
	case 3: // the peer lets go early
		go func(after time.Duration) { time.Sleep(after); x.Release() }(time.Duration(rng.Int64N(5e6)))
	}
	if err := transfer(ctx, s.Export(), h); err != nil {
		s.Export().Release()
		_, _ = drain(s)
		return nil, infer.Done{}, err
	}
	first, err := drain(s)
	if err != nil || first.done.Err != nil {
		return first.ids, first.done, err
	}
	g, err := h.Start(first.toks)
	if err != nil {
		return nil, infer.Done{}, err
	}
	st.perhapsCancel(g, rng)
	res, err := drain(g)
	return res.ids, res.done, err
}

// TestRandomRequestsLeaveNothingBehind runs 1,000 requests, up to 40 at once, without windows and as many with each set of
// them. The bubble fails the test if a goroutine is left.
func TestRandomRequestsLeaveNothingBehind(t *testing.T) {
	for i, windows := range [][]int{nil, nil, {0, 20}, {17, 17}, {40, 9}} {
		seed := uint64(i)
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 77))
			st := newStorm(t, rng, sim.Config{Vocab: 300, TokensPerBlock: 8, Layers: 2, Windows: windows})
			defer st.ctx.stop()
			defer st.gen.stop()
			var wg sync.WaitGroup
			room := make(chan struct{}, 40)
			for id := range 500 {
				room <- struct{}{}
				own := rand.New(rand.NewPCG(seed, uint64(id)))
				wg.Go(func() {
					defer func() { <-room }()
					st.one(id, own)
				})
			}
			wg.Wait()
			time.Sleep(time.Second) // over all deadlines
			synctest.Wait()
			for _, r := range []*rig{st.ctx, st.gen} {
				if l := r.Load(); l.KVUsedBlocks != 0 || l.Running != 0 || l.Waiting != 0 || l.WaitingTokens != 0 {
					t.Errorf("load at idle: %+v", l)
				}
				if err := r.Check(); err != nil {
					t.Error(err)
				}
				for _, p := range append(r.pool.Windows(), r.pool) {
					st.count("loaded blocks", int(p.Stats().Loaded))
				}
				st.count("copied parts", int(r.pool.Stats().Partial))
				if n := r.queued.Load(); n != 0 {
					t.Errorf("%d requests are counted as queued at idle", n)
				}
			}
			t.Logf("%v", st.counts)
			for _, what := range []string{"length", "cancelled", "expired", "refused", "abandoned", "preemptions", "cached tokens", "loaded blocks", "copied parts"} {
				if st.counts[what] == 0 {
					t.Errorf("no %s: the test proves less than it should", what)
				}
			}
		})
	}
}
