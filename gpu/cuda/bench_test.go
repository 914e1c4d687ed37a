//go:build cuda

package cuda

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// bench1B is the shape of a Llama of 1.24 billion parameters.
const bench1B = `{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 40960,
"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000}`

// noiseModel is a model in memory whose tensors are all parts of one random piece: the card holds each on its own, so it
// costs what a real one costs, and nobody waits for a file of gigabytes.
func noiseModel(tb testing.TB, configJSON string) *model.Model {
	tb.Helper()
	c, err := model.ParseConfig([]byte(configJSON))
	if err != nil {
		tb.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 2*c.Vocab*c.Hidden)
	for i := 0; i < len(noise); i += 2 { // small numbers of both signs: 2^-6 to 2^-5
		r := rng.Uint32()
		noise[i], noise[i+1] = byte(r)&0x7f, 0x3c|byte(r>>8)&0x80
	}
	tensor := func(shape ...int) *model.Tensor {
		t := &model.Tensor{Type: model.BF16, Shape: shape}
		t.Data = noise[:2*t.Elements()]
		return t
	}
	m := &model.Model{Config: *c, Embed: tensor(c.Vocab, c.Hidden), Norm: tensor(c.Hidden), Hash: "noise"}
	m.Head = m.Embed
	q, kv := c.Heads*c.HeadSize, c.KVHeads*c.HeadSize
	for range c.Layers {
		m.Layers = append(m.Layers, model.Layer{
			AttnNorm: tensor(c.Hidden), MLPNorm: tensor(c.Hidden), Q: tensor(q, c.Hidden), K: tensor(kv, c.Hidden), V: tensor(kv, c.Hidden),
			O: tensor(c.Hidden, q), Gate: tensor(c.Intermediate, c.Hidden), Up: tensor(c.Intermediate, c.Hidden), Down: tensor(c.Hidden, c.Intermediate),
		})
	}
	return m
}

// BenchmarkDevice prints the medians of the steps' times on the card, and the gap between decode steps that are queued
// one behind the other.
func BenchmarkDevice(b *testing.B) {
	m := noiseModel(b, bench1B)
	const perBlock, maxSlots = 32, 256
	blocks := maxSlots * (2048 + 64) / perBlock
	d := open(b, m, Options{TokensPerBlock: perBlock, KVBlocks: blocks, MaxSlots: maxSlots})
	defer shut(b, d)
	for _, c := range []struct{ batch, context int }{{1, 64}, {1, 1024}, {16, 1024}, {64, 64}, {64, 1024}, {256, 2048}} {
		b.Run(fmt.Sprintf("decode batch %d context %d", c.batch, c.context), func(b *testing.B) { decodeBench(b, d, c.batch, c.context) })
	}
	for _, n := range []int{512, 2048, 8192, 32768} {
		b.Run(fmt.Sprintf("prefill %d", n), func(b *testing.B) { prefillBench(b, d, n) })
	}
}

// floorMS is the time of reading the weights, and KV of all sequences, once at 4.26 TB/s.
func floorMS(d *Backend, batch, context int) float64 {
	const weights = 2 * 1.236e9
	return (weights + float64(batch*context*d.info.KVBytes(0, d.info.Layers))) / 4.26e9
}

func decodeBench(b *testing.B, d *Backend, batch, context int) {
	per := (context + 64 + d.info.TokensPerBlock - 1) / d.info.TokensPerBlock
	var forward, sample, gaps []float64
	for b.Loop() {
		const steps = 48
		var queued []*backend.Step
		for i := range steps {
			next := &backend.Batch{}
			for s := range batch {
				if i == 0 {
					next.Assign = append(next.Assign, backend.Assign{Slot: s, Sampling: infer.Sampling{}})
				}
				next.Entries = append(next.Entries, backend.Entry{Slot: s, KVLen: context + i, Blocks: blocksFrom(s*per, per), Logits: []int{0}})
			}
			queued = append(queued, d.Submit(next))
		}
		for i, s := range queued {
			<-s.Done()
			if s.Err != nil {
				b.Fatal(s.Err)
			}
			if i < 8 {
				continue // the first ones capture graphs
			}
			forward = append(forward, float64(s.Stamps.ForwardEndNS-s.Stamps.ForwardStartNS)/1e6)
			sample = append(sample, float64(s.Stamps.SampleEndNS-s.Stamps.ForwardEndNS)/1e6)
			gaps = append(gaps, float64(s.Stamps.ForwardStartNS-queued[i-1].Stamps.SampleEndNS)/1e3)
		}
	}
	floor := floorMS(d, batch, context)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(forward)+median(sample), "step-ms")
	b.ReportMetric(median(sample), "sample-ms")
	b.ReportMetric(median(gaps), "gap-us")
	b.ReportMetric(floor, "floor-ms")
	b.ReportMetric((median(forward)+median(sample))/floor, "of-floor")
}

func prefillBench(b *testing.B, d *Backend, n int) {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32((i*7919 + 13) % d.info.Vocab)
	}
	const chunk = 8192
	blocks := blocksFrom(0, (n+d.info.TokensPerBlock-1)/d.info.TokensPerBlock)
	var times []float64
	for i := 0; b.Loop(); i++ {
		total := 0.0
		var queued []*backend.Step
		for at := 0; at < n; at += chunk {
			e := backend.Entry{Tokens: tokens[at:min(at+chunk, n)], KVLen: at, Blocks: blocks}
			if at+chunk >= n {
				e.Logits = []int{len(e.Tokens) - 1}
			}
			next := &backend.Batch{Entries: []backend.Entry{e}}
			if at == 0 {
				next.Assign = []backend.Assign{{Sampling: infer.Sampling{}}}
			}
			queued = append(queued, d.Submit(next))
		}
		for _, s := range queued {
			<-s.Done()
			if s.Err != nil {
				b.Fatal(s.Err)
			}
			total += float64(s.Stamps.SampleEndNS-s.Stamps.ForwardStartNS) / 1e6
		}
		if i > 0 {
			times = append(times, total)
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(times), "step-ms")
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}
