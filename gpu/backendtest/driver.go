package backendtest

import (
	"slices"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// patience is the longest that any step of the suite may take; it is no measurement.
const patience = time.Minute

// driver does by hand what the executor does.
type driver struct {
	t      testing.TB
	b      backend.Backend
	info   backend.Info
	iter   int64
	blocks []int32 // not handed out yet
	close  func()  // once
}

func newDriver(t testing.TB, b backend.Backend) *driver {
	t.Helper()
	d := &driver{t: t, b: b, info: b.Info()}
	d.close = sync.OnceFunc(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	t.Cleanup(d.close)
	n := d.info.KVBlocks
	for _, w := range d.info.Windows {
		n = min(n, w.Blocks)
	}
	stride := 7 // block tables that are not in order
	for n%stride == 0 {
		stride += 2
	}
	for i := range n {
		d.blocks = append(d.blocks, int32(i*stride%n))
	}
	return d
}

// seq is one sequence. Its block numbers are the same in all groups of layers.
type seq struct {
	slot     int
	tokens   []int32
	kv       int
	blocks   []int32
	windows  [][]int32 // of blocks, once a window
	sampling infer.Sampling
}

// newSeq takes blocks for max tokens.
func (d *driver) newSeq(slot int, prompt []int32, max int, sampling infer.Sampling) *seq {
	d.t.Helper()
	n := (max + d.info.TokensPerBlock - 1) / d.info.TokensPerBlock
	if n > len(d.blocks) {
		d.t.Fatalf("%d blocks are too few for this test", d.info.KVBlocks)
	}
	s := &seq{slot: slot, tokens: slices.Clone(prompt), sampling: sampling, blocks: d.blocks[:n:n]}
	d.blocks = d.blocks[n:]
	s.share(len(d.info.Windows))
	return s
}

// share makes the tables of all windows the sequence's own.
func (s *seq) share(windows int) { s.windows = slices.Repeat([][]int32{s.blocks}, windows) }

func (s *seq) assign() backend.Assign {
	a := backend.Assign{Slot: s.slot, Sampling: s.sampling}
	if s.sampling.Penalized() {
		a.History, a.PromptLen = slices.Clone(s.tokens), len(s.tokens)
	}
	return a
}

// part is the next n known tokens of the sequence; the last one's logits are wanted if it is the newest token.
func (s *seq) part(n int) backend.Entry {
	e := backend.Entry{Slot: s.slot, Tokens: s.tokens[s.kv : s.kv+n], KVLen: s.kv, Blocks: s.blocks, Windows: s.windows}
	s.kv += n
	if s.kv == len(s.tokens) {
		e.Logits = []int{n - 1}
	}
	return e
}

func (d *driver) batch(assign []backend.Assign, entries ...backend.Entry) *backend.Batch {
	d.iter++
	return &backend.Batch{Iter: d.iter, Assign: assign, Entries: entries}
}

// run submits a batch and waits for it.
func (d *driver) run(b *backend.Batch) *backend.Step {
	d.t.Helper()
	step := d.b.Submit(b)
	d.wait(step.Done())
	d.good(step)
	return step
}

func (d *driver) good(step *backend.Step) {
	d.t.Helper()
	if step.Err != nil {
		d.t.Fatalf("step %d: %v", step.Iter, step.Err)
	}
}

func (d *driver) wait(done <-chan struct{}) {
	d.t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		d.t.Fatal("the device does not answer")
	}
}

// prefill runs the prompt in chunks of the given sizes, the rest in one, and returns the token that follows.
func (d *driver) prefill(s *seq, sizes ...int) int32 {
	d.t.Helper()
	assign := []backend.Assign{s.assign()}
	for _, n := range append(sizes, len(s.tokens)) {
		if n = min(n, len(s.tokens)-s.kv); n == 0 {
			break
		}
		out := d.run(d.batch(assign, s.part(n))).Outputs
		assign = nil
		if s.kv == len(s.tokens) {
			s.tokens = append(s.tokens, d.one(out[0]))
		}
	}
	return s.tokens[len(s.tokens)-1]
}

func (d *driver) one(o backend.Output) int32 {
	d.t.Helper()
	if len(o.Tokens) != 1 {
		d.t.Fatalf("%d tokens sampled, want 1", len(o.Tokens))
	}
	return o.Tokens[0]
}

// decode runs n steps with tokens that the host gives.
func (d *driver) decode(s *seq, n int) {
	d.t.Helper()
	for range n {
		s.tokens = append(s.tokens, d.one(d.run(d.batch(nil, s.part(1))).Outputs[0]))
	}
}

// generate is prefill in one chunk and n tokens, the first included.
func (d *driver) generate(s *seq, n int) []int32 {
	d.t.Helper()
	d.prefill(s)
	d.decode(s, n-1)
	return s.tokens[len(s.tokens)-n:]
}

// prompt makes n tokens.
func (d *driver) prompt(n, seed int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32((i*i*31 + i*17 + seed*101 + 5) % min(d.info.Vocab, 500))
	}
	return p
}

func (d *driver) same(what string, got, want []int32) {
	d.t.Helper()
	if !slices.Equal(got, want) {
		d.t.Errorf("%s: tokens %v, want %v", what, got, want)
	}
}

// region is a whole block of the first layers that are of one group, mostly all.
func (d *driver) region(block int32) backend.Region { return d.whole(block)[0] }

// whole is a whole block of all layers.
func (d *driver) whole(block int32) []backend.Region {
	var r []backend.Region
	for from := d.info.Stage.First; from < d.info.Stage.End; {
		_, end := d.info.Run(from, d.info.Stage.End)
		r = append(r, backend.Region{Block: block, LayerFrom: from, LayerTo: end, HeadTo: d.info.KVHeads, TokenTo: d.info.TokensPerBlock})
		from = end
	}
	return r
}

func (d *driver) regions(blocks []int32) []backend.Region {
	var r []backend.Region
	for _, b := range blocks {
		r = append(r, d.whole(b)...)
	}
	return r
}

func (d *driver) bytes(regions ...backend.Region) int {
	n := 0
	for _, r := range regions {
		n += (r.LayerTo - r.LayerFrom) * 2 * (r.TokenTo - r.TokenFrom) * (r.HeadTo - r.HeadFrom) * d.info.HeadSize * backend.ElementSize(d.info.KVType)
	}
	return n
}

func (d *driver) copyOut(regions ...backend.Region) []byte {
	d.t.Helper()
	buf := make([]byte, d.bytes(regions...))
	d.copied(d.b.CopyOut(regions, buf))
	return buf
}

func (d *driver) copied(c *backend.Copy) {
	d.t.Helper()
	d.wait(c.Done())
	if c.Err != nil {
		d.t.Fatalf("copy: %v", c.Err)
	}
}
