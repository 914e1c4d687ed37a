//go:build cuda

package cuda

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// bench1B is the shape of a Llama of 1.24 billion parameters, bench8B that of one of 8.03 billion.
const (
	bench1B = `{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 40960,
"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000}`
	bench8B = `{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_theta": 500000}`
)

// noiseModel is a model in memory whose tensors are all parts of one random piece: the card holds each on its own, so it
// costs what a real one costs, and nobody waits for a file of gigabytes.
func noiseModel(tb testing.TB, configJSON string) *model.Model {
	tb.Helper()
	m, err := parseNoise(configJSON)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

func parseNoise(configJSON string) (*model.Model, error) {
	c, err := model.ParseConfig([]byte(configJSON))
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 2*max(c.Vocab, c.Intermediate, c.Heads*c.HeadSize)*c.Hidden)
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
	if !strings.Contains(configJSON, `"tie_word_embeddings": true`) {
		m.Head = tensor(c.Vocab, c.Hidden)
	}
	q, kv := c.Heads*c.HeadSize, c.KVHeads*c.HeadSize
	for range c.Layers {
		m.Layers = append(m.Layers, model.Layer{
			AttnNorm: tensor(c.Hidden), MLPNorm: tensor(c.Hidden), Q: tensor(q, c.Hidden), K: tensor(kv, c.Hidden), V: tensor(kv, c.Hidden),
			O: tensor(c.Hidden, q), Gate: tensor(c.Intermediate, c.Hidden), Up: tensor(c.Intermediate, c.Hidden), Down: tensor(c.Hidden, c.Intermediate),
		})
	}
	return m, nil
}

// readParameters is how many parameters a step reads: all, but of the embedding a row each.
func readParameters(c *model.Config) float64 {
	perLayer := c.Hidden*(c.Heads+2*c.KVHeads)*c.HeadSize + c.Heads*c.HeadSize*c.Hidden + 3*c.Hidden*c.Intermediate
	return float64(c.Layers*perLayer + c.Vocab*c.Hidden)
}

// row is one line of the table.
type row struct {
	name          string
	goal, floorMS float64 // 0: none
	ms            float64
	note          string
}

func (r row) String() string {
	cell := func(v float64, format string) string {
		if v == 0 {
			return "–"
		}
		return fmt.Sprintf(format, v)
	}
	ratio := 0.0
	if r.floorMS > 0 {
		ratio = r.ms / r.floorMS
	}
	return fmt.Sprintf("%-34s %9s %9.3f %8s %8s %-7s %s", r.name, cell(r.floorMS, "%.3f"), r.ms, cell(ratio, "%.2f"), cell(r.goal, "%.2f"), r.verdict(), r.note)
}

func (r row) verdict() string {
	switch {
	case r.goal == 0:
		return "–"
	case r.ms > r.goal:
		return "missed"
	}
	return "met"
}

// BenchmarkTable measures the card's ceilings, then every kind of work against them and against its goal, and prints one
// table. With MERIDIAN_TRANSFORMERS naming a python that has torch and transformers, these are timed in the same run.
func BenchmarkTable(b *testing.B) {
	if b.N > 1 {
		return // one pass measures all; each number is a median of many
	}
	peer := transformers(b)
	bytesPS, flopsPS := ceilings(b)
	var rows []row
	add := func(r row) {
		if ms := peer[r.name]; ms > 0 {
			r.note = strings.TrimSpace(fmt.Sprintf("transformers %.2f ms, %.1f times as long; %s", ms, ms/r.ms, r.note))
		}
		rows = append(rows, r)
	}
	rows1B(b, bytesPS, flopsPS, add)
	rows8B(b, bytesPS, add)
	fmt.Printf("\nceilings: memory %.2f TB/s (copy, read and written), bf16 product of 8192³ %.0f TFLOP/s\n", bytesPS/1e12, flopsPS/1e12)
	fmt.Printf("%-34s %9s %9s %8s %8s\n", "work", "floor ms", "ms", "/floor", "goal ms")
	met, missed := 0, 0
	for _, r := range rows {
		fmt.Println(r)
		switch r.verdict() {
		case "met":
			met++
		case "missed":
			missed++
		}
	}
	fmt.Printf("goals: %d met, %d missed\n", met, missed)
	b.ReportMetric(0, "ns/op")
}

