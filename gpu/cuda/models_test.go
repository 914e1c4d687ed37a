//go:build cuda

package cuda

import (
	"math"
	"slices"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/shared/infer"
)

// allLogprobs gives the log probabilities of the most likely tokens at every position.
func allLogprobs(t testing.TB, b backend.Backend, tokens []int32, chunk int) []backend.Logprobs {
	t.Helper()
	var out []backend.Logprobs
	blocks := blocksFrom(0, b.Info().KVBlocks)
	for at := 0; at < len(tokens); at += chunk {
		e := backend.Entry{Tokens: tokens[at:min(at+chunk, len(tokens))], KVLen: at, Blocks: blocks}
		for j := range e.Tokens {
			e.Logits = append(e.Logits, j)
		}
		e.Windows = slices.Repeat([][]int32{blocks}, len(b.Info().Windows))
		batch := &backend.Batch{Entries: []backend.Entry{e}}
		if at == 0 {
			batch.Assign = []backend.Assign{{Sampling: infer.Sampling{Logprobs: true, TopLogprobs: 20}}}
		}
		out = append(out, run(t, b, batch).Outputs[0].Logprobs...)
	}
	return out
}

// TestModelsAgreeWithTheProcessor compares log probabilities of small random models with those of the back end cpu.
func TestModelsAgreeWithTheProcessor(t *testing.T) {
	for _, tc := range []struct {
		name, arch string
		extra      extra
	}{
		{"llama", "LlamaForCausalLM", nil},
		{"llama with heads of 64", "LlamaForCausalLM", extra{"head_dim": 64}},
		{"llama with fused products", "LlamaForCausalLM", fusedShape},
		{"llama with heads of 128, groups of four", "LlamaForCausalLM", extra{"head_dim": 128, "num_key_value_heads": 1}},
		{"llama in f16, one KV head for each head", "LlamaForCausalLM", extra{"dtype": "float16", "num_key_value_heads": 4}},
		{"llama with odd sizes in f32", "LlamaForCausalLM", extra{"hidden_size": 40, "intermediate_size": 56, "head_dim": 10, "dtype": "float32"}},
		{"mistral with a window", "MistralForCausalLM", extra{"sliding_window": 9, "head_dim": 64}},
		{"qwen2", "Qwen2ForCausalLM", extra{"tie_word_embeddings": true, "head_dim": 64}},
		{"qwen3", "Qwen3ForCausalLM", extra{"head_dim": 48}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := randomModel(t, tc.arch, tc.extra)
			reference, err := cpu.New(m, cpu.Options{TokensPerBlock: 8, KVBlocks: 64, Now: now})
			if err != nil {
				t.Fatal(err)
			}
			defer shut(t, reference)
			tokens := make([]int32, 300)
			for i := range tokens {
				tokens[i] = int32((i*i*7 + i*13 + 5) % m.Config.Vocab)
			}
			want := allLogprobs(t, reference, tokens, 300)
			for _, mode := range []struct {
				deterministic bool
				limit         float64
			}{{true, 1e-3}, {false, 0.1}} {
				for _, chunk := range []int{300, 41, 7, 1} {
					b := open(t, m, Options{TokensPerBlock: 8, KVBlocks: 64, Deterministic: mode.deterministic})
					worst := farthest(want, allLogprobs(t, b, tokens, chunk))
					shut(t, b)
					t.Logf("deterministic %v, chunks of %d: log probabilities differ by up to %.2g", mode.deterministic, chunk, worst)
					if !(worst < mode.limit) {
						t.Errorf("deterministic %v, chunks of %d: %g away from the processor", mode.deterministic, chunk, worst)
					}
				}
			}
		})
	}
}

// farthest is the largest difference between log probabilities of the same token.
func farthest(want, got []backend.Logprobs) float64 {
	if len(want) != len(got) {
		return math.Inf(1)
	}
	worst := 0.0
	for i, w := range want {
		values := map[int32]float32{}
		for _, l := range w.Top {
			values[l.Token] = l.Logprob
		}
		for _, l := range got[i].Top[:10] { // deeper ranks may have other tokens
			if v, ok := values[l.Token]; ok {
				worst = max(worst, math.Abs(float64(v-l.Logprob)))
			} else {
				return math.Inf(1)
			}
		}
	}
	return worst
}
