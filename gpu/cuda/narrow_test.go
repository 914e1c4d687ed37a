//go:build cuda

package cuda

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/model"
)

// eightValues are the numbers of E4M3 that are not negative, rising.
func eightValues() []float64 {
	out := make([]float64, 127)
	for code := range out {
		exponent, mantissa := code>>3, float64(code&7)
		if out[code] = mantissa / 512; exponent > 0 {
			out[code] = math.Ldexp(1+mantissa/8, exponent-7)
		}
	}
	return out
}

// nearest rounds to one of values, to the one with the even number between two.
func nearest(values []float64, v float64) float64 {
	a, best := math.Abs(v), 0
	for i, x := range values {
		d, least := math.Abs(x-a), math.Abs(values[best]-a)
		if d < least || d == least && i%2 == 0 {
			best = i
		}
	}
	return math.Copysign(values[best], v)
}

// rounded is a matrix whose rows went through eight bits and a scale.
func rounded(t *model.Tensor) *model.Tensor {
	values, in, k := eightValues(), t.Float32(), t.Shape[1]
	out := &model.Tensor{Type: model.F32, Shape: t.Shape, Data: make([]byte, 4*len(in))}
	for at := 0; at < len(in); at += k {
		top := float32(0)
		for _, v := range in[at : at+k] {
			top = max(top, float32(math.Abs(float64(v))))
		}
		scale := top / 448
		for i, v := range in[at : at+k] {
			binary.LittleEndian.PutUint32(out.Data[4*(at+i):], math.Float32bits(float32(nearest(values, float64(v/scale)))*scale))
		}
	}
	return out
}

func roundedModel(m *model.Model) *model.Model {
	out := *m
	out.Layers = append([]model.Layer(nil), m.Layers...)
	for i := range out.Layers {
		l := &out.Layers[i]
		for _, t := range []**model.Tensor{&l.Q, &l.K, &l.V, &l.O, &l.Gate, &l.Up, &l.Down} {
			*t = rounded(*t)
		}
	}
	return &out
}

// TestNarrowWeightsAreTheRoundedOnes holds the card against the processor with weights that were rounded to eight bits before.
func TestNarrowWeightsAreTheRoundedOnes(t *testing.T) {
	for name, size := range map[string]int{"k that few blocks share": 208, "k that many blocks share unequally": 1168} {
		t.Run(name, func(t *testing.T) {
			m := randomModel(t, "Qwen2ForCausalLM", extra{"hidden_size": 160, "intermediate_size": size, "head_dim": 64})
			reference, err := cpu.New(roundedModel(m), cpu.Options{TokensPerBlock: 8, KVBlocks: 64, Now: now})
			if err != nil {
				t.Fatal(err)
			}
			defer shut(t, reference)
			tokens := make([]int32, 300)
			for i := range tokens {
				tokens[i] = int32((i*i*7 + i*13 + 5) % m.Config.Vocab)
			}
			want := allLogprobs(t, reference, tokens, 300)
			b := open(t, m, Options{TokensPerBlock: 8, KVBlocks: 64, NarrowWeights: true})
			defer shut(t, b)
			for _, chunk := range []int{300, 256, 130, 65, 64, 41, 30, 17, 16, 7, 1} {
				worst := farthest(want, allLogprobs(t, b, tokens, chunk))
				t.Logf("chunks of %d: log probabilities differ by up to %.2g", chunk, worst)
				if !(worst < 0.1) {
					t.Errorf("chunks of %d: %g away from the processor", chunk, worst)
				}
			}
		})
	}
}

// TestNarrowKVIsReadAlikeByAllKernels feeds the same tokens by prefill and by decode, to one sequence and to many: all must see the
// same KV. How far it is from wider KV is bounded loosely: what a random model holds for likely is close together.
func TestNarrowKVIsReadAlikeByAllKernels(t *testing.T) {
	const loose = 0.4
	for name, tc := range map[string]struct {
		arch  string
		extra extra
	}{
		"heads of 64": {"Qwen2ForCausalLM", fusedShape},
		"heads of 128, groups of twelve, norms": {"Qwen3ForCausalLM", extra{
			"hidden_size": 192, "intermediate_size": 128, "head_dim": 128, "num_attention_heads": 12, "num_key_value_heads": 1,
		}},
		"heads of 48":         {"LlamaForCausalLM", extra{"head_dim": 48}},
		"heads of 32":         {"LlamaForCausalLM", nil},
		"a window, 64 a head": {"MistralForCausalLM", extra{"head_dim": 64, "sliding_window": 50}},
	} {
		t.Run(name, func(t *testing.T) {
			m := randomModel(t, tc.arch, tc.extra)
			o := Options{TokensPerBlock: 16, KVBlocks: 900, MaxSlots: 40}
			wide := open(t, m, o)
			defer shut(t, wide)
			o.NarrowKV = true
			narrow := open(t, m, o)
			defer shut(t, narrow)
			tokens := make([]int32, 300)
			for i := range tokens {
				tokens[i] = int32((i*i*7 + i*13 + 5) % m.Config.Vocab)
			}
			want := allLogprobs(t, narrow, tokens, 300)
			far := agreement{}
			far.add(allLogprobs(t, wide, tokens, 300), want)
			t.Logf("error of log probabilities against bf16: %.2f %% of their spread", 100*far.error())
			if !(far.error() < loose) {
				t.Errorf("%g away from bf16", far.error())
			}
			// Kernels that round their products differently store some elements as the next number of eight bits. That is less than what
			// eight bits cost; a wrong place, turn or scale is far more.
			for _, chunk := range []int{41, 7, 1} {
				var a agreement
				a.add(want, allLogprobs(t, narrow, tokens, chunk))
				t.Logf("chunks of %d: error of log probabilities against one of 300: %.2f %% of their spread", chunk, 100*a.error())
				if !(a.error() < far.error()) {
					t.Errorf("chunks of %d: %g away from one of 300, eight bits from bf16 %g", chunk, a.error(), far.error())
				}
			}
			for _, n := range []int{1, 8, 40} {
				a, in := agreement{}, decodeTogether(t, wide, n)
				for s, got := range decodeTogether(t, narrow, n) {
					a.add(in[s], got)
				}
				if !(a.error() < loose) {
					t.Errorf("%d sequences: %g away from bf16", n, a.error())
				}
			}
		})
	}
}

