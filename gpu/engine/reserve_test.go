package engine

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

func generation(n int, seed int32, max int) infer.Request {
	r := request(n, seed, max)
	r.Kind = infer.GenerationOnly
	return r
}

func (r *rig) reserve(req infer.Request) *Reservation {
	r.t.Helper()
	h, err := r.Reserve(context.Background(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

func (r *rig) used(want int) {
	r.t.Helper()
	synctest.Wait()
	if l := r.Load(); l.KVUsedBlocks != want {
		r.t.Errorf("%d blocks used, want %d", l.KVUsedBlocks, want)
	}
}

func TestAReservationHoldsRoomUntilItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{ReserveDeadline: time.Second}, sim.Config{})
		defer r.stop()
		h := r.reserve(generation(64, 1, 5))
		r.used(3) // two for the prompt, one for the next token
		if got := h.Report(); got.KV.AllocTotalBlocks != 3 || got.KV.AllocNewBlocks != 3 || got.QueuedNS == 0 || got.FirstScheduledNS != 0 {
			t.Errorf("what a place costs that is never used: %+v", got)
		}
		h.Cancel()
		h.Cancel()
		r.used(0)
		if err := h.Write(context.Background(), infer.Span{LayerTo: 1, TokenTo: 1}, make([]byte, 32)); !errors.Is(err, ErrCancelled) {
			t.Errorf("Write after Cancel: %v", err)
		}
		if _, err := h.Start([]infer.Token{{ID: 1}}); !errors.Is(err, ErrCancelled) {
			t.Errorf("Start after Cancel: %v", err)
		}
		late := r.reserve(generation(64, 1, 5))
		time.Sleep(time.Second)
		r.used(0)
		if _, err := late.Start([]infer.Token{{ID: 1}}); !errors.Is(err, ErrDeadline) {
			t.Errorf("Start after the deadline: %v", err)
		}
	})
}

func TestReserveWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{ReserveDeadline: time.Second}, sim.Config{KVBlocks: 5})
		defer r.stop()
		first := r.reserve(generation(64, 1, 5))
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if _, err := r.Reserve(ctx, generation(64, 2, 5)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Reserve without room: %v", err)
		}
		req := generation(64, 2, 5)
		req.DeadlineNS = r.cfg.Now() + 1e8
		if _, err := r.Reserve(context.Background(), req); !errors.Is(err, ErrDeadline) {
			t.Errorf("Reserve beyond the request's deadline: %v", err)
		}
		go func() {
			time.Sleep(300 * time.Millisecond)
			first.Cancel()
		}()
		second := r.reserve(generation(64, 2, 5))
		second.Cancel()
		r.used(0)
	})
}

func TestStartNeedsAllKV(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		r := newRig(t, Config{PrefixReuse: true}, sim.Config{})
		defer r.stop()
		r.run(request(32, 1, 1)) // the first block of the prompt is here
		req := generation(80, 1, 5)
		copy(req.Prompt, prompt(32, 1))
		h := r.reserve(req)
		if h.Held() != 32 || h.Tokens() != 80 {
			t.Fatalf("%d of %d tokens held, want 32 of 80", h.Held(), h.Tokens())
		}
		first := []infer.Token{{ID: 3}}
		write := func(s infer.Span) error { return h.Write(ctx, s, make([]byte, SpanBytes(r.Info(), s))) }
		for _, s := range []infer.Span{
			{LayerFrom: 0, LayerTo: 4, TokenFrom: 50, TokenTo: 80}, {LayerFrom: 2, LayerTo: 4, TokenFrom: 32, TokenTo: 50},
			{LayerFrom: 0, LayerTo: 1, TokenFrom: 32, TokenTo: 60}, {LayerFrom: 1, LayerTo: 2, TokenFrom: 32, TokenTo: 49},
		} {
			if _, err := h.Start(first); !errors.Is(err, ErrInvalid) {
				t.Errorf("Start with KV missing: %v", err)
			}
			if err := write(s); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := h.Start(first); !errors.Is(err, ErrInvalid) { // token 49 of layer 1
			t.Errorf("Start with one token of one layer missing: %v", err)
		}
		for name, s := range map[string]infer.Span{
			"what is held":      {LayerTo: 4, TokenFrom: 31, TokenTo: 40},
			"beyond the prompt": {LayerTo: 4, TokenFrom: 70, TokenTo: 81},
			"beyond the layers": {LayerTo: 5, TokenFrom: 40, TokenTo: 41},
			"nothing":           {LayerTo: 4, TokenFrom: 40, TokenTo: 40},
		} {
			if err := write(s); !errors.Is(err, ErrInvalid) {
				t.Errorf("Write of %s: %v", name, err)
			}
		}
		if err := h.Write(ctx, infer.Span{LayerTo: 1, TokenFrom: 40, TokenTo: 41}, make([]byte, 31)); !errors.Is(err, ErrInvalid) {
			t.Errorf("Write of a short buffer: %v", err)
		}
		if err := write(infer.Span{LayerFrom: 1, LayerTo: 2, TokenFrom: 49, TokenTo: 50}); err != nil {
			t.Fatal(err)
		}
		for name, bad := range map[string][]infer.Token{"none": nil, "too many": make([]infer.Token, 6), "unknown": {{ID: -1}}} {
			if _, err := h.Start(bad); !errors.Is(err, ErrInvalid) {
				t.Errorf("Start with first tokens %s: %v", name, err)
			}
		}
		s, err := h.Start(first)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.Start(first); !errors.Is(err, ErrInvalid) {
			t.Errorf("Start twice: %v", err)
		}
		h.Cancel() // does nothing any more
		if res := r.finish(s); len(res.ids) != 5 || res.ids[0] != 3 || res.done.Report.OutputTokens != 4 {
			t.Errorf("tokens %v, done %+v", res.ids, res.done)
		}
	})
}

func TestTheFirstTokenMayEndTheGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{EOS: []int32{7}}, sim.Config{})
		defer r.stop()
		for _, tt := range []struct {
			name   string
			max    int
			first  []infer.Token
			reason infer.FinishReason
		}{
			{"EOS", 5, []infer.Token{{ID: 7}}, infer.FinishStop},
			{"length", 1, []infer.Token{{ID: 8}}, infer.FinishLength},
			{"length of two", 2, []infer.Token{{ID: 8}, {ID: 9}}, infer.FinishLength},
		} {
			req := generation(3, 1, tt.max)
			req.IgnoreEOS = false
			h := r.reserve(req)
			span := infer.Span{LayerTo: 4, TokenTo: 3}
			if err := h.Write(context.Background(), span, make([]byte, SpanBytes(r.Info(), span))); err != nil {
				t.Fatal(err)
			}
			at := r.cfg.Now()
			s, err := h.Start(tt.first)
			if err != nil {
				t.Fatal(err)
			}
			if res := r.finish(s); res.done.Reason != tt.reason || len(res.toks) != len(tt.first) || res.toks[0].AtNS != at {
				t.Errorf("%s: %+v, done %+v", tt.name, res.toks, res.done)
			}
		}
		r.used(0)
	})
}

func TestCancelWaitsForTheCopyInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{ReserveDeadline: time.Second}, sim.Config{Cost: sim.Cost{CopyByte: 1e9}})
		defer r.stop()
		for name, end := range map[string]func(h *Reservation){
			"cancel":   func(h *Reservation) { h.Cancel() },
			"deadline": func(*Reservation) { time.Sleep(2 * time.Second) },
		} {
			h := r.reserve(generation(20, 1, 5))
			span := infer.Span{LayerTo: 1, TokenTo: 1}
			wrote := make(chan error, 1)
			go func() { wrote <- h.Write(context.Background(), span, make([]byte, 32)) }()
			synctest.Wait()
			end(h)
			r.used(1)
			if err := <-wrote; err != nil {
				t.Errorf("%s: the copy in flight: %v", name, err)
			}
			r.used(0)
		}
	})
}

// TestResumeOnOtherNodes continues a text that another pair of nodes began.
func TestResumeOnOtherNodes(t *testing.T) {
	for _, sampling := range samplings() {
		dev := sim.Config{Vocab: 1000}
		req := request(50, 1, 30)
		req.Sampling = sampling
		want := newRig(t, Config{}, dev).run(req).ids
		ctx, gen := newRig(t, Config{Overlap: true, PrefixReuse: true}, dev), newRig(t, Config{Overlap: true}, dev)
		for _, given := range []int{0, 1, 17, 29} {
			req.Output = want[:given]
			got, err := ctx.disaggregated(gen, req)
			if err != nil {
				t.Fatal(err)
			}
			sameText(t, "resumed", got.ids, want[given:])
		}
	}
}

func TestAnAbandonedExportGivesItsErrorToTheReader(t *testing.T) {
	r := newRig(t, Config{}, sim.Config{})
	x, _ := r.export(request(40, 1, 5))
	for {
		if _, err := x.NextSpan(context.Background()); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Read(context.Background(), infer.Span{LayerTo: 9, TokenTo: 1}, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("Read of a bad span: %v", err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := x.Read(ended, infer.Span{LayerTo: 1, TokenTo: 1}, make([]byte, 32)); !errors.Is(err, context.Canceled) {
		t.Errorf("Read with an ended context: %v", err)
	}
	x.Release()
}