func rows1B(b *testing.B, bytesPS, flopsPS float64, add func(row)) {
	m := noiseModel(b, bench1B)
	const perBlock, maxSlots = 32, 256
	began := time.Now()
	o := Options{TokensPerBlock: perBlock, KVBlocks: maxSlots * (2048 + 64) / perBlock, MaxSlots: maxSlots, MaxTokens: 8192}
	d := open(b, m, o)
	add(row{name: "start, kernels compiled", ms: float64(time.Since(began).Microseconds()) / 1e3})
	shut(b, d)
	began = time.Now()
	d = open(b, m, o)
	add(row{name: "start, kernels cached", ms: float64(time.Since(began).Microseconds()) / 1e3, goal: 5000})
	defer shut(b, d)
	weights := 2 * readParameters(&m.Config)
	for _, c := range []struct {
		batch, context int
		goal           float64
	}{{1, 1024, 0.80}, {16, 1024, 1.05}, {64, 1024, 1.60}, {256, 2048, 6.2}} {
		step, gapUS := decodeBench(b, d, c.batch, c.context)
		floor := (weights + float64(c.batch*c.context*d.info.KVBytes(0, d.info.Layers))) / bytesPS * 1e3
		add(row{name: fmt.Sprintf("decode %d %d", c.batch, c.context), goal: c.goal, floorMS: floor, ms: step, note: fmt.Sprintf("gap %.1f µs", gapUS)})
	}
	for _, c := range []struct {
		tokens int
		goal   float64
	}{{2048, 9}, {8192, 38}, {32768, 260}} {
		n := float64(c.tokens)
		layers := readParameters(&m.Config) - float64(m.Config.Vocab*m.Config.Hidden)
		flops := 2*layers*n + 2*n*n*float64(m.Config.Layers*m.Config.Heads*m.Config.HeadSize)
		add(row{name: fmt.Sprintf("prefill %d", c.tokens), goal: c.goal, floorMS: flops / flopsPS * 1e3, ms: prefillBench(b, d, c.tokens)})
	}
	copyRows(b, d, add)
	loadRow(b, m, add)
	time.Sleep(8 * time.Second) // a node is asked for its clock when it has run for a while
	state, _ := d.Clock()
	add(row{name: "card's clock, bound in µs", goal: 1.5, ms: float64(state.Estimate.BoundNS()) / 1e3,
		note: fmt.Sprintf("exchange of %d ns, skew %d ± %d ppb, %d bursts, %d restarts", state.Estimate.RTTNS, state.Estimate.SkewPPB,
			state.Estimate.SkewErrPPB, state.Bursts, state.Restarts)})
	add(row{name: "events against stamps, % differ", ms: 100 * float64(state.Clashes) / float64(max(1, state.Pairs)),
		note: fmt.Sprintf("%d of %d by more than 1 %% and 2 µs", state.Clashes, state.Pairs)})
}

func rows8B(b *testing.B, bytesPS float64, add func(row)) {
	m := noiseModel(b, bench8B)
	const perBlock, maxSlots = 32, 64
	d := open(b, m, Options{TokensPerBlock: perBlock, KVBlocks: maxSlots * (2048 + 64) / perBlock, MaxSlots: maxSlots})
	defer shut(b, d)
	for _, c := range []struct {
		batch int
		goal  float64
	}{{1, 4.7}, {64, 9.8}} {
		step, gapUS := decodeBench(b, d, c.batch, 2048)
		floor := (2*readParameters(&m.Config) + float64(c.batch*2048*d.info.KVBytes(0, d.info.Layers))) / bytesPS * 1e3
		add(row{name: fmt.Sprintf("8 B: decode %d 2048", c.batch), goal: c.goal, floorMS: floor, ms: step, note: fmt.Sprintf("gap %.1f µs", gapUS)})
	}
}

// copyRows times the KV of 8,192 tokens from the card to the host and back.
func copyRows(b *testing.B, d *Backend, add func(row)) {
	const tokens = 8192
	var regions []backend.Region
	for i := range int32(tokens / d.info.TokensPerBlock) {
		regions = append(regions, backend.Region{Block: i, LayerTo: d.info.Layers, HeadTo: d.info.KVHeads, TokenTo: d.info.TokensPerBlock})
	}
	buf := make([]byte, tokens*d.info.KVBytes(0, d.info.Layers))
	for _, c := range []struct {
		name string
		copy func([]backend.Region, []byte) *backend.Copy
	}{{"KV of 8192 tokens to the host", d.CopyOut}, {"KV of 8192 tokens to the card", d.CopyIn}} {
		var times []float64
		for range 7 {
			k := c.copy(regions, buf)
			<-k.Done()
			if k.Err != nil {
				b.Fatal(k.Err)
			}
			times = append(times, float64(k.EndNS-k.StartNS)/1e6)
		}
		ms := median(times)
		add(row{name: c.name, ms: ms, note: fmt.Sprintf("%.1f GB/s", float64(len(buf))/ms/1e6)})
	}
}

// decodeBench gives the median time of a decode step on the card, and of the gap between steps that are queued one behind
// the other.
func decodeBench(b *testing.B, d *Backend, batch, context int) (stepMS, gapUS float64) {
	per := (context + 64 + d.info.TokensPerBlock - 1) / d.info.TokensPerBlock
	var times, gaps []float64
	for range 3 {
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
			if i >= 8 { // the first ones tune and capture
				times = append(times, float64(s.Stamps.SampleEndNS-s.Stamps.ForwardStartNS)/1e6)
				gaps = append(gaps, float64(s.Stamps.ForwardStartNS-queued[i-1].Stamps.SampleEndNS)/1e3)
			}
		}
	}
	return median(times), median(gaps)
}

func prefillBench(b *testing.B, d *Backend, n int) float64 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32((i*7919 + 13) % d.info.Vocab)
	}
	const chunk = 8192
	blocks := blocksFrom(0, (n+d.info.TokensPerBlock-1)/d.info.TokensPerBlock)
	var times []float64
	for i := range 6 {
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
	return median(times)
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// BenchmarkDecode is one decode step for a profiler: MERIDIAN_DECODE is "batch context".
func BenchmarkDecode(b *testing.B) {
	batch, context := 64, 1024
	if s := os.Getenv("MERIDIAN_DECODE"); s != "" {
		if _, err := fmt.Sscan(s, &batch, &context); err != nil {
			b.Fatalf("MERIDIAN_DECODE %q: want a batch and a context", s)
		}
	}
	d := open(b, noiseModel(b, bench1B), Options{KVBlocks: batch * (context + 96) / 32, MaxSlots: batch})
	defer shut(b, d)
	for b.Loop() {
		ms, gap := decodeBench(b, d, batch, context)
		b.ReportMetric(ms, "step-ms")
		b.ReportMetric(gap, "gap-us")
	}
}
