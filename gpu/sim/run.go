package sim

import (
	"fmt"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sample"
)

// runner is the device's side: it owns the slots and the timeline.
type runner struct {
	*Device
	sleep   func(time.Duration)
	slots   []slot
	events  backend.EventSets
	free    int64 // the timeline: when the last step ended
	scratch sample.Scratch
	rows    []uint64  // state of each query token of the step
	logits  []float32 // (vocab)
}

type slot struct {
	last  int32 // the last sampled token
	state sample.State
	plain bool // greedy, without anything that looks at more than the largest logit
}

func newRunner(d *Device, sleep func(time.Duration)) *runner {
	return &runner{Device: d, sleep: sleep, slots: make([]slot, d.cfg.MaxSlots)}
}

func (r *runner) run() {
	for s, ok := r.Steps.Pop(); ok; s, ok = r.Steps.Pop() {
		r.step(s.Batch, s.Step, s.AtNS)
		s.Step.Finish()
	}
}

// step runs a step that was submitted at some time: it starts then or when the one before it has ended, whenever this goroutine
// came to know of either.
func (r *runner) step(b *backend.Batch, step *backend.Step, at int64) {
	if step.Err = r.check(b); step.Err != nil {
		return
	}
	events, err := r.events.Take(b.Iter)
	if step.Err = err; err != nil {
		return
	}
	start := max(at, r.free)
	cost := r.cost(b)
	r.free = start + cost
	r.begin(b)
	layers := int64(r.cfg.Stage.End - r.cfg.Stage.First)
	for layer := r.cfg.Stage.First; layer < r.cfg.Stage.End; layer++ {
		r.layer(b, layer)
		if b.LayerDone != nil {
			r.sleepUntil(start + cost*int64(layer+1-r.cfg.Stage.First)/layers)
			b.LayerDone(layer + 1)
		}
	}
	r.end(b, step)
	if cost == 0 {
		r.free = r.cfg.Now() // no model of time: what the work above really took
	}
	r.sleepUntil(r.free)
	// The stamps are those of the device's own timeline, on which a late wake-up of this goroutine costs nothing. Choosing
	// a token takes no time there.
	for _, at := range [...]int64{start, r.free, r.free} {
		events.Mark(at)
	}
	step.Stamps = events.Read()
}

func (r *runner) sleepUntil(at int64) {
	if d := at - r.cfg.Now(); d > 0 {
		r.sleep(time.Duration(d))
	}
}

func (r *runner) cost(b *backend.Batch) int64 {
	c := &r.cfg.Cost
	ns := c.Step
	for i := range b.Entries {
		e := &b.Entries[i]
		if q := e.Queries(); q > 1 {
			ns += c.PrefillToken * float64(q)
		} else {
			ns += c.Decode
		}
		ns += c.KVToken * float64(e.KVLen)
	}
	return int64(ns)
}

// check refuses what a real device would answer with a fault.
func (r *runner) check(b *backend.Batch) error {
	if r.cfg.Fail != nil {
		if err := r.cfg.Fail(b.Iter); err != nil {
			return err
		}
	}
	for _, a := range b.Assign {
		if !within(a.Slot, a.Slot+1, 0, len(r.slots)) {
			return fmt.Errorf("sim: step %d assigns slot %d of %d", b.Iter, a.Slot, len(r.slots))
		}
	}
	rows, info := 0, r.Info()
	for i := range b.Entries {
		if err := b.Entries[i].Check(&info); err != nil {
			return fmt.Errorf("sim: step %d, entry %d: %w", b.Iter, i, err)
		}
		rows += b.Entries[i].Queries()
	}
	if _, err := backend.HiddenOf[backend.HostHidden](b, &info, rows); err != nil {
		return fmt.Errorf("sim: step %d: %w", b.Iter, err)
	}
	return nil
}
