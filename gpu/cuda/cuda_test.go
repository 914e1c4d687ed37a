//go:build cuda

package cuda

import (
	"encoding/json"
	"errors"
	"fmt"
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
	if job := os.Getenv("MERIDIAN_TEST_LENDER"); job != "" {
		if err := lend(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
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

// TestTheCardsOfThisMachine names each card that the back end can use.
func TestTheCardsOfThisMachine(t *testing.T) {
	for gpu := 0; ; gpu++ {
		c, err := openContext(gpu)
		if errors.Is(err, ErrUnavailable) {
			if gpu == 0 {
				t.Skip(err)
			}
			return
		}
		if err != nil {
			t.Fatalf("card %d: %v", gpu, err)
		}
		t.Logf("card %d: %s, sm_%d, %d multiprocessors", gpu, c.name, c.arch, c.cores)
		if c.name == "" || c.cores < 1 || c.uuid == [16]byte{} {
			t.Errorf("card %d has the name %q, %d multiprocessors and the id %x", gpu, c.name, c.cores, c.uuid)
		}
		if err := c.close(); err != nil {
			t.Errorf("card %d: %v", gpu, err)
		}
	}
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

// randomModel writes and loads a small model.
func randomModel(t testing.TB, arch string, extra extra) *model.Model {
	t.Helper()
	return loadModel(t, writeRandom(t, arch, extra))
}

// writeRandom writes a small model; extra replaces keys of the base config.
func writeRandom(t testing.TB, arch string, extra extra) (dir string) {
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
	dir = t.TempDir()
	if err := model.WriteRandom(dir, data, 42); err != nil {
		t.Fatal(err)
	}
	return dir
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
		{"deterministic with windows", true, extra{"sliding_window": 40, "use_sliding_window": true, "max_window_layers": 1}},
		{"bf16 with windows", false, extra{"sliding_window": 40, "use_sliding_window": true, "max_window_layers": 1, "head_dim": 64}},
		{"eight bits", false, extra{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := randomModel(t, "Qwen2ForCausalLM", tc.extra)
			narrow := tc.name == "eight bits"
			backendtest.Run(t, backendtest.Options{Stages: tc.deterministic, Inexact: !tc.deterministic, Open: func(t *testing.T, stage backend.Stage) backend.Backend {
				return open(t, m, Options{TokensPerBlock: 8, KVBlocks: 300, MaxSlots: 16, Stage: stage, Deterministic: tc.deterministic, NarrowWeights: narrow, NarrowKV: narrow})
			}})
		})
	}
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
