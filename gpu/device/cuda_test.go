//go:build cuda

package device

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"meridian.internal/gpu/cuda"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/infer"
)

// TestRanksAndStagesOnCardsGiveTheTextsOfOneDevice runs requests at the same time; two cards are used where there are two.
func TestRanksAndStagesOnCardsGiveTheTextsOfOneDevice(t *testing.T) {
	var want [][]int32
	for _, c := range []struct{ ranks, pp int }{{1, 1}, {2, 1}, {1, 2}, {2, 2}} {
		name := fmt.Sprintf("%d ranks of %d stages", c.ranks, c.pp)
		var gpus []int
		if c.ranks*c.pp > 1 {
			gpus = []int{0, 1}
		}
		d, err := openCards(c.ranks, c.pp, gpus)
		if errors.Is(err, cuda.ErrUnavailable) && gpus != nil {
			d, err = openCards(c.ranks, c.pp, nil)
		}
		if errors.Is(err, cuda.ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		t.Logf("%s on cards %v: %d KV blocks, %d clocks", name, d.cards, d.Info.KVBlocks, len(d.CardClocks()))
		got := textsOf(t, d)
		if want == nil {
			want = got
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%s: request %d gives %v, want %v", name, i, got[i], want[i])
			}
		}
	}
}

// TestBlocksOfWindowsAreUsedAgain runs more than fits into KV at a time on a model whose layers have windows: the texts are those
// with room for all.
func TestBlocksOfWindowsAreUsedAgain(t *testing.T) {
	dir := t.TempDir()
	if err := model.WriteRandom(dir, []byte(`{"architectures": ["MistralForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 112,
"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "sliding_window": 48}`), 42); err != nil {
		t.Fatal(err)
	}
	var want [][]int32
	for _, blocks := range []int{2000, 64} {
		d, err := Open(defaults(func(o *Options) {
			o.Device, o.Deterministic, o.Model, o.KVBlocks, o.MaxWaiting, o.MaxNumTokens = "cuda", true, dir, blocks, 64, 64
		}), now, slog.New(slog.DiscardHandler))
		if errors.Is(err, cuda.ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Info.Windows) != 1 || d.Info.Windows[0].Blocks > blocks {
			t.Errorf("windows %+v of %d blocks", d.Info.Windows, blocks)
		}
		got := textsOf(t, d)
		if want == nil {
			want = got
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%d blocks: request %d gives %v, want %v", blocks, i, got[i], want[i])
			}
		}
	}
}

func openCards(ranks, pp int, gpus []int) (*Device, error) {
	return Open(defaults(func(o *Options) {
		o.Device, o.Deterministic, o.Ranks, o.PP, o.GPUs, o.MemoryFraction = "cuda", true, ranks, pp, gpus, 0.5
		o.MaxWaiting = 64
	}), now, slog.New(slog.DiscardHandler))
}

// textsOf runs 24 requests, greedy and seeded, and closes the device.
func textsOf(t *testing.T, d *Device) [][]int32 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- d.Engine.Run(ctx) }()
	out := make([][]int32, 24)
	var running []ranks.Sequence
	for i := range out {
		r := infer.Request{ID: int64(i + 1), MaxTokens: 20 + i, IgnoreEOS: true}
		for k := range 3 + 17*i {
			r.Prompt = append(r.Prompt, int32((k*k*7+k*31+i*13)%d.Model.Config.Vocab))
		}
		if i%2 == 1 {
			r.Sampling = infer.Sampling{Temperature: 0.9, TopK: 30, Seed: uint64(i), PresencePenalty: 0.2}
		}
		s, err := d.Engine.Submit(r)
		if err != nil {
			t.Fatal(err)
		}
		running = append(running, s)
	}
	for i, s := range running {
		for done := (*infer.Done)(nil); done == nil; {
			var tokens []infer.Token
			var err error
			if tokens, done, err = s.Next(t.Context()); err != nil {
				t.Fatalf("request %d: %v", i, err)
			}
			for _, token := range tokens {
				out[i] = append(out[i], token.ID)
			}
		}
	}
	cancel()
	if err := errors.Join(<-ran, d.Close()); err != nil {
		t.Error(err)
	}
	return out
}
