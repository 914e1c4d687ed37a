package cpu

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/backendtest"
	"meridian.internal/gpu/model"
)

func TestConformance(t *testing.T) {
	plain := randomModel(t, "Qwen2ForCausalLM", extra{"max_position_embeddings": 512})
	for _, tc := range []struct {
		name    string
		m       *model.Model
		threads int
	}{
		{"threads=1", plain, 1},
		{"threads=3", plain, 3},
		{"windows", randomModel(t, "MistralForCausalLM", extra{"max_position_embeddings": 512, "sliding_window": 12, "num_hidden_layers": 4, "sliding_window_pattern": 3}), 1},
		{"windows in all layers", randomModel(t, "MistralForCausalLM", extra{"max_position_embeddings": 512, "sliding_window": 12}), 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			backendtest.Run(t, backendtest.Options{Stages: true, Open: func(t *testing.T, stage backend.Stage) backend.Backend {
				b, err := New(tc.m, Options{TokensPerBlock: 8, KVBlocks: 300, MaxSlots: 16, Stage: stage, Threads: tc.threads, Now: now})
				if err != nil {
					t.Fatal(err)
				}
				return b
			}})
		})
	}
}

func TestOptionsAreChecked(t *testing.T) {
	m := loadModel(t, "")
	for _, tc := range []struct {
		name string
		o    Options
		want string
	}{
		{"no clock", Options{}, "Now is missing"},
		{"negative threads", Options{Threads: -1, Now: now}, "Threads is -1"},
		{"negative block size", Options{TokensPerBlock: -4, Now: now}, "TokensPerBlock is -4"},
		{"an empty stage", Options{Stage: backend.Stage{First: 2, End: 2}, Now: now}, "stage of layers [2, 2)"},
		{"a stage beyond the model", Options{Stage: backend.Stage{First: 2, End: 5}, Now: now}, "the model has 4"},
		{"an unknown kernel", Options{Kernel: "x", Now: now}, `kernel "x"; this processor has`},
	} {
		if _, err := New(m, tc.o); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
}

// TestBrokenBatchesAreRefused: a batch that would touch memory that is not there fails with a sentence, and the next one runs.
func TestBrokenBatchesAreRefused(t *testing.T) {
	b := newBackend(t, loadModel(t, ""), Options{TokensPerBlock: 4, KVBlocks: 8, MaxSlots: 2})
	one := func(e backend.Entry) *backend.Batch { return &backend.Batch{Iter: 3, Entries: []backend.Entry{e}} }
	good := backend.Entry{Tokens: []int32{5, 6}, Blocks: []int32{1}, Logits: []int{1}}
	change := func(f func(e *backend.Entry)) *backend.Batch {
		e := good
		f(&e)
		return one(e)
	}
	for _, tc := range []struct {
		name, want string
		batch      *backend.Batch
	}{
		{"a slot that is not there", "slot 2, there are 2", change(func(e *backend.Entry) { e.Slot = 2 })},
		{"no tokens", "no query token", change(func(e *backend.Entry) { e.Tokens = []int32{} })},
		{"a token beyond the vocabulary", "token 2048, the vocabulary has 2048", change(func(e *backend.Entry) { e.Tokens = []int32{5, 2048} })},
		{"a negative token", "token -1", change(func(e *backend.Entry) { e.Tokens = []int32{-1} })},
		{"too few blocks", "1 KV blocks of 4 tokens for 5 positions", change(func(e *backend.Entry) { e.KVLen = 3 })},
		{"a block that is not there", "KV block 8, there are 8", change(func(e *backend.Entry) { e.Blocks = []int32{8} })},
		{"a position beyond the context", "the context has 2048", change(func(e *backend.Entry) { e.KVLen = 2047 })},
		{"logits beyond the entry", "logits wanted at [2]", change(func(e *backend.Entry) { e.Logits = []int{2} })},
		{"logits that do not rise", "logits wanted at [1 1]", change(func(e *backend.Entry) { e.Logits = []int{1, 1} })},
		{"a slot twice", "entry 1: slot 0 is in another entry too", &backend.Batch{Entries: []backend.Entry{good, good}}},
		{"an assignment that is not there", "assigns slot -1", &backend.Batch{Assign: []backend.Assign{{Slot: -1}}}},
		{"a block copy that is not there", "copies KV block 1 to 9", &backend.Batch{Copies: []backend.BlockCopy{{From: 1, To: 9}}}},
	} {
		s := b.Submit(tc.batch)
		<-s.Done()
		if s.Err == nil || !strings.Contains(s.Err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, s.Err, tc.want)
		}
	}
	if s := run(t, b, one(good)); len(s.Outputs[0].Tokens) != 1 {
		t.Error("the device does not go on after a refused batch")
	}
}

