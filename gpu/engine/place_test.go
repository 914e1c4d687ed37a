package engine

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

// neighbour is a back end whose blocks another one copies; both have blocks of the same size.
type neighbour struct {
	there, here backend.Backend
	fail        error
}

func (n *neighbour) Pull(p backend.Pull) *backend.Copy {
	info := n.there.Info()
	whole := func(blocks []int32) []backend.Region {
		first := p.TokenFrom / info.TokensPerBlock
		table := append(make([]int32, first), blocks...)
		return Regions(nil, info, [][]int32{table}, infer.Span{LayerFrom: p.LayerFrom, LayerTo: p.LayerTo, TokenFrom: p.TokenFrom, TokenTo: p.TokenTo})
	}
	buf := make([]byte, info.KVBytes(p.LayerFrom, p.LayerTo)*(p.TokenTo-p.TokenFrom))
	out := n.there.CopyOut(whole(p.From), buf)
	<-out.Done()
	in := n.here.CopyIn(whole(p.To), buf)
	<-in.Done()
	c := backend.NewCopy()
	c.Err = errors.Join(out.Err, in.Err, n.fail)
	c.Finish()
	return c
}

func (n *neighbour) Close() error { return nil }

func TestATextGoesOnFromKVThatWasPulled(t *testing.T) {
	dev := sim.Config{Vocab: 1000}
	req := request(70, 1, 30)
	want := newRig(t, Config{}, dev).run(req).ids
	ctx, gen := newRig(t, Config{Overlap: true, MaxBatchSize: 4, MaxNumTokens: 32}, dev), newRig(t, Config{Overlap: true, PrefixReuse: true}, dev)
	for range 2 { // the second time the receiver holds the beginning
		greq, creq := req, req
		greq.Kind, creq.Kind = infer.GenerationOnly, infer.ContextOnly
		h := gen.reserve(greq)
		s, err := ctx.Submit(creq)
		if err != nil {
			t.Fatal(err)
		}
		n, x := &neighbour{there: ctx.b, here: gen.b}, s.Export()
		for {
			span, err := x.NextSpan(context.Background())
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if span.TokenFrom = max(span.TokenFrom, h.Held()); span.TokenFrom >= span.TokenTo {
				continue
			}
			blocks, err := x.Blocks(span)
			if err != nil {
				t.Fatal(err)
			}
			n.fail = errors.New("the other process is gone")
			if _, err := h.Pull(context.Background(), span, n, blocks); !errors.Is(err, n.fail) {
				t.Errorf("a failed copy: %v", err)
			}
			n.fail = nil
			if _, err := h.Pull(context.Background(), span, n, blocks); err != nil {
				t.Fatal(err)
			}
		}
		first := ctx.finish(s)
		x.Release()
		if _, err := x.Blocks(infer.Span{LayerTo: 1, TokenTo: 1}); !errors.Is(err, ErrCancelled) {
			t.Errorf("Blocks after Release: %v", err)
		}
		d, err := h.Start([]infer.Token{{ID: first.ids[0]}})
		if err != nil {
			t.Fatal(err)
		}
		sameText(t, "pulled", gen.finish(d).ids, want)
	}
}

// TestAPromptOfMorePriorityStaysCached where others would have taken its place.
func TestAPromptOfMorePriorityStaysCached(t *testing.T) {
	const pin = 1000 // stands for one that is pinned
	for priority, want := range map[int]int{0: 0, 1: 128, -1: 0, pin: 128} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, Config{PrefixReuse: true}, sim.Config{KVBlocks: 16})
			defer r.stop()
			req := request(129, 1, 1)
			if req.Pin = priority == pin; !req.Pin {
				req.Priority = priority
			}
			r.run(req)
			for i := range int32(5) { // 20 blocks
				r.run(request(128, 10+i, 1))
			}
			if got := r.run(req).done.Report.CachedTokens; got != want {
				t.Errorf("priority %d: %d prompt tokens were cached, want %d", priority, got, want)
			}
		})
	}
}