// TestAccuracyOfNarrowTypes tells how far meridian-tiny goes with eight bits from what it says in float32, on its golden texts.
func TestAccuracyOfNarrowTypes(t *testing.T) {
	data, err := os.ReadFile("../model/meridian-tiny/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	m := loadModel(t, "")
	exact := open(t, m, Options{TokensPerBlock: 16, KVBlocks: 128, Deterministic: true})
	defer shut(t, exact)
	for _, c := range []struct {
		name  string
		o     Options
		error float64 // of a log probability, root of the mean square, over their spread
		same  float64 // part of the positions whose most likely token is the same
	}{
		{"bf16", Options{}, 0.02, 0.97},
		{"weights of eight bits", Options{NarrowWeights: true}, 0.15, 0.85},
		{"KV of eight bits", Options{NarrowKV: true}, 0.15, 0.85},
		{"both", Options{NarrowWeights: true, NarrowKV: true}, 0.2, 0.8},
	} {
		c.o.TokensPerBlock, c.o.KVBlocks = 16, 128
		b := open(t, m, c.o)
		var a agreement
		for _, g := range g.Generation {
			tokens := append(append([]int32(nil), g.PromptIDs...), g.GreedyIDs...)
			a.add(allLogprobs(t, exact, tokens, 64), allLogprobs(t, b, tokens, 64))
			a.add(allLogprobs(t, exact, tokens, 8), allLogprobs(t, b, tokens, 8))
		}
		shut(t, b)
		t.Logf("%s: error of log probabilities %.2f %% of their spread; the most likely token is the same at %.1f %% of %d positions", c.name, 100*a.error(), 100*a.part(), a.positions)
		if !(a.error() < c.error && a.part() > c.same) {
			t.Errorf("%s is farther from float32 than it should be: %+v", c.name, a)
		}
	}
}

// agreement compares what two back ends say at the same positions.
type agreement struct {
	positions, same int
	difference      float64 // sums of squares
	spread          float64
}

func (a *agreement) add(want, got []backend.Logprobs) {
	for i := range want {
		a.positions++
		if want[i].Top[0].Token == got[i].Top[0].Token {
			a.same++
		}
		values, mean := map[int32]float64{}, 0.0
		for _, l := range got[i].Top {
			values[l.Token] = float64(l.Logprob)
		}
		for _, l := range want[i].Top {
			mean += float64(l.Logprob) / float64(len(want[i].Top))
		}
		for _, l := range want[i].Top {
			if v, ok := values[l.Token]; ok {
				a.difference += (v - float64(l.Logprob)) * (v - float64(l.Logprob))
				a.spread += (float64(l.Logprob) - mean) * (float64(l.Logprob) - mean)
			}
		}
	}
}

func (a *agreement) error() float64 { return math.Sqrt(a.difference / a.spread) }

func (a *agreement) part() float64 { return float64(a.same) / float64(a.positions) }

// BenchmarkNarrow prints the times of decode and prefill of both shapes with eight bits, beside those with sixteen.
func BenchmarkNarrow(b *testing.B) {
	if b.N > 1 {
		return // one pass measures all; each number is a median of many
	}
	for _, shape := range []struct {
		name, config string
		slots        int
		decode       [][2]int // batch, context
		prefill      []int
	}{
		{"1.24 B", bench1B, 256, [][2]int{{1, 1024}, {16, 1024}, {24, 1024}, {32, 1024}, {64, 1024}, {256, 2048}}, []int{2048, 8192}},
		{"8 B", bench8B, 256, [][2]int{{1, 2048}, {16, 2048}, {24, 2048}, {32, 2048}, {64, 2048}, {128, 2048}, {256, 2048}}, []int{256, 2048}},
	} {
		m := noiseModel(b, shape.config)
		for _, c := range []struct {
			name string
			o    Options
		}{{"bf16", Options{}}, {"fp8 weights", Options{NarrowWeights: true}}, {"fp8 KV", Options{NarrowKV: true}}, {"both", Options{NarrowWeights: true, NarrowKV: true}}} {
			c.o.TokensPerBlock, c.o.MaxSlots, c.o.MaxTokens, c.o.KVBlocks = 32, shape.slots, 8192, shape.slots*(2048+64)/32
			d := open(b, m, c.o)
			line := fmt.Sprintf("%-7s %-12s", shape.name, c.name)
			for _, at := range shape.decode {
				ms, _ := decodeBench(b, d, at[0], at[1])
				line += fmt.Sprintf("  decode %d %d: %.3f ms", at[0], at[1], ms)
			}
			for _, n := range shape.prefill {
				line += fmt.Sprintf("  prefill %d: %.2f ms", n, prefillBench(b, d, n))
			}
			fmt.Println(line)
			shut(b, d)
		}
	}
	b.ReportMetric(0, "ns/op")
}
