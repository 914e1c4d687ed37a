package cpu

import (
	"encoding/json"
	"math"
	"os"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// golden is meridian-tiny/golden.json: what transformers computes.
type golden struct {
	Generation []struct {
		Name      string       `json:"name"`
		PromptIDs []int32      `json:"prompt_ids"`
		Top5      [][2]float64 `json:"last_logits_top5"`
		GreedyIDs []int32      `json:"greedy_ids"`
	} `json:"generation"`
}

func readGolden(t testing.TB) golden {
	t.Helper()
	data, err := os.ReadFile("../model/meridian-tiny/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Generation) != 6 {
		t.Fatalf("%d generations, want 6", len(g.Generation))
	}
	return g
}

var start = time.Now()

func now() int64 { return int64(time.Since(start)) }

func loadModel(t testing.TB, dir string) *model.Model {
	t.Helper()
	m, err := model.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

func newBackend(t testing.TB, m *model.Model, o Options) *Backend {
	t.Helper()
	o.Now = now
	b, err := New(m, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// run submits one batch and waits.
func run(t testing.TB, b *Backend, batch *backend.Batch) *backend.Step {
	t.Helper()
	for i := range batch.Entries {
		seeLittle(&batch.Entries[i], b.info)
	}
	s := b.Submit(batch)
	<-s.Done()
	if s.Err != nil {
		t.Fatal(s.Err)
	}
	return s
}

// seeLittle gives each window a table of the same blocks, but for those that the entry does not see: these are not there.
func seeLittle(e *backend.Entry, info backend.Info) {
	e.Windows = nil
	for _, w := range info.Windows {
		table := append([]int32(nil), e.Blocks...)
		for i := range max(e.KVLen-w.Tokens+1, 0) / info.TokensPerBlock {
			table[i] = -1
		}
		e.Windows = append(e.Windows, table)
	}
}

// blocksFrom is a block table of n blocks that begins at block first.
func blocksFrom(first, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(first + i)
	}
	return out
}

// chunks cuts a prompt into entries of at most size tokens; the last one wants logits at its end.
func chunks(prompt []int32, size int, blocks []int32) []backend.Entry {
	var out []backend.Entry
	for at := 0; at < len(prompt); at += size {
		e := backend.Entry{Tokens: prompt[at:min(at+size, len(prompt))], KVLen: at, Blocks: blocks}
		if at+size >= len(prompt) {
			e.Logits = []int{len(e.Tokens) - 1}
		}
		out = append(out, e)
	}
	return out
}

// generate decodes greedily with one step in flight at a time and returns n tokens.
func generate(t testing.TB, b *Backend, prompt []int32, n, chunk int) []int32 {
	t.Helper()
	blocks := blocksFrom(0, b.Info().KVBlocks)
	var got []int32
	for i, e := range chunks(prompt, chunk, blocks) {
		batch := &backend.Batch{Entries: []backend.Entry{e}}
		if i == 0 {
			batch.Assign = []backend.Assign{{Slot: 0, Sampling: infer.Sampling{}}}
		}
		got = append(got, run(t, b, batch).Outputs[0].Tokens...)
	}
	for len(got) < n {
		e := backend.Entry{KVLen: len(prompt) + len(got) - 1, Blocks: blocks, Logits: []int{0}}
		got = append(got, run(t, b, &backend.Batch{Entries: []backend.Entry{e}}).Outputs[0].Tokens...)
	}
	return got
}

func TestGoldenGenerations(t *testing.T) {
	m := loadModel(t, "")
	for _, kernel := range Kernels() {
		for _, o := range []Options{
			{Kernel: kernel, TokensPerBlock: 16, KVBlocks: 128},
			{Kernel: kernel, TokensPerBlock: 5, KVBlocks: 400, Threads: 3},
		} {
			b := newBackend(t, m, o)
			for _, g := range readGolden(t).Generation {
				if kernel == "scalar" && (len(g.PromptIDs) > 8 || o.Threads == 0) {
					continue // minutes of scalar arithmetic; TestProductsAgree and its kin hold the kernels together
				}
				for _, chunk := range []int{2000, 37} {
					got := generate(t, b, g.PromptIDs, len(g.GreedyIDs), chunk)
					for i, id := range g.GreedyIDs {
						if got[i] != id {
							t.Errorf("%s, %s, chunks of %d: token %d is %d, want %d", kernel, g.Name, chunk, i, got[i], id)
							break
						}
					}
				}
			}
		}
	}
}

func TestGoldenLogits(t *testing.T) {
	b := newBackend(t, loadModel(t, ""), Options{KVBlocks: 128})
	for _, g := range readGolden(t).Generation {
		prefill(t, b, g.PromptIDs)
		row := b.device.logits.row(0)
		for _, top := range g.Top5 {
			if got := float64(row[int(top[0])]); math.Abs(got-top[1]) > 1e-3 {
				t.Errorf("%s: logit of token %v is %g, want %g", g.Name, top[0], got, top[1])
			}
		}
	}
}

// prefill runs a prompt in one step and leaves its last logits in the device.
func prefill(t testing.TB, b *Backend, prompt []int32) {
	t.Helper()
	blocks := blocksFrom(0, b.Info().KVBlocks)
	run(t, b, &backend.Batch{Assign: []backend.Assign{{}}, Entries: chunks(prompt, len(prompt), blocks)})
}
