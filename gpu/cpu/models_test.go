package cpu

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// randomModel writes and loads a small model; extra replaces keys of the base config.
func randomModel(t testing.TB, arch string, extra map[string]any) *model.Model {
	t.Helper()
	config := map[string]any{
		"architectures": []string{arch}, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
		"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": nil,
	}
	for k, v := range extra {
		config[k] = v
	}
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := model.WriteRandom(dir, data, 42); err != nil {
		t.Fatal(err)
	}
	return loadModel(t, dir)
}

type extra = map[string]any

var modelCases = []struct {
	name, arch string
	extra      extra
}{
	{"llama", "LlamaForCausalLM", nil},
	{"llama with a tied head in f32", "LlamaForCausalLM", extra{"tie_word_embeddings": true, "dtype": "float32"}},
	{"llama in f16, one KV head for each head", "LlamaForCausalLM", extra{"dtype": "float16", "num_key_value_heads": 4}},
	{"llama with sizes that are not whole lanes", "LlamaForCausalLM", extra{"hidden_size": 40, "intermediate_size": 50, "head_dim": 10, "num_key_value_heads": 1}},
	{"llama with linear rope", "LlamaForCausalLM", extra{"rope_scaling": extra{"type": "linear", "factor": 4}}},
	{"llama with llama3 rope", "LlamaForCausalLM", extra{"rope_parameters": extra{"rope_type": "llama3", "rope_theta": 500000,
		"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}}},
	{"mistral with a window", "MistralForCausalLM", extra{"sliding_window": 9}},
	{"mistral with a window of one token", "MistralForCausalLM", extra{"sliding_window": 1}},
	{"mistral, of six layers one sees everything", "MistralForCausalLM", extra{"sliding_window": 11, "sliding_window_pattern": 6, "num_hidden_layers": 7}},
	{"qwen3 with layers that alternate", "Qwen3ForCausalLM", extra{"use_sliding_window": true, "sliding_window": 13,
		"layer_types": []string{"sliding_attention", "full_attention", "sliding_attention"}}},
	{"qwen2", "Qwen2ForCausalLM", extra{"tie_word_embeddings": true}},
	{"qwen2 with windows in the upper layers and yarn", "Qwen2ForCausalLM", extra{"use_sliding_window": true, "sliding_window": 20, "max_window_layers": 2,
		"rope_scaling": extra{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}},
	{"qwen3", "Qwen3ForCausalLM", extra{"head_dim": 48}},
	{"qwen3 with a head size that is not whole lanes", "Qwen3ForCausalLM", extra{"head_dim": 24, "tie_word_embeddings": true}},
}

func randomTokens(n, vocab int) []int32 {
	rng := rand.New(rand.NewPCG(9, uint64(n)))
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(rng.IntN(vocab))
	}
	return out
}

// allLogits runs the tokens in chunks with logits at every position and returns copies of them.
func allLogits(t testing.TB, b *Backend, tokens []int32, chunk int, blocks []int32) [][]float32 {
	t.Helper()
	var out [][]float32
	for i, e := range chunks(tokens, chunk, blocks) {
		e.Logits = nil
		for j := range e.Tokens {
			e.Logits = append(e.Logits, j)
		}
		batch := &backend.Batch{Entries: []backend.Entry{e}}
		if i == 0 {
			batch.Assign = []backend.Assign{{}}
		}
		run(t, b, batch)
		for j := range e.Tokens {
			out = append(out, append([]float32(nil), b.device.logits.row(j)...))
		}
	}
	return out
}

func TestModelsAgreeWithReference(t *testing.T) {
	for _, tc := range modelCases {
		t.Run(tc.name, func(t *testing.T) {
			m := randomModel(t, tc.arch, tc.extra)
			tokens := randomTokens(45, m.Config.Vocab)
			want := reference{m}.logits(tokens)
			b := newBackend(t, m, Options{TokensPerBlock: 8})
			got := allLogits(t, b, tokens, 17, blocksFrom(0, 8))
			worst := 0.0
			for i := range want {
				for j, w := range want[i] {
					worst = max(worst, math.Abs(float64(got[i][j])-w))
				}
			}
			if worst > 1e-4 || math.IsNaN(worst) {
				t.Errorf("logits are up to %g away from the reference", worst)
			}
		})
	}
}

// TestResultsDoNotDependOnHowTheyAreComputed is the promise of the package comment.
func TestResultsDoNotDependOnHowTheyAreComputed(t *testing.T) {
	for _, tc := range modelCases {
		t.Run(tc.name, func(t *testing.T) {
			m := randomModel(t, tc.arch, tc.extra)
			tokens := randomTokens(60, m.Config.Vocab)
			b := newBackend(t, m, Options{TokensPerBlock: 16, Threads: 1})
			want := allLogits(t, b, tokens, len(tokens), blocksFrom(0, 4))
			for _, v := range []struct {
				name  string
				o     Options
				chunk int
			}{
				{"token by token", Options{TokensPerBlock: 16}, 1},
				{"chunks of 7 in blocks of 5", Options{TokensPerBlock: 5}, 7},
				{"three threads", Options{TokensPerBlock: 16, Threads: 3}, 33},
				{"scalar kernels", Options{TokensPerBlock: 1, Kernel: "scalar"}, 31},
				{"the second best kernels", Options{TokensPerBlock: 64, Kernel: Kernels()[min(1, len(Kernels())-1)]}, 60},
			} {
				b := newBackend(t, m, v.o)
				n := (len(tokens) + b.Info().TokensPerBlock - 1) / b.Info().TokensPerBlock
				blocks := blocksFrom(3, n)
				blocks[0], blocks[n-1] = blocks[n-1], blocks[0] // block tables are in no order
				for i, row := range allLogits(t, b, tokens, v.chunk, blocks) {
					sameBits(t, v.name, row, want[i])
				}
			}
		})
	}
}

// TestRowsDoNotDependOnTheBatch decodes a sequence alone and among others.
func TestRowsDoNotDependOnTheBatch(t *testing.T) {
	m := randomModel(t, "Qwen2ForCausalLM", nil)
	b := newBackend(t, m, Options{TokensPerBlock: 4, KVBlocks: 200, Threads: 2})
	tokens := randomTokens(21, m.Config.Vocab)
	want := allLogits(t, b, tokens, 20, blocksFrom(0, 6))
	batch := &backend.Batch{}
	for i := range 13 {
		e := backend.Entry{Slot: i, Tokens: randomTokens(1+3*i, m.Config.Vocab), Blocks: blocksFrom(10+10*i, 10), Logits: []int{0}}
		if i == 7 {
			e = backend.Entry{Slot: i, Tokens: tokens[20:], KVLen: 20, Blocks: blocksFrom(0, 6), Logits: []int{0}}
		}
		batch.Entries = append(batch.Entries, e)
	}
	run(t, b, batch)
	sameBits(t, "row in a batch", b.device.logits.row(7), want[20])
}

// TestStagesMakeTheWhole gives the hidden states of one stage to the next.
func TestStagesMakeTheWhole(t *testing.T) {
	m := randomModel(t, "Qwen3ForCausalLM", nil)
	tokens := randomTokens(30, m.Config.Vocab)
	whole := newBackend(t, m, Options{TokensPerBlock: 8})
	want := allLogits(t, whole, tokens, 30, blocksFrom(0, 4))
	var hidden backend.Hidden
	for _, stage := range []backend.Stage{{First: 0, End: 1}, {First: 1, End: 3}} {
		b := newBackend(t, m, Options{TokensPerBlock: 8, Stage: stage})
		var ends []int
		e := backend.Entry{Tokens: tokens, Blocks: blocksFrom(5, 4), Logits: []int{29}}
		s := run(t, b, &backend.Batch{
			Assign: []backend.Assign{{}}, Entries: []backend.Entry{e}, Hidden: hidden, LayerDone: func(end int) { ends = append(ends, end) },
		})
		if len(ends) != stage.End-stage.First || ends[len(ends)-1] != stage.End {
			t.Errorf("stage %v reported layers %v", stage, ends)
		}
		if stage.End < 3 {
			if hidden = s.Hidden; hidden.Len() != 30*64 || len(s.Outputs[0].Tokens) != 0 {
				t.Fatalf("%d hidden values, %d tokens", hidden.Len(), len(s.Outputs[0].Tokens))
			}
			continue
		}
		sameBits(t, "two stages", b.device.logits.row(0), want[29])
	}
}
