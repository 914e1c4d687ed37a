//go:build cuda

package cuda

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/backendtest"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

var start = time.Now()

// cacheDir keeps kernels from test to test: many open the same model.
var cacheDir string

func TestMain(m *testing.M) {
	var err error
	if cacheDir, err = os.MkdirTemp("", "meridian-kernels-"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(cacheDir)
	os.Exit(code)
}

func now() int64 { return int64(time.Since(start)) }

// open skips where there is no card.
func open(t testing.TB, m *model.Model, o Options) *Backend {
	t.Helper()
	o.Now, o.CacheDir = now, cacheDir
	b, err := New(m, o)
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("no usable card: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func loadModel(t testing.TB, dir string) *model.Model {
	t.Helper()
	m, err := model.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

type extra = map[string]any

// randomModel writes and loads a small model; extra replaces keys of the base config.
func randomModel(t testing.TB, arch string, extra extra) *model.Model {
	t.Helper()
	config := map[string]any{
		"architectures": []string{arch}, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
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

func TestConformance(t *testing.T) {
	for _, tc := range []struct {
		name          string
		deterministic bool
		extra         extra
	}{
		{"deterministic", true, nil},
		{"bf16", false, nil},
		{"bf16 with fused products", false, fusedShape},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := randomModel(t, "Qwen2ForCausalLM", tc.extra)
			backendtest.Run(t, backendtest.Options{Stages: tc.deterministic, Inexact: !tc.deterministic, Open: func(t *testing.T, stage backend.Stage) backend.Backend {
				return open(t, m, Options{TokensPerBlock: 8, KVBlocks: 300, MaxSlots: 16, Stage: stage, Deterministic: tc.deterministic})
			}})
		})
	}
}

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
			for _, n := range []int{1, 2, 5, 8, 9, 16, 17, 40} {
				worst := 0.0
				var got [2][][]backend.Logprobs
				for i, b := range []backend.Backend{reference, card} {
					got[i] = decodeTogether(t, b, n)
				}
				for s := range got[0] {
					worst = max(worst, farthest(got[0][s], got[1][s]))
				}
				t.Logf("%d sequences: log probabilities differ by up to %.2g", n, worst)
				if !(worst < 0.1) {
					t.Errorf("%d sequences: %g away from the processor", n, worst)
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
	lengths := make([]int, n)
	prompts := &backend.Batch{}
	for s := range n {
		lengths[s] = 1 + (s*97+n*11)%300
		e := backend.Entry{Slot: s, Blocks: blocksFrom(s*per, per)}
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
			batch.Entries = append(batch.Entries, backend.Entry{Slot: s, Tokens: []int32{token(s, pos)}, KVLen: pos, Blocks: blocksFrom(s*per, per), Logits: []int{0}})
		}
		for s, o := range run(t, b, batch).Outputs {
			out[s] = append(out[s], o.Logprobs...)
		}
	}
	return out
}

func blocksFrom(first, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(first + i)
	}
	return out
}

func run(t testing.TB, b backend.Backend, batch *backend.Batch) *backend.Step {
	t.Helper()
	s := b.Submit(batch)
	select {
	case <-s.Done():
	case <-time.After(time.Minute): // no measurement: a hang is to fail
		t.Fatal("the device does not answer")
	}
	if s.Err != nil {
		t.Fatal(s.Err)
	}
	return s
}

func shut(t testing.TB, b backend.Backend) {
	t.Helper()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// generate gives n greedy tokens after a prompt that is fed in chunks; then the card feeds tokens back itself.
func generate(t testing.TB, b backend.Backend, prompt []int32, n, chunk int) []int32 {
	t.Helper()
	blocks := blocksFrom(0, b.Info().KVBlocks)
	var got []int32
	for at := 0; at < len(prompt); at += chunk {
		e := backend.Entry{Tokens: prompt[at:min(at+chunk, len(prompt))], KVLen: at, Blocks: blocks}
		batch := &backend.Batch{}
		if at == 0 {
			batch.Assign = []backend.Assign{{Slot: 0, Sampling: infer.Sampling{}}}
		}
		if at+chunk >= len(prompt) {
			e.Logits = []int{len(e.Tokens) - 1}
		}
		batch.Entries = []backend.Entry{e}
		got = append(got, run(t, b, batch).Outputs[0].Tokens...)
	}
	for len(got) < n {
		e := backend.Entry{KVLen: len(prompt) + len(got) - 1, Blocks: blocks, Logits: []int{0}}
		got = append(got, run(t, b, &backend.Batch{Entries: []backend.Entry{e}}).Outputs[0].Tokens...)
	}
	return got
}

// golden is what transformers computes.
type golden struct {
	Generation []struct {
		Name      string  `json:"name"`
		PromptIDs []int32 `json:"prompt_ids"`
		GreedyIDs []int32 `json:"greedy_ids"`
	} `json:"generation"`
}

func TestGoldenGenerations(t *testing.T) {
	data, err := os.ReadFile("../model/meridian-tiny/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil || len(g.Generation) == 0 {
		t.Fatalf("%d generations, %v", len(g.Generation), err)
	}
	m := loadModel(t, "")
	for _, deterministic := range []bool{true, false} {
		b := open(t, m, Options{TokensPerBlock: 16, KVBlocks: 128, Deterministic: deterministic})
		for _, g := range g.Generation {
			for _, chunk := range []int{2000, 37} {
				got, same := generate(t, b, g.PromptIDs, len(g.GreedyIDs), chunk), 0
				for same < len(got) && got[same] == g.GreedyIDs[same] {
					same++
				}
				t.Logf("deterministic %v, %s, chunks of %d: %d of %d tokens are the golden ones", deterministic, g.Name, chunk, same, len(got))
				if deterministic && same < len(got) {
					t.Errorf("%s, chunks of %d: token %d is %d, want %d", g.Name, chunk, same, got[same], g.GreedyIDs[same])
				}
			}
		}
		shut(t, b)
	}
}

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

// TestSamplingAgreesWithTheProcessor compares the sampler of the card with the package sample, choice by choice.
func TestSamplingAgreesWithTheProcessor(t *testing.T) {
	m := loadModel(t, "")
	reference, err := cpu.New(m, cpu.Options{TokensPerBlock: 16, KVBlocks: 64, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, reference)
	card := open(t, m, Options{TokensPerBlock: 16, KVBlocks: 64, Deterministic: true})
	defer shut(t, card)
	for name, s := range map[string]infer.Sampling{
		"temperature": {Temperature: 1, Seed: 3}, "top-k": {Temperature: 2, TopK: 7, Seed: 1 << 40}, "top-p": {Temperature: 1.5, TopP: 0.8, Seed: 5},
		"top-k and top-p": {Temperature: 3, TopK: 50, TopP: 0.7, Seed: 6}, "min-p": {Temperature: 2, MinP: 0.1, Seed: 7},
		"bias": {Temperature: 1, LogitBias: map[int32]float32{5: 9, 7: -3}}, "penalties": {RepetitionPenalty: 1.3, PresencePenalty: 0.4, FrequencyPenalty: 0.2},
		"all of them": {Temperature: 1.2, TopK: 40, TopP: 0.9, MinP: 0.02, RepetitionPenalty: 1.2, FrequencyPenalty: 0.3, Seed: 8},
	} {
		var texts [2][]int32
		for i, b := range []backend.Backend{reference, card} {
			prompt := []int32{10, 300, 45, 700, 8, 9, 300}
			a := backend.Assign{Slot: 3, Sampling: s}
			if s.Penalized() {
				a.History, a.PromptLen = prompt, len(prompt)
			}
			e := backend.Entry{Slot: 3, Tokens: prompt, Blocks: blocksFrom(4, 20), Logits: []int{6}}
			texts[i] = run(t, b, &backend.Batch{Assign: []backend.Assign{a}, Entries: []backend.Entry{e}}).Outputs[0].Tokens
			for n := range 100 {
				e := backend.Entry{Slot: 3, KVLen: len(prompt) + n, Blocks: blocksFrom(4, 20), Logits: []int{0}}
				texts[i] = append(texts[i], run(t, b, &backend.Batch{Entries: []backend.Entry{e}}).Outputs[0].Tokens...)
			}
		}
		for n := range texts[0] {
			if texts[0][n] != texts[1][n] {
				t.Errorf("%s: token %d is %d, the processor's %d", name, n, texts[1][n], texts[0][n])
				break
			}
		}
	}
}

func TestBrokenBatchesAreRefused(t *testing.T) {
	b := open(t, loadModel(t, ""), Options{TokensPerBlock: 4, KVBlocks: 8, MaxSlots: 2})
	defer shut(t, b)
	for _, tc := range []struct {
		name, want string
		entry      backend.Entry
	}{
		{"a slot that is not there", "slot 2, there are 2", backend.Entry{Slot: 2, Tokens: []int32{1}, Blocks: []int32{1}}},
		{"no tokens", "no query token", backend.Entry{Tokens: []int32{}, Blocks: []int32{1}}},
		{"a token beyond the vocabulary", "the vocabulary has 2048", backend.Entry{Tokens: []int32{2048}, Blocks: []int32{1}}},
		{"too few blocks", "1 KV blocks of 4 tokens for 5 positions", backend.Entry{Tokens: []int32{1}, KVLen: 4, Blocks: []int32{1}}},
		{"a block that is not there", "KV block 8, there are 8", backend.Entry{Tokens: []int32{1}, Blocks: []int32{8}}},
		{"logits beyond the entry", "logits wanted at [1]", backend.Entry{Tokens: []int32{1}, Blocks: []int32{1}, Logits: []int{1}}},
	} {
		s := b.Submit(&backend.Batch{Entries: []backend.Entry{tc.entry}})
		<-s.Done()
		if s.Err == nil || !strings.Contains(s.Err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, s.Err, tc.want)
		}
	}
	good := backend.Entry{Tokens: []int32{5, 6}, Blocks: []int32{1}, Logits: []int{1}}
	if s := run(t, b, &backend.Batch{Entries: []backend.Entry{good}}); len(s.Outputs[0].Tokens) != 1 {
		t.Error("the device does not go on after a refused batch")
	}
}

func TestAMissingLibraryIsNamed(t *testing.T) {
	_, err := openLibrary([]string{"libno-such-thing.so.1"}, nil)
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "libno-such-thing.so.1") {
		t.Errorf("got %v", err)
	}
}
