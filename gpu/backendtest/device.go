package backendtest

import (
	"bytes"
	"slices"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

func moveKV(d *driver) {
	p := d.prompt(2*d.info.TokensPerBlock+5, 20)
	want := d.generate(d.newSeq(0, p, len(p)+16, infer.Sampling{}), 6)
	from := d.newSeq(1, p, len(p)+16, infer.Sampling{})
	first := d.prefill(from)
	to := d.newSeq(2, p, len(p)+16, infer.Sampling{})
	n := (len(p) + d.info.TokensPerBlock - 1) / d.info.TokensPerBlock
	data := d.copyOut(d.regions(from.blocks[:n])...)
	d.copied(d.b.CopyIn(d.regions(to.blocks[:n]), data))
	if !bytes.Equal(d.copyOut(d.regions(to.blocks[:n])...), data) {
		d.t.Error("what was copied in is not what comes out")
	}
	to.tokens, to.kv = append(to.tokens, first), len(p)
	e := to.part(1)
	to.tokens = append(to.tokens, d.one(d.run(d.batch([]backend.Assign{to.assign()}, e)).Outputs[0]))
	d.decode(to, 4)
	d.same("on moved KV", to.tokens[len(p):], want)
}

// layout cuts a block along each axis and puts the parts where the canonical layout has them.
func layout(d *driver) {
	s := d.newSeq(0, d.prompt(d.info.TokensPerBlock, 21), d.info.TokensPerBlock, infer.Sampling{})
	d.prefill(s)
	whole := d.region(s.blocks[0])
	data := d.copyOut(whole)
	layers, tokens, heads := whole.LayerTo-whole.LayerFrom, whole.TokenTo, whole.HeadTo
	head := d.info.HeadSize * backend.ElementSize(d.info.KVType)
	for layer := range layers {
		for token := range tokens {
			for h := range heads {
				r := backend.Region{
					Block: s.blocks[0], LayerFrom: whole.LayerFrom + layer, LayerTo: whole.LayerFrom + layer + 1,
					HeadFrom: h, HeadTo: h + 1, TokenFrom: token, TokenTo: token + 1,
				}
				got := d.copyOut(r)
				for kv := range 2 {
					at := (((layer*2+kv)*tokens+token)*heads + h) * head
					if !bytes.Equal(got[kv*head:(kv+1)*head], data[at:at+head]) {
						d.t.Fatalf("%+v, K/V %d is not at byte %d of the block", r, kv, at)
					}
				}
			}
		}
	}
	target := d.newSeq(1, nil, d.info.TokensPerBlock, infer.Sampling{}).blocks[0]
	var parts []backend.Region
	for h := range heads { // in by heads and two token ranges
		for _, cut := range [][2]int{{0, tokens / 2}, {tokens / 2, tokens}} {
			if cut[0] < cut[1] {
				r := whole
				r.HeadFrom, r.HeadTo, r.TokenFrom, r.TokenTo = h, h+1, cut[0], cut[1]
				parts = append(parts, r)
			}
		}
	}
	bytesOut := d.copyOut(parts...)
	for i := range parts {
		parts[i].Block = target
	}
	d.copied(d.b.CopyIn(parts, bytesOut))
	if !bytes.Equal(d.copyOut(d.region(target)), data) {
		d.t.Error("a block put together from parts differs")
	}
}

func blockCopy(d *driver) {
	p := d.prompt(d.info.TokensPerBlock+3, 22)
	want := d.generate(d.newSeq(0, p, len(p)+16, infer.Sampling{}), 6)
	from := d.newSeq(1, p, len(p)+16, infer.Sampling{})
	first := d.prefill(from)
	fork := d.newSeq(2, p, len(p)+16, infer.Sampling{})
	fork.blocks = append([]int32{from.blocks[0]}, fork.blocks[1:]...) // the full block is shared, the other one copied
	fork.share(len(d.info.Windows))
	fork.tokens, fork.kv = append(fork.tokens, first), len(p)
	b := d.batch([]backend.Assign{fork.assign()}, fork.part(1))
	for group := range 1 + len(d.info.Windows) {
		b.Copies = append(b.Copies, backend.BlockCopy{From: from.blocks[1], To: fork.blocks[1], Group: group})
	}
	fork.tokens = append(fork.tokens, d.one(d.run(b).Outputs[0]))
	d.decode(fork, 4)
	d.same("on a copied block", fork.tokens[len(p):], want)
	d.decode(from, 5)
	d.same("on the original", from.tokens[len(p):], want)
}

func layerDone(d *driver) {
	s := d.newSeq(0, d.prompt(9, 23), 16, infer.Sampling{})
	b := d.batch([]backend.Assign{s.assign()}, s.part(9))
	var mu sync.Mutex // guards ends and late
	var ends []int
	var step *backend.Step
	late := false
	started := make(chan struct{})
	b.LayerDone = func(end int) {
		<-started
		mu.Lock()
		defer mu.Unlock()
		ends = append(ends, end)
		select {
		case <-step.Done():
			late = true
		default:
		}
	}
	step = d.b.Submit(b)
	close(started)
	d.wait(step.Done())
	d.good(step)
	mu.Lock()
	defer mu.Unlock()
	if len(ends) == 0 || ends[len(ends)-1] != d.info.Stage.End || !slices.IsSorted(ends) || ends[0] <= d.info.Stage.First || late {
		d.t.Errorf("LayerDone came with %v, after the step: %v; the stage ends at %d", ends, late, d.info.Stage.End)
	}
}

// hold submits a step whose forward stands still until release is called: LayerDone may not block, so nothing else
// shows as surely that the device is busy.
func (d *driver) hold(s *seq) (step *backend.Step, held <-chan struct{}, release func()) {
	reached, gate := make(chan struct{}), make(chan struct{})
	b := d.batch([]backend.Assign{s.assign()}, s.part(len(s.tokens)))
	var once sync.Once
	b.LayerDone = func(int) {
		once.Do(func() { close(reached) })
		<-gate
	}
	return d.b.Submit(b), reached, sync.OnceFunc(func() { close(gate) })
}

func submitReturns(d *driver) {
	s := d.newSeq(0, d.prompt(9, 24), 32, infer.Sampling{})
	held, reached, release := d.hold(s)
	defer release()
	d.wait(reached)
	var steps []*backend.Step
	submitted := make(chan struct{})
	go func() {
		defer close(submitted)
		for i := range 4 {
			steps = append(steps, d.b.Submit(d.batch(nil, backend.Entry{Slot: 0, KVLen: 9 + i, Blocks: s.blocks, Windows: s.windows, Logits: []int{0}})))
		}
	}()
	d.wait(submitted)
	for _, step := range append(steps, held) {
		select {
		case <-step.Done():
			d.t.Fatalf("step %d is done though the device stands still", step.Iter)
		default:
		}
	}
	release()
	d.wait(held.Done())
	for _, step := range steps {
		d.wait(step.Done())
		d.good(step)
		d.one(step.Outputs[0])
	}
}

func copyBeside(d *driver) {
	ready := d.newSeq(0, d.prompt(9, 25), 16, infer.Sampling{})
	d.prefill(ready)
	held, reached, release := d.hold(d.newSeq(1, d.prompt(9, 26), 16, infer.Sampling{}))
	defer release()
	d.wait(reached)
	other := d.newSeq(2, nil, 16, infer.Sampling{})
	data := d.copyOut(d.region(ready.blocks[0]))
	d.copied(d.b.CopyIn([]backend.Region{d.region(other.blocks[0])}, data))
	release()
	d.wait(held.Done())
}

func order(d *driver) {
	s := d.newSeq(0, d.prompt(9, 27), 64, infer.Sampling{})
	steps := []*backend.Step{d.b.Submit(d.batch([]backend.Assign{s.assign()}, s.part(9)))}
	for i := range 20 {
		steps = append(steps, d.b.Submit(d.batch(nil, backend.Entry{Slot: 0, KVLen: 9 + i, Blocks: s.blocks, Windows: s.windows, Logits: []int{0}})))
	}
	d.wait(steps[20].Done())
	end := int64(0)
	for i, step := range steps {
		select {
		case <-step.Done():
		default:
			d.t.Fatalf("step %d is not done though a later one is", step.Iter)
		}
		d.good(step)
		if st := step.Stamps; step.Iter != int64(i+1) || st.ForwardStartNS < end || st.ForwardEndNS < st.ForwardStartNS || st.SampleEndNS < st.ForwardEndNS {
			d.t.Errorf("step %d has iter %d, stamps %+v; the step before ended at %d", i+1, step.Iter, st, end)
		}
		end = step.Stamps.SampleEndNS
	}
}

func closeDrains(d *driver) {
	s := d.newSeq(0, d.prompt(9, 28), 64, infer.Sampling{})
	step := d.b.Submit(d.batch([]backend.Assign{s.assign()}, s.part(9)))
	other := d.region(d.newSeq(1, nil, 1, infer.Sampling{}).blocks[0]) // not the block that the step writes
	c := d.b.CopyOut([]backend.Region{other}, make([]byte, d.bytes(other)))
	d.close()
	for _, done := range []<-chan struct{}{step.Done(), c.Done()} {
		select {
		case <-done:
		default:
			d.t.Fatal("Close returned before queued work had ended")
		}
	}
	d.good(step)
}
