package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// best runs f as often as the benchmark asks and returns the shortest time in ns: on a machine that others use too, the mean
// says more about them.
func best(b *testing.B, f func()) float64 {
	shortest := int64(math.MaxInt64)
	for b.Loop() {
		t0 := now()
		f()
		shortest = min(shortest, now()-t0)
	}
	return float64(shortest)
}

// BenchmarkGEMM multiplies square matrices on one core.
func BenchmarkGEMM(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, ks := range available() {
		for _, dtype := range []model.DType{model.F32, model.BF16} {
			for _, n := range []int{512, 1024} {
				if ks.name == "scalar" {
					continue // 500 times slower, and nobody tunes it
				}
				b.Run(fmt.Sprintf("%s/%s/%d", ks.name, dtype, n), func(b *testing.B) {
					x, out := matrix{random(rng, n*n), n}, matrix{make([]float32, n*n), n}
					w := randomWeight(rng, n, n, dtype)
					d := &device{ks: ks, pool: newPool(1)}
					ns := best(b, func() { d.multiply(n, product{&x, &w, &out}) })
					b.ReportMetric(2*float64(n)*float64(n)*float64(n)/ns, "best-GFLOP/s")
				})
			}
		}
	}
}

// streamBytes is far more than any cache.
const streamBytes = 1 << 30

// readAll sums the memory on all threads, as fast as it can be read: what decode is measured against.
func readAll(d *device, words []uint64, sums []uint64) {
	const part = 1 << 15
	d.pool.run(len(words)/part, 1<<30, func(worker, i int) {
		p := (*[part]uint64)(words[i*part:])
		var s0, s1, s2, s3 uint64
		for j := 0; j < part; j += 8 {
			s0 += p[j]
			s1 += p[j+2]
			s2 += p[j+4]
			s3 += p[j+6]
		}
		sums[worker] += s0 + s1 + s2 + s3
	})
}

// BenchmarkDecodeBandwidth multiplies one row with bf16 weights larger than the caches, and reports which part of the
// bandwidth of plain reading, measured in the same run, that reaches. Best times of both.
func BenchmarkDecodeBandwidth(b *testing.B) {
	const k = 4096
	words := make([]uint64, streamBytes/8)
	for i := range words {
		words[i] = uint64(i) * 0x3f803f803f80 >> 3 & 0x3fff3fff3fff3fff
	}
	w := weight{data: unsafe.Pointer(&words[0]), dtype: model.BF16, rows: streamBytes / 2 / k, cols: k, stride: 2 * k}
	x, out := matrix{random(rand.New(rand.NewPCG(1, 1)), k), k}, matrix{cols: w.rows}
	out.resize(1)
	for _, threads := range []int{1, 2} {
		d := &device{ks: available()[0], pool: newPool(threads)}
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) {
			reading, multiplying := int64(math.MaxInt64), int64(math.MaxInt64)
			sums := make([]uint64, threads)
			for b.Loop() {
				t0 := now()
				readAll(d, words, sums)
				t1 := now()
				d.multiply(1, product{&x, &w, &out})
				reading, multiplying = min(reading, t1-t0), min(multiplying, now()-t1)
			}
			gbs := func(ns int64) float64 { return streamBytes / float64(ns) }
			b.ReportMetric(gbs(reading), "read-GB/s")
			b.ReportMetric(gbs(multiplying), "decode-GB/s")
			b.ReportMetric(float64(reading)/float64(multiplying), "ratio")
		})
		d.pool.close()
	}
}

// BenchmarkTinyPrefill runs a prompt of 1,024 tokens through the embedded model in one step.
func BenchmarkTinyPrefill(b *testing.B) {
	const n = 1024
	back := newBackend(b, loadModel(b, ""), Options{KVBlocks: 128})
	prompt := make([]int32, n)
	for i := range prompt {
		prompt[i] = int32(i*7%2000 + 5)
	}
	prefill(b, back, prompt)
	ns := best(b, func() { prefill(b, back, prompt) })
	b.ReportMetric(n/ns*1e9, "best-tok/s")
}

// BenchmarkTinyDecode runs decode steps of the embedded model, sequences of some 100 tokens.
func BenchmarkTinyDecode(b *testing.B) {
	for _, batch := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			back := newBackend(b, loadModel(b, ""), Options{KVBlocks: 8 * batch})
			step := &backend.Batch{}
			for i := range batch {
				step.Entries = append(step.Entries, backend.Entry{
					Slot: i, Tokens: []int32{int32(i + 300)}, KVLen: 100, Blocks: blocksFrom(8*i, 8), Logits: []int{0},
				})
			}
			run(b, back, step)
			ns := best(b, func() { run(b, back, step) })
			b.ReportMetric(float64(batch)/ns*1e9, "best-tok/s")
		})
	}
}

// largeConfig is a Llama of 540 million parameters, 1.1 GB in bf16.
const largeConfig = `{"architectures":["LlamaForCausalLM"],"vocab_size":8192,"hidden_size":2048,"intermediate_size":5632,"num_hidden_layers":12,
	"num_attention_heads":16,"num_key_value_heads":4,"max_position_embeddings":2048,"hidden_act":"silu","tie_word_embeddings":true}`

// BenchmarkLargeDecode runs whole decode steps of a model larger than the caches and reports the weights that a step reads
// over its time, and which part of the bandwidth of plain reading, measured in turns with it, that is. Best times of both.
func BenchmarkLargeDecode(b *testing.B) {
	dir := b.TempDir()
	if err := model.WriteRandom(dir, []byte(largeConfig), 1); err != nil {
		b.Fatal(err)
	}
	m := loadModel(b, dir)
	bytes := len(m.Head.Data)
	for _, l := range m.Layers {
		for _, t := range []*model.Tensor{l.Q, l.K, l.V, l.O, l.Gate, l.Up, l.Down} {
			bytes += len(t.Data)
		}
	}
	back := newBackend(b, m, Options{KVBlocks: 128})
	for _, batch := range []int{1, 4} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			step := &backend.Batch{}
			for i := range batch {
				step.Entries = append(step.Entries, backend.Entry{
					Slot: i, Tokens: []int32{int32(i + 300)}, KVLen: 100, Blocks: blocksFrom(8*i, 8), Logits: []int{0},
				})
			}
			words := make([]uint64, bytes/8)
			for i := range words {
				words[i] = uint64(i)
			}
			sums := make([]uint64, back.device.pool.size())
			reading, decoding := int64(math.MaxInt64), int64(math.MaxInt64)
			for b.Loop() {
				t0 := now()
				run(b, back, step)
				t1 := now()
				readAll(back.device, words, sums)
				decoding, reading = min(decoding, t1-t0), min(reading, now()-t1)
			}
			b.ReportMetric(float64(bytes)/float64(decoding), "decode-GB/s")
			b.ReportMetric(float64(bytes)/float64(reading), "read-GB/s")
			b.ReportMetric(float64(reading)/float64(decoding), "ratio")
		})
	}
}
