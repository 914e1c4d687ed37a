package engine

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

// clock is a steady clock that follows the fake time of a synctest bubble.
func clock() func() int64 {
	start := time.Now()
	return func() int64 { return int64(time.Since(start)) + 1 }
}

// rig is a running engine on a simulated device.
type rig struct {
	*Engine
	t    testing.TB
	stop func() // ends engine and device and checks the books
	runs error  // what Run is expected to return
}

func newRig(t testing.TB, cfg Config, dev sim.Config) *rig {
	t.Helper()
	cfg.Now = clock()
	dev.Now = cfg.Now
	d, err := sim.New(dev)
	if err != nil {
		t.Fatal(err)
	}
	return newRigOn(t, cfg, d)
}

func newRigOn(t testing.TB, cfg Config, d backend.Backend) *rig {
	t.Helper()
	if cfg.Now == nil {
		cfg.Now = clock()
	}
	e, err := New(cfg, d)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	r := &rig{Engine: e, t: t}
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ran; !errors.Is(err, r.runs) {
			t.Errorf("Run: %v, want %v", err, r.runs)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := e.Check(); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

// result is a whole sequence.
type result struct {
	ids  []int32
	toks []infer.Token
	done infer.Done
}

func drain(s *Sequence) (result, error) {
	var r result
	for {
		tokens, done, err := s.Next(context.Background())
		if err != nil {
			return r, err
		}
		for _, tok := range tokens {
			r.ids = append(r.ids, tok.ID)
		}
		r.toks = append(r.toks, tokens...)
		if done != nil {
			r.done = *done
			_, _, err := s.Next(context.Background())
			if !errors.Is(err, io.EOF) {
				return r, errors.New("Next after Done gave no io.EOF")
			}
			return r, nil
		}
	}
}

func (r *rig) finish(s *Sequence) result {
	r.t.Helper()
	res, err := drain(s)
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func (r *rig) run(req infer.Request) result {
	r.t.Helper()
	s, err := r.Submit(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.finish(s)
}

// prompt makes n tokens that depend on the seed.
func prompt(n int, seed int32) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = (int32(i)*7919 + seed*104729 + 13) % 1000
		if p[i] < 0 {
			p[i] += 1000
		}
	}
	return p
}

func request(n int, seed int32, max int) infer.Request {
	return infer.Request{ID: int64(seed), Prompt: prompt(n, seed), MaxTokens: max, IgnoreEOS: true}
}

// transfer moves the KV of a context sequence to a reservation as a node does, span by span.
func transfer(ctx context.Context, x *Export, h *Reservation) error {
	info := h.s.e.Info()
	for {
		span, err := x.NextSpan(ctx)
		if errors.Is(err, io.EOF) {
			x.Release()
			return nil
		}
		if err != nil {
			return err
		}
		span.TokenFrom = max(span.TokenFrom, h.Held())
		if span.TokenFrom >= span.TokenTo {
			continue
		}
		buf := make([]byte, SpanBytes(info, span))
		if err := x.Read(ctx, span, buf); err != nil {
			return err
		}
		if err := h.Write(ctx, span, buf); err != nil {
			return err
		}
	}
}

// disaggregated runs a request with prefill on r and decode on gen.
func (r *rig) disaggregated(gen *rig, req infer.Request) (result, error) {
	ctx := context.Background()
	greq, creq := req, req
	greq.Kind, creq.Kind = infer.GenerationOnly, infer.ContextOnly
	h, err := gen.Reserve(ctx, greq)
	if err != nil {
		return result{}, err
	}
	defer h.Cancel()
	s, err := r.Submit(creq)
	if err != nil {
		return result{}, err
	}
	if err := transfer(ctx, s.Export(), h); err != nil {
		return result{}, err
	}
	first, err := drain(s)
	if err != nil {
		return result{}, err
	}
	if first.done.Err != nil {
		return result{}, first.done.Err
	}
	g, err := h.Start(first.toks)
	if err != nil {
		return result{}, err
	}
	return drain(g)
}

func sameText(t *testing.T, what string, got, want []int32) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: text %v, want %v", what, got, want)
	}
}

func decoded(t *testing.T, rep infer.Report) *infer.Steps {
	t.Helper()
	s, err := rep.Steps.Decode()
	if err != nil {
		t.Fatal(err)
	}
	return s
}
