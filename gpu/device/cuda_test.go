//go:build cuda

package device

import (
	"errors"
	"log/slog"
	"slices"
	"testing"

	"meridian.internal/gpu/cuda"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/clock"
)

// TestRanksAndStagesOnCardsGiveTheTextsOfOneDevice runs requests at the same time; two cards are used where there are two.
func TestRanksAndStagesOnCardsGiveTheTextsOfOneDevice(t *testing.T) {
	var want [][]int32
	cards := []int{0, 1}
	for _, p := range []places{{Ranks: 1, PP: 1}, {Ranks: 2, PP: 1}, {Ranks: 1, PP: 2}, {Ranks: 2, PP: 2}, {Ranks: 2, PP: 1, Processes: true}, {Ranks: 2, PP: 2, Processes: true}} {
		p.Device = "cuda"
		if p.Ranks*p.PP > 1 {
			p.GPUs = cards
		}
		d, err := p.open(t.Context(), t)
		if errors.Is(err, cuda.ErrUnavailable) && p.GPUs != nil {
			cards, p.GPUs = nil, nil // for the rank processes that follow, too: their errors come as texts
			d, err = p.open(t.Context(), t)
		}
		if errors.Is(err, cuda.ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
		t.Logf("%+v: %d KV blocks, clocks %+v", p, d.Info.KVBlocks, d.CardClocks())
		got := textsOf(t, d)
		p.checkClocks(t, d.CardClocks())
		if want == nil {
			want = got
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%+v: request %d gives %v, want %v", p, i, got[i], want[i])
			}
		}
	}
}

// checkClocks: each process knows the clock of each of its cards, to its own clock.
func (p places) checkClocks(t *testing.T, list []clock.Estimate) {
	t.Helper()
	processes, pairs := map[clock.ID]bool{}, map[[2]clock.ID]bool{}
	for _, e := range list {
		processes[e.Reference], pairs[[2]clock.ID{e.Reference, e.Local}] = true, true
		if !e.Usable() || e.BoundNS() <= 0 {
			t.Errorf("%+v: the estimate of a card is %+v", p, e)
		}
	}
	want := 1
	if p.Processes {
		want = p.Ranks
	}
	if len(processes) != want || !processes[placesClock] || len(pairs) != len(list) {
		t.Errorf("%+v: %d clocks of cards to those of %d processes, want %d: %+v", p, len(list), len(processes), want, list)
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
		d, err := Open(t.Context(), defaults(func(o *Options) {
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
