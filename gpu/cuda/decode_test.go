//go:build cuda

package cuda

import (
	"slices"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/shared/infer"
)

// fusedShape is one that the fused products of a decode step can do.
var fusedShape = extra{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}

// TestDecodeBatchesOfManySizesAgreeWithTheProcessor feeds different tokens to sequences of different lengths.
func TestDecodeBatchesOfManySizesAgreeWithTheProcessor(t *testing.T) {
	for name, tc := range map[string]struct {
		arch  string
		extra extra
	}{
		"groups of two": {"LlamaForCausalLM", fusedShape}, "with biases": {"Qwen2ForCausalLM", fusedShape}, "with norms of heads": {"Qwen3ForCausalLM", fusedShape},
		"heads of 128, groups of twelve": {"LlamaForCausalLM", extra{
			"hidden_size": 192, "intermediate_size": 128, "head_dim": 128, "num_attention_heads": 12, "num_key_value_heads": 1,
		}},
		"a window": {"MistralForCausalLM", extra{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "sliding_window": 50}},
	} {
		t.Run(name, func(t *testing.T) {
			m := randomModel(t, tc.arch, tc.extra)
			const perBlock, blocks, slots = 16, 900, 40
			reference, err := cpu.New(m, cpu.Options{TokensPerBlock: perBlock, KVBlocks: blocks, MaxSlots: slots, Now: now})
			if err != nil {
				t.Fatal(err)
			}
			defer shut(t, reference)
			card := open(t, m, Options{TokensPerBlock: perBlock, KVBlocks: blocks, MaxSlots: slots})
			defer shut(t, card)
			staged := openStages(t, m, 3, Options{TokensPerBlock: perBlock, KVBlocks: blocks, MaxSlots: slots})
			defer shut(t, staged)
			for _, n := range []int{1, 2, 5, 8, 9, 16, 17, 40} {
				want := decodeTogether(t, reference, n)
				for kind, b := range map[string]backend.Backend{"one card": card, "three stages": staged} {
					worst := 0.0
					for s, got := range decodeTogether(t, b, n) {
						worst = max(worst, farthest(want[s], got))
					}
					t.Logf("%d sequences, %s: log probabilities differ by up to %.2g", n, kind, worst)
					if !(worst < 0.1) {
						t.Errorf("%d sequences, %s: %g away from the processor", n, kind, worst)
					}
				}
			}
		})
	}
}

// decodeTogether gives the log probabilities of n sequences over some steps of one token each, by sequence.
func decodeTogether(t testing.TB, b backend.Backend, n int) [][]backend.Logprobs {
	t.Helper()
	vocab, per := b.Info().Vocab, 22
	token := func(s, pos int) int32 { return int32((s*31 + pos*pos*7 + pos*13 + 5) % vocab) }
	windows := func(s int) [][]int32 { return slices.Repeat([][]int32{blocksFrom(s*per, per)}, len(b.Info().Windows)) }
	lengths := make([]int, n)
	prompts := &backend.Batch{}
	for s := range n {
		lengths[s] = 1 + (s*97+n*11)%300
		e := backend.Entry{Slot: s, Blocks: blocksFrom(s*per, per), Windows: windows(s)}
		for pos := range lengths[s] {
			e.Tokens = append(e.Tokens, token(s, pos))
		}
		prompts.Assign = append(prompts.Assign, backend.Assign{Slot: s, Sampling: infer.Sampling{Logprobs: true, TopLogprobs: 20}})
		prompts.Entries = append(prompts.Entries, e)
	}
	run(t, b, prompts)
	out := make([][]backend.Logprobs, n)
	for step := range 4 {
		batch := &backend.Batch{}
		for s := range n {
			pos := lengths[s] + step
			batch.Entries = append(batch.Entries, backend.Entry{Slot: s, Tokens: []int32{token(s, pos)}, KVLen: pos, Blocks: blocksFrom(s*per, per), Windows: windows(s), Logits: []int{0}})
		}
		for s, o := range run(t, b, batch).Outputs {
			out[s] = append(out[s], o.Logprobs...)
		}
	}
	return out
}