func TestCopiesAreChecked(t *testing.T) {
	b := newBackend(t, loadModel(t, ""), Options{TokensPerBlock: 4, KVBlocks: 8})
	good := backend.Region{Block: 1, LayerFrom: 1, LayerTo: 3, HeadFrom: 0, HeadTo: 1, TokenFrom: 1, TokenTo: 3}
	size := 2 * 2 * 2 * 64 * 4
	for _, tc := range []struct {
		name   string
		change func(r *backend.Region)
		size   int
		want   string
	}{
		{"a good one", func(*backend.Region) {}, size, ""},
		{"a buffer of another size", func(*backend.Region) {}, size - 1, "with a buffer of 2047"},
		{"a block that is not there", func(r *backend.Region) { r.Block = 8 }, size, "KV block 8"},
		{"a layer that is not there", func(r *backend.Region) { r.LayerTo = 5 }, size, "layers [1, 5)"},
		{"heads backwards", func(r *backend.Region) { r.HeadFrom = 2 }, size, "heads [2, 1)"},
		{"a token beyond the block", func(r *backend.Region) { r.TokenTo = 5 }, size, "tokens [1, 5)"},
	} {
		r := good
		tc.change(&r)
		for _, do := range []func([]backend.Region, []byte) *backend.Copy{b.CopyOut, b.CopyIn} {
			c := do([]backend.Region{r}, make([]byte, tc.size))
			<-c.Done()
			if (tc.want == "") != (c.Err == nil) || c.Err != nil && !strings.Contains(c.Err.Error(), tc.want) {
				t.Errorf("%s: got %v, want %q", tc.name, c.Err, tc.want)
			}
		}
	}
}

func TestClosedBackendRefusesWork(t *testing.T) {
	b, err := New(loadModel(t, ""), Options{KVBlocks: 8, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second Close is harmless
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s := b.Submit(&backend.Batch{})
	<-s.Done()
	c := b.CopyOut(nil, nil)
	<-c.Done()
	if !errors.Is(s.Err, backend.ErrClosed) || !errors.Is(c.Err, backend.ErrClosed) {
		t.Errorf("step: %v, copy: %v", s.Err, c.Err)
	}
}

// TestGarbageInOtherBlocksIsNotSeen fills all other KV with NaN: a product with zero would let it through.
func TestGarbageInOtherBlocksIsNotSeen(t *testing.T) {
	m := randomModel(t, "MistralForCausalLM", extra{"sliding_window": 6})
	b := newBackend(t, m, Options{TokensPerBlock: 8, KVBlocks: 16})
	for _, g := range b.device.kv.groups {
		for i := range g.data {
			g.data[i] = float32(math.NaN())
		}
	}
	for i, row := range allLogits(t, b, randomTokens(21, m.Config.Vocab), 5, blocksFrom(2, 3)) {
		if row[0] != row[0] {
			t.Fatalf("position %d is NaN", i)
		}
	}
}

func TestGEMMMultiplies(t *testing.T) {
	g, err := NewGEMM("", 2)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	x, w, out := make([]float32, 3*16), make([]float32, 2*16), make([]float32, 6)
	x[17], w[1], w[16+1] = 2, 3, 5
	if err := g.Multiply(out, x, w, 3, 2, 16); err != nil || fmt.Sprint(out) != "[0 0 6 10 0 0]" {
		t.Errorf("got %v, %v", out, err)
	}
	if err := g.Multiply(out, x, w, 3, 2, 15); err == nil {
		t.Error("k of 15 was accepted")
	}
}
