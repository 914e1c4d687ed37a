//go:build cuda

package cuda

import (
	"fmt"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// flights is how many steps may be queued on the card, one for each of backend.EventSets: the launcher gets one back when
// the finisher has read its events.
const flights = 2

// flight is a step on the card. The launcher fills it, then the finisher owns it until it gives it back.
type flight struct {
	*context
	batch   *backend.Batch
	step    *backend.Step
	err     error // the step was not queued
	index   int   // of its description among the device's
	meta    pinned
	there   event // recorded when the description is on the card
	results pinned
	lps     pinned
	hidden  *onCard           // what a stage that is not the last leaves for the next one
	marks   [3]event          // forward start, forward end, sample end
	events  *backend.EventSet // their times, once they have come to pass; nil: the step has none
	done    event
	layers  []event // recorded when KV of the layer is written; used ones come first
	used    int
	sentNS  int64 // steady clock, before the step was queued
	desc    struct{ rows, wanted int }
	tops    []int // by entry: log probabilities asked for, -1: none
}

func newFlight(c *context, index int) (*flight, error) {
	f := &flight{context: c, index: index}
	var err error
	for i := range f.marks {
		if f.marks[i], err = c.newTimer(); err != nil {
			return f, err
		}
	}
	if f.there, err = c.newEvent(); err != nil {
		return f, err
	}
	f.done, err = c.newEvent()
	return f, err
}

func (f *flight) close() error {
	errs := []error{}
	for _, e := range append(append(f.layers, f.done, f.there), f.marks[:]...) {
		if e != 0 {
			errs = append(errs, f.do("cuEventDestroy_v2", uintptr(e)))
		}
	}
	for _, p := range []*pinned{&f.meta, &f.results, &f.lps} {
		errs = append(errs, f.freePinned(p))
	}
	return firstOf(errs...)
}

// run queues a step and does not wait for it.
func (d *device) run(f *flight) error {
	b := f.batch
	f.sentNS, f.used, d.meta = d.now(), 0, &d.metas[f.index]
	if err := d.check(b); err != nil {
		return err
	}
	for _, a := range b.Assign {
		d.slots[a.Slot] = a.Sampling
	}
	d.desc.describe(b, d.slots, d.info.Windows, d.info.TokensPerBlock, d.kernels.has.tileRows(d.config.HeadSize))
	p := d.passOf(f)
	if err := d.reserve(p.rows, max(p.wanted, 1), p.entries); err != nil {
		return err
	}
	if d.desc.decode || p.rows == d.most {
		if err := d.tune(p.rows); err != nil {
			return err
		}
	}
	if err := d.send(f); err != nil {
		return err
	}
	if err := d.compute(f, p); err != nil {
		return err
	}
	return d.fetch(f)
}

// passOf is what to launch for the described step.
func (d *device) passOf(f *flight) pass {
	s := &d.desc
	p := pass{marks: &f.marks, rows: s.rows, wanted: s.wanted, entries: len(f.batch.Entries), untiled: s.untiled, tiles: s.tiles}
	if s.decode && s.rows <= maxGraphRows && s.rows > 0 && s.tiles == 0 {
		n := bucket(s.rows)
		p.rows, p.wanted, p.entries, p.untiled, p.graph = n, n, n, n, true
	} else {
		s.decode = false
	}
	if !d.samples() {
		p.wanted, p.entries = 0, 0 // they are the last stage's matter
	}
	p.splits = d.splits(p.rows, s.longest)
	f.desc.rows, f.desc.wanted = s.rows, s.wanted
	return p
}

// send copies the description to the card while the step before may still run, and the hidden states of the stage before.
func (d *device) send(f *flight) error {
	n := 4 * len(d.desc.words)
	if err := d.growPinned(&f.results, resultsHead+4*f.desc.wanted); err != nil {
		return err
	}
	d.desc.words[hResults], d.desc.words[hResultsHigh] = int32(uint32(f.results.at)), int32(f.results.at>>32)
	if err := d.growPinned(&f.meta, n+n/4); err != nil {
		return err
	}
	copy(f.meta.bytes(), view(d.desc.words))
	if err := firstOf(d.uploads.upload(d.meta.at, f.meta.at, n), d.uploads.record(f.there), d.follow(f.there)); err != nil {
		return err
	}
	if d.info.Stage.First == 0 {
		return nil
	}
	h, _ := f.batch.Hidden.(*onCard) // as check has seen
	return d.receive(h)
}

func (d *device) compute(f *flight, p pass) error {
	meta := uint64(d.meta.at)
	d.mark(&f.marks, 0)
	if n := d.desc.assigns; n > 0 && d.samples() {
		d.launch("assign", grid{x: n, threads: 256}, meta, number(d.desc.assignAt), uint64(d.counts), uint64(d.last))
	}
	for group, c := range d.desc.copies {
		if c.n > 0 {
			d.launch("copyBlocks", grid{x: 256, threads: 256}, uint64(d.kv[group]), number(d.info.GroupLayers(group)), meta+uint64(4*c.at), number(c.n))
		}
	}
	switch {
	case p.rows == 0:
		d.mark(&f.marks, 1)
		d.stamp(2)
	case d.desc.decode:
		d.keep(d.decode(p))
	default:
		if f.batch.LayerDone != nil {
			p.layerDone = func(int) error { return d.layerEvent(f) }
		}
		d.forward(p)
	}
	if d.err == nil {
		d.keep(d.record(f.marks[2]))
	}
	return d.taken()
}

// layerEvent marks that KV of one more layer is written.
func (d *device) layerEvent(f *flight) error {
	if f.used == len(f.layers) {
		e, err := d.newEvent()
		if err != nil {
			return err
		}
		f.layers = append(f.layers, e)
	}
	f.used++
	return d.record(f.layers[f.used-1])
}

// fetch queues the copies of the results to the host.
func (d *device) fetch(f *flight) error {
	n := f.desc.wanted
	f.tops = f.tops[:0]
	for i := range f.batch.Entries {
		s, top := &d.slots[f.batch.Entries[i].Slot], -1
		if s.Logprobs || s.TopLogprobs > 0 {
			top = s.TopLogprobs
		}
		f.tops = append(f.tops, top)
	}
	if d.desc.logprobs && d.samples() {
		if err := d.growPinned(&f.lps, logprobSize*n); err != nil {
			return err
		}
		if err := d.download(f.lps.at, d.logprobs.at, logprobSize*n); err != nil {
			return err
		}
	}
	if !d.samples() {
		var err error
		if f.hidden, err = d.leave(f.desc.rows); err != nil {
			return err
		}
	}
	return d.record(f.done)
}

// finish waits for a step and publishes it. It runs on the finisher's thread.
func (f *flight) finish(info backend.Info, clock *stamper) {
	defer f.step.Finish()
	if f.step.Err = f.err; f.err == nil {
		if err := f.await(info, clock); err != nil {
			f.step.Err = fmt.Errorf("step %d: %w", f.step.Iter, err)
		}
	}
	switch {
	case f.hidden == nil:
	case f.step.Err != nil:
		f.hidden.Release()
	default:
		f.step.Hidden = f.hidden
	}
	f.hidden = nil
	if f.events != nil { // also of a step that failed: else nobody may use the set again
		f.step.Stamps = f.events.Read()
	}
}

// await waits for a step that was queued and takes in its results.
func (f *flight) await(info backend.Info, clock *stamper) error {
	s, done := f.step, f.batch.LayerDone
	for i := range f.used {
		if err := f.waitEvent(f.layers[i]); err != nil {
			return err
		}
		done(info.Stage.First + i + 1)
	}
	if err := f.waitEvent(f.done); err != nil {
		return err
	}
	if done != nil && f.used == 0 {
		done(info.Stage.End)
	}
	raw := words[uint64](f.results.bytes()[:24])
	clock.mark(f.events, raw, f.sentNS)
	if err := f.compare(raw, clock.clock); err != nil {
		return err
	}
	s.Outputs = f.outputs(info.Stage.End == info.Layers)
	return nil
}

// compare holds the step's events against its stamps.
func (f *flight) compare(raw []uint64, clock *cardClock) error {
	for i := range 2 {
		ms, err := f.between(f.marks[i], f.marks[i+1])
		if err != nil {
			return err
		}
		clock.compare(int64(ms*1e6), int64(raw[i+1]-raw[i]))
	}
	return nil
}

// outputs sorts the tokens by entry. A position at which no token may be chosen ends its entry's list.
func (f *flight) outputs(samples bool) []backend.Output {
	out := make([]backend.Output, len(f.batch.Entries))
	if !samples {
		return out
	}
	tokens, at := words[int32](f.results.bytes()[resultsHead:]), 0
	for i := range out {
		for j := range f.batch.Entries[i].Logits {
			token := tokens[at+j]
			if token < 0 {
				break
			}
			out[i].Tokens = append(out[i].Tokens, token)
			if f.tops[i] >= 0 {
				out[i].Logprobs = append(out[i].Logprobs, f.logprob(at+j, f.tops[i]))
			}
		}
		at += len(f.batch.Entries[i].Logits)
	}
	return out
}

func (f *flight) logprob(wanted, top int) backend.Logprobs {
	raw := f.lps.bytes()[wanted*logprobSize : (wanted+1)*logprobSize]
	ids, values := words[int32](raw), words[float32](raw)
	l := backend.Logprobs{Logprob: values[1]}
	for n := 1; n <= top && ids[2*n] >= 0; n++ {
		l.Top = append(l.Top, infer.Logprob{Token: ids[2*n], Logprob: values[2*n+1]})
	}
	return l
}
