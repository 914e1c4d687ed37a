package backendtest

import (
	"slices"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

func feedback(d *driver) {
	p := d.prompt(20, 1)
	want := d.generate(d.newSeq(0, p, 40, infer.Sampling{}), 8)

	s := d.newSeq(1, p, 40, infer.Sampling{})
	steps := []*backend.Step{d.b.Submit(d.batch([]backend.Assign{s.assign()}, s.part(len(p))))}
	for i := range 7 { // all submitted before the first is waited for
		e := backend.Entry{Slot: 1, KVLen: len(p) + i, Blocks: s.blocks, Windows: s.windows, Logits: []int{0}}
		steps = append(steps, d.b.Submit(d.batch(nil, e)))
	}
	var got []int32
	for _, step := range steps {
		d.wait(step.Done())
		d.good(step)
		got = append(got, d.one(step.Outputs[0]))
	}
	d.same("fed back", got, want)
}

func chunks(d *driver) {
	p := d.prompt(61, 2)
	want := d.generate(d.newSeq(0, p, 80, infer.Sampling{}), 6)
	for i, sizes := range [][]int{{1}, {60}, {7, 16, 1, 20}, {d.info.TokensPerBlock}, {3, d.info.TokensPerBlock}} {
		s := d.newSeq(i%d.info.MaxSlots, p, 80, infer.Sampling{})
		d.prefill(s, sizes...)
		d.decode(s, 5)
		d.same("in chunks", s.tokens[len(p):], want)
	}
}

func company(d *driver) {
	lengths := []int{1, 33, 7, 50}
	want := make([][]int32, len(lengths))
	for i, n := range lengths {
		want[i] = d.generate(d.newSeq(0, d.prompt(n, i), 64, infer.Sampling{}), 6)
	}
	var seqs []*seq
	var assign []backend.Assign
	for i := range lengths {
		i = len(lengths) - 1 - i
		s := d.newSeq(2*i+1, d.prompt(lengths[i], i), 64, infer.Sampling{})
		seqs, assign = append(seqs, s), append(assign, s.assign())
	}
	for range 8 { // the first sequence prefills in three chunks while others decode
		var entries []backend.Entry
		for i, s := range seqs {
			n := len(s.tokens) - s.kv
			if i == 0 {
				n = min(n, 20)
			}
			entries = append(entries, s.part(n))
		}
		out := d.run(d.batch(assign, entries...)).Outputs
		assign = nil
		for i, s := range seqs {
			s.tokens = append(s.tokens, out[i].Tokens...)
		}
	}
	for i, s := range seqs {
		i = len(lengths) - 1 - i
		d.same("together", s.tokens[lengths[i]:lengths[i]+6], want[i])
	}
}

func positions(d *driver) {
	p := d.prompt(24, 3)
	var want []int32
	at := []int{0, 5, 6, 23}
	for _, i := range at {
		want = append(want, d.prefill(d.newSeq(0, p[:i+1], 24, infer.Sampling{})))
	}
	s := d.newSeq(1, p, 24, infer.Sampling{})
	e := s.part(len(p))
	e.Logits = at
	out := d.run(d.batch([]backend.Assign{s.assign()}, e)).Outputs[0]
	d.same("together", out.Tokens, want)
}

func noPositions(d *driver) {
	s := d.newSeq(0, d.prompt(9, 1), 16, infer.Sampling{Logprobs: true})
	e := s.part(9)
	e.Logits = nil
	if out := d.run(d.batch([]backend.Assign{s.assign()}, e)).Outputs; len(out) != 1 || len(out[0].Tokens) != 0 || len(out[0].Logprobs) != 0 {
		d.t.Errorf("outputs %+v, want one empty", out)
	}
}

func truncate(d *driver) {
	p := d.prompt(30, 4)
	want := d.generate(d.newSeq(0, p, 64, infer.Sampling{}), 5)
	s := d.newSeq(1, p, 64, infer.Sampling{})
	d.prefill(s)
	s.tokens = append(s.tokens[:len(p)], d.prompt(9, 77)...) // tokens that turn out wrong
	d.run(d.batch(nil, s.part(9)))
	s.tokens, s.kv = s.tokens[:len(p)], len(p)-1
	d.prefill(s)
	d.decode(s, 4)
	d.same("after taking tokens back", s.tokens[len(p):], want)
}

func masks(d *driver) {
	p := d.prompt(12, 5)
	mask := make([]uint32, (d.info.Vocab+31)/32)
	mask[1] = 1<<3 | 1<<9 // tokens 35 and 41
	for slot, sampling := range []infer.Sampling{{}, {Temperature: 2, Seed: 9}} {
		s := d.newSeq(slot, p, 16, sampling)
		e := s.part(len(p))
		e.Logits, e.Mask = []int{0, 3, 7, 11}, mask
		out := d.run(d.batch([]backend.Assign{s.assign()}, e)).Outputs[0]
		if len(out.Tokens) != 4 {
			d.t.Fatalf("%d tokens, want 4", len(out.Tokens))
		}
		for _, tok := range out.Tokens {
			if tok != 35 && tok != 41 {
				d.t.Errorf("token %d is not allowed", tok)
			}
		}
	}
	free := d.newSeq(2, p, 16, infer.Sampling{})
	want := d.prefill(free)
	s := d.newSeq(3, p, 16, infer.Sampling{})
	e := s.part(len(p))
	e.Mask = slices.Repeat([]uint32{1<<32 - 1}, len(mask))
	d.same("under a full mask", d.run(d.batch([]backend.Assign{s.assign()}, e)).Outputs[0].Tokens, []int32{want})
}

func emptyMask(d *driver) {
	a, b := d.newSeq(0, d.prompt(6, 6), 16, infer.Sampling{}), d.newSeq(1, d.prompt(6, 7), 16, infer.Sampling{})
	want := d.prefill(d.newSeq(2, d.prompt(6, 7), 16, infer.Sampling{}))
	ea, eb := a.part(6), b.part(6)
	ea.Mask = make([]uint32, (d.info.Vocab+31)/32)
	out := d.run(d.batch([]backend.Assign{a.assign(), b.assign()}, ea, eb)).Outputs
	if len(out[0].Tokens) != 0 {
		d.t.Errorf("tokens %v sampled though none is allowed", out[0].Tokens)
	}
	d.same("the other sequence", out[1].Tokens, []int32{want})
}

func seeds(d *driver) {
	p := d.prompt(17, 8)
	sampling := infer.Sampling{Temperature: 3, TopP: 0.95, Seed: 42}
	want := d.generate(d.newSeq(0, p, 32, sampling), 8)
	s := d.newSeq(5, p, 32, sampling)
	d.prefill(s, 4, 9)
	other := d.newSeq(6, d.prompt(3, 9), 32, infer.Sampling{Temperature: 1, Seed: 1})
	d.prefill(other)
	for range 7 {
		out := d.run(d.batch(nil, other.part(1), s.part(1))).Outputs
		other.tokens, s.tokens = append(other.tokens, d.one(out[0])), append(s.tokens, d.one(out[1]))
	}
	d.same("same seed", s.tokens[len(p):], want)
}

func penalties(d *driver) {
	p := d.prompt(15, 10)
	sampling := infer.Sampling{RepetitionPenalty: 1.5, PresencePenalty: 1, FrequencyPenalty: 2}
	whole := d.newSeq(0, p, 40, sampling)
	want := slices.Clone(d.generate(whole, 12))
	// The same sequence after its slot was lost: recomputed from prompt and output, history included.
	s := d.newSeq(1, append(slices.Clone(p), want[:5]...), 40, sampling)
	a := s.assign()
	a.PromptLen = len(p)
	s.tokens = append(s.tokens, d.one(d.run(d.batch([]backend.Assign{a}, s.part(len(s.tokens)))).Outputs[0]))
	d.decode(s, 6)
	d.same("resumed", s.tokens[len(p):], want)
	seen := map[int32]int{}
	for _, tok := range want {
		seen[tok]++
	}
	bare := d.generate(d.newSeq(2, p, 40, infer.Sampling{FrequencyPenalty: 1000}), 12)
	slices.Sort(bare)
	if len(slices.Compact(bare)) != 12 {
		d.t.Errorf("a frequency penalty of 1000 lets tokens repeat: %v", bare)
	}
}

func logprobs(d *driver) {
	p := d.prompt(10, 11)
	want := d.prefill(d.newSeq(0, p, 16, infer.Sampling{}))
	s := d.newSeq(1, p, 16, infer.Sampling{Logprobs: true, TopLogprobs: 4})
	e := s.part(len(p))
	e.Logits = []int{2, 9}
	out := d.run(d.batch([]backend.Assign{s.assign()}, e)).Outputs[0]
	if len(out.Tokens) != 2 || len(out.Logprobs) != 2 {
		d.t.Fatalf("%d tokens, %d logprobs, want 2 of each", len(out.Tokens), len(out.Logprobs))
	}
	for i, lp := range out.Logprobs {
		if len(lp.Top) != 4 || lp.Top[0].Token != out.Tokens[i] || lp.Top[0].Logprob != lp.Logprob || lp.Logprob > 0 {
			d.t.Errorf("greedy token %d has %+v", out.Tokens[i], lp)
		}
		if !slices.IsSortedFunc(lp.Top, func(a, b infer.Logprob) int { return compare(b.Logprob, a.Logprob) }) {
			d.t.Errorf("top logprobs %v are not sorted", lp.Top)
		}
	}
	d.same("with logprobs", out.Tokens[1:], []int32{want})
}

func compare(a, b float32) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func reuseSlot(d *driver) {
	p := d.prompt(14, 12)
	want := d.generate(d.newSeq(0, p, 32, infer.Sampling{}), 6)
	d.generate(d.newSeq(3, d.prompt(25, 13), 40, infer.Sampling{RepetitionPenalty: 3, Temperature: 2, Seed: 4}), 6)
	d.same("in a used slot", d.generate(d.newSeq(3, p, 32, infer.Sampling{}), 6), want)
}

func stages(t *testing.T, o Options) {
	whole := newDriver(t, o.Open(t, backend.Stage{}))
	if whole.info.Layers < 2 {
		t.Skip("one layer cannot be split")
	}
	cut := whole.info.Layers / 2
	first := newDriver(t, o.Open(t, backend.Stage{End: cut}))
	second := newDriver(t, o.Open(t, backend.Stage{First: cut, End: whole.info.Layers}))
	p := whole.prompt(30, 14)
	want := whole.generate(whole.newSeq(0, p, 48, infer.Sampling{}), 5)

	a, b := first.newSeq(0, p, 48, infer.Sampling{}), second.newSeq(0, p, 48, infer.Sampling{})
	assign := []backend.Assign{a.assign()}
	for _, n := range []int{13, 17, 1, 1, 1, 1} {
		ea, eb := a.part(n), b.part(n)
		up := first.run(first.batch(assign, ea))
		if up.Hidden == nil || up.Hidden.Len() != n*first.info.Hidden || len(up.Outputs) > 0 && len(up.Outputs[0].Tokens) > 0 {
			t.Fatalf("the first stage gave %v for %d rows of %d, outputs %v", up.Hidden, n, first.info.Hidden, up.Outputs)
		}
		down := second.batch(assign, eb)
		down.Hidden, assign = up.Hidden, nil
		out := second.run(down).Outputs[0]
		up.Hidden.Release()
		if len(eb.Logits) > 0 {
			tok := second.one(out)
			a.tokens, b.tokens = append(a.tokens, tok), append(b.tokens, tok)
		}
	}
	whole.same("over two stages", a.tokens[len(p):], want)
}
