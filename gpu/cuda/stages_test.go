//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/pipeline"
	"meridian.internal/shared/infer"
)

// cardsHere is how many cards there are, of the first two.
func cardsHere(t testing.TB) int {
	t.Helper()
	c, err := openContext(1)
	if errors.Is(err, ErrUnavailable) {
		return 1
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := c.close(); err != nil {
		t.Fatal(err)
	}
	return 2
}

// openStages opens n stages, on two cards in turn where there are two.
func openStages(t testing.TB, m *model.Model, n int, o Options) *pipeline.Pipeline {
	t.Helper()
	cards := cardsHere(t)
	var stages []backend.Backend
	for i := range n {
		o.GPU, o.Stage = i%cards, backend.Stage{First: m.Config.Layers * i / n, End: m.Config.Layers * (i + 1) / n}
		stages = append(stages, open(t, m, o))
	}
	p, err := pipeline.New(stages...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestStepsThatFollowEachOtherThroughStagesDoNotMix has many steps of different sizes under way at the same time: each must
// give what it gives alone.
func TestStepsThatFollowEachOtherThroughStagesDoNotMix(t *testing.T) {
	m := randomModel(t, "Qwen3ForCausalLM", nil)
	o := Options{TokensPerBlock: 8, KVBlocks: 400, MaxSlots: 8, MaxTokens: 32, Deterministic: true}
	whole, staged := open(t, m, o), openStages(t, m, 3, o)
	defer shut(t, whole)
	defer shut(t, staged)
	random := rand.New(rand.NewPCG(3, 4))
	var batches []*backend.Batch
	for i := range 60 {
		e := backend.Entry{Slot: i % 8, Blocks: blocksFrom(i%8*50, 50)}
		for range 1 + random.IntN(90) { // also more than memory was set aside for
			e.Tokens = append(e.Tokens, random.Int32N(int32(m.Config.Vocab)))
		}
		e.Logits = []int{len(e.Tokens) - 1}
		batches = append(batches, &backend.Batch{Iter: int64(i), Assign: []backend.Assign{{Slot: i % 8, Sampling: infer.Sampling{}}}, Entries: []backend.Entry{e}})
	}
	var steps []*backend.Step
	for _, b := range batches {
		steps = append(steps, staged.Submit(b))
	}
	for i, s := range steps {
		<-s.Done()
		want := run(t, whole, batches[i])
		if s.Err != nil || s.Outputs[0].Tokens[0] != want.Outputs[0].Tokens[0] {
			t.Fatalf("step %d of %d tokens: %+v, %v; want %+v", i, len(batches[i].Entries[0].Tokens), s.Outputs, s.Err, want.Outputs)
		}
	}
}

func TestHiddenStatesOfOtherDevicesAreRefused(t *testing.T) {
	m := randomModel(t, "LlamaForCausalLM", nil)
	b := open(t, m, Options{TokensPerBlock: 8, KVBlocks: 128, Stage: backend.Stage{First: 1, End: 3}})
	defer shut(t, b)
	s := b.Submit(&backend.Batch{Entries: []backend.Entry{{Tokens: []int32{1}, Blocks: []int32{0}}}, Hidden: make(backend.HostHidden, m.Config.Hidden)})
	if <-s.Done(); s.Err == nil {
		t.Error("hidden states in the host's memory were taken")
	}
}

// BenchmarkStages compares decode and prefill of the 1.24 B shape on one device with two stages, which have two batches of half
// the size in flight, or three of a third, and times the way of hidden states between them.
func BenchmarkStages(b *testing.B) {
	m := noiseModel(b, bench1B)
	const per, sequences, context = 32, 64, 1024
	o := Options{TokensPerBlock: per, KVBlocks: sequences * (context + 128) / per, MaxSlots: sequences, MaxTokens: 8192}
	for _, n := range []int{1, 2} {
		b.Run(fmt.Sprintf("stages=%d/cards=%d", n, min(n, cardsHere(b))), func(b *testing.B) {
			p := openStages(b, m, n, o)
			defer shut(b, p)
			var tokens, more, prefills []float64
			for b.Loop() {
				tokens = append(tokens, decodeRate(b, p, n, sequences, context))
				more = append(more, decodeRate(b, p, n+1, sequences, context))
				prefills = append(prefills, prefillRate(b, p))
			}
			b.ReportMetric(median(tokens), "decoded/s")
			b.ReportMetric(median(more), "decoded/s-one-more-batch")
			b.ReportMetric(median(prefills), "prefilled/s")
		})
	}
	b.Run("hidden states of 2048 tokens", func(b *testing.B) { wayOfHidden(b, m, o) })
}

// decodeRate is how many tokens a second come of sequences that decode in as many batches as there are stages.
func decodeRate(b *testing.B, p backend.Backend, batches, sequences, context int) float64 {
	const steps = 96 // of each batch
	per := (context + 128) / p.Info().TokensPerBlock
	flying := make([]*backend.Step, batches)
	var from int64
	for i := range (steps + 1) * batches {
		k := i % batches
		if flying[k] != nil { // its tokens are known then
			if <-flying[k].Done(); flying[k].Err != nil {
				b.Fatal(flying[k].Err)
			}
		}
		if i == 8*batches { // the first ones tune and capture
			from = now()
		}
		next := &backend.Batch{Iter: int64(i)}
		for s := k; s < sequences; s += batches {
			if i < batches {
				next.Assign = append(next.Assign, backend.Assign{Slot: s})
			}
			next.Entries = append(next.Entries, backend.Entry{Slot: s, Tokens: []int32{int32(i + s)}, KVLen: context + i/batches, Blocks: blocksFrom(s*per, per), Logits: []int{0}})
		}
		flying[k] = p.Submit(next)
	}
	for _, s := range flying {
		<-s.Done()
	}
	return float64((steps-7)*sequences) / float64(now()-from) * 1e9
}

// prefillRate is how many tokens a second of 16 prompts of 2,048 are prefilled.
func prefillRate(b *testing.B, p backend.Backend) float64 {
	const prompts, length = 16, 2048
	blocks := length / p.Info().TokensPerBlock
	from := now()
	var steps []*backend.Step
	for i := range prompts {
		e := backend.Entry{Slot: i, Blocks: blocksFrom(i*blocks, blocks), Logits: []int{length - 1}}
		for j := range length {
			e.Tokens = append(e.Tokens, int32((i*31+j*7)%p.Info().Vocab))
		}
		steps = append(steps, p.Submit(&backend.Batch{Iter: int64(i), Assign: []backend.Assign{{Slot: i}}, Entries: []backend.Entry{e}}))
	}
	for _, s := range steps {
		if <-s.Done(); s.Err != nil {
			b.Fatal(s.Err)
		}
	}
	return prompts * length / float64(now()-from) * 1e9
}

// wayOfHidden times the copy from the card of the first stage to that of the second.
func wayOfHidden(b *testing.B, m *model.Model, o Options) {
	o.KVBlocks = 64
	for _, card := range []int{0, cardsHere(b) - 1} {
		o.GPU, o.Stage = card, backend.Stage{First: 15, End: 16}
		to := open(b, m, o)
		o.GPU, o.Stage = 0, backend.Stage{End: 1}
		from := open(b, m, o)
		e := backend.Entry{Tokens: make([]int32, 2048), Blocks: blocksFrom(0, 64)}
		h := run(b, from, &backend.Batch{Assign: []backend.Assign{{}}, Entries: []backend.Entry{e}}).Hidden
		var took []float64
		for range 20 {
			timed := make(chan float64, 1)
			if !to.pulls.Push(func(i *importer, err error) { timed <- copyTime(b, i, h.(*onCard), err) }) {
				b.Fatal(backend.ErrClosed)
			}
			took = append(took, <-timed)
		}
		ms := median(took)
		fmt.Printf("hidden states of 2,048 tokens from card 0 to card %d: %.3f ms, %.0f GB/s\n", card, ms, float64(4*h.Len())/ms/1e6)
		h.Release()
		shut(b, from)
		shut(b, to)
	}
}

// copyTime copies hidden states on the importer's stream, into its list of blocks.
func copyTime(b *testing.B, i *importer, h *onCard, err error) float64 {
	_, growErr := i.grow(&i.list, 4*h.n)
	err = firstOf(err, growErr)
	var took float64
	for range 2 { // the first one also makes the memory reachable
		from := now()
		d := &device{launcher: i.launcher, reached: map[uintptr]bool{}, hidden: i.list}
		err = firstOf(err, d.receive(h), i.wait())
		took = float64(now()-from) / 1e6
	}
	if err != nil {
		b.Error(err)
	}
	return took
}
