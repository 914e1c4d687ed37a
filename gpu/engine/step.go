package engine

import (
	"fmt"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
)

// flight is a submitted step with the buffers that it needs; they are reused when it has been collected.
type flight struct {
	items   []sched.Item
	batch   backend.Batch
	step    *backend.Step
	logits  []int
	windows [][]int32 // block tables of the entries
	exports []written
	builtNS int64
	tokens  int // that are queries
	counts  Batch
	traced  traced
	logged  bool // in the log of steps
	// synthetic: an iteration in which other ranks run something and this one nothing
	synthetic bool
}

// written is an entry whose KV a transfer waits for.
type written struct {
	export             *Export
	tokenFrom, tokenTo int
}

// submit plans a step and gives it to the device; false if there is nothing to run now.
func (e *Engine) submit() bool {
	if !e.mayBuild() {
		return false
	}
	f := e.idle[len(e.idle)-1]
	planNS := int64(0)
	if e.prof.Planning() {
		planNS = e.cfg.Now()
	}
	items, preempted := e.sched.Next(f.items[:0])
	f.items = items
	now := e.cfg.Now()
	for _, q := range preempted {
		s := q.Data.(*Sequence)
		s.preemptedNS = now
		s.report.Preemptions++
		e.interval.Preempted++
	}
	if len(items) == 0 && e.cfg.Peers == nil {
		return false
	}
	e.idle = e.idle[:len(e.idle)-1]
	e.iter++
	f.builtNS = now
	e.built(len(items))
	e.build(f)
	e.countBatch(f)
	e.trace(f, planNS)
	if f.synthetic = len(items) == 0; f.synthetic {
		f.step = backend.NewStep(e.iter)
		f.step.Finish()
	} else {
		e.meter.wakes()
		if len(e.flights) == 0 {
			e.watch.begins(f, now)
		}
		e.submitting = f
		call := e.watch.enter()
		step := e.b.Submit(&f.batch)
		e.watch.leave(call)
		e.submitting, f.step = nil, step
	}
	if f.traced.on {
		f.traced.submitNS = e.cfg.Now()
	}
	e.flights = append(e.flights, f)
	return true
}

// build turns the plan into a batch.
func (e *Engine) build(f *flight) {
	f.batch = backend.Batch{Iter: e.iter, Assign: f.batch.Assign[:0], Copies: f.batch.Copies[:0], Entries: f.batch.Entries[:0]}
	f.logits, f.windows, f.exports, f.logged = f.logits[:0], f.windows[:0], f.exports[:0], false
	f.counts, f.tokens = Batch{}, 0
	for _, it := range f.items {
		s := it.Seq.Data.(*Sequence)
		e.scheduled(s, it, f.builtNS)
		from := it.KVLen
		f.tokens += it.Tokens
		if it.First {
			f.batch.Assign = append(f.batch.Assign, s.assign())
			if c := it.Seq.Copy; c.Tokens > 0 {
				f.batch.Copies = append(f.batch.Copies, backend.BlockCopy{From: c.From, To: c.To})
				e.interval.CopiedBlocks++
				for i := range it.Seq.Columns {
					w := &it.Seq.Columns[i]
					f.batch.Copies = append(f.batch.Copies, backend.BlockCopy{From: w.Copy, To: w.Blocks[it.Seq.Prefix.Blocks()], Group: i + 1})
				}
				from -= c.Tokens
			}
		}
		f.batch.Entries = append(f.batch.Entries, f.entry(it))
		if s.export != nil {
			f.exports = append(f.exports, written{s.export, from, it.KVLen + it.Tokens})
		}
	}
	if len(f.exports) > 0 {
		f.batch.LayerDone = f.layerDone(e.info.Stage.First)
	}
}

// assign starts the sequence in its slot.
func (s *Sequence) assign() backend.Assign {
	a := backend.Assign{Slot: s.q.Slot, Sampling: s.req.Sampling}
	if s.req.Sampling.Penalized() {
		a.History, a.PromptLen = s.q.Tokens, len(s.req.Prompt)
	}
	return a
}

// entry points into the sequence's tokens and block table: both only grow at their ends.
func (f *flight) entry(it sched.Item) backend.Entry {
	end := it.KVLen + it.Tokens
	en := backend.Entry{Slot: it.Seq.Slot, KVLen: it.KVLen, Blocks: it.Seq.Blocks}
	if end <= len(it.Seq.Tokens) {
		en.Tokens = it.Seq.Tokens[it.KVLen:end]
	} // else one token that a step in flight is sampling
	if len(it.Seq.Columns) > 0 {
		for i := range it.Seq.Columns {
			f.windows = append(f.windows, it.Seq.Columns[i].Blocks)
		}
		en.Windows = f.windows[len(f.windows)-len(it.Seq.Columns):]
	}
	if it.Sample {
		f.logits = append(f.logits, it.Tokens-1)
		en.Logits = f.logits[len(f.logits)-1:]
	}
	return en
}

// layerDone tells the exports of a step, on the device's goroutine, which layers are written.
func (f *flight) layerDone(first int) func(end int) {
	from := first
	return func(end int) {
		for _, w := range f.exports {
			w.export.add(infer.Span{LayerFrom: from, LayerTo: end, TokenFrom: w.tokenFrom, TokenTo: w.tokenTo})
		}
		from = end
	}
}

// collect takes in the results of the oldest step, which is done.
func (e *Engine) collect() error {
	f := e.flights[0]
	e.flights = append(e.flights[:0], e.flights[1:]...)
	now := e.cfg.Now()
	e.watched(f, now)
	e.step.barren = e.step.barren && f.synthetic
	e.ran(f)
	for i, it := range f.items {
		s := it.Seq.Data.(*Sequence)
		if it.Sample {
			it.Seq.Pending--
		}
		switch {
		case f.step.Err != nil:
			s.poisoned = true
			e.settle(s, it)
			e.end(s, infer.Done{Reason: infer.FinishFailed, Err: fmt.Errorf("engine: step %d: %w", f.step.Iter, f.step.Err)}, nil)
		case s.ended:
			e.settle(s, it)
		default:
			e.advance(s, it, f, i, now)
		}
	}
	e.traceEnd(f, now)
	e.iterated(f, now)
	e.idle = append(e.idle, f)
	return e.countFailure(f.step)
}

// settle caches the blocks that a step filled, then lets go of them.
func (e *Engine) settle(s *Sequence, it sched.Item) {
	if end := it.KVLen + it.Tokens; end <= len(it.Seq.Tokens) && !s.poisoned {
		e.sched.Publish(it.Seq, end)
	}
	if len(it.Seq.Columns) > 0 {
		e.sched.Slide(it.Seq, it.KVLen+it.Tokens)
		s.countGrowth(it.KVLen >= s.target)
	}
	e.sched.Complete(it.Seq)
}

// advance moves a sequence on by its part of a step.
func (e *Engine) advance(s *Sequence, it sched.Item, f *flight, i int, now int64) {
	if !it.Sample {
		e.settle(s, it)
		s.record(&it, f, now)
		return
	}
	out := &f.step.Outputs[i]
	if len(out.Tokens) != 1 {
		s.poisoned = true
		e.settle(s, it)
		s.record(&it, f, now)
		e.end(s, infer.Done{Reason: infer.FinishFailed, Err: ErrNoToken}, nil)
		return
	}
	token := infer.Token{ID: out.Tokens[0], AtNS: now}
	if len(out.Logprobs) > 0 {
		token.Logprob, token.Top = out.Logprobs[0].Logprob, out.Logprobs[0].Top
	}
	s.q.Tokens = append(s.q.Tokens, token.ID)
	e.settle(s, it)
	s.record(&it, f, now)
	s.report.OutputTokens++
	s.stampToken(now)
	if !s.req.Probe {
		e.interval.OutputTokens++
		if it.KVLen >= s.target {
			e.interval.Decoded++
		}
	}
	if done, ok := s.finish(); ok {
		e.end(s, done, []infer.Token{token})
		return
	}
	s.out.Give([]infer.Token{token}, nil)
}

// countFailure gives up when the device fails step after step.
func (e *Engine) countFailure(step *backend.Step) error {
	if step.Err == nil {
		e.failures = 0
		return nil
	}
	e.failures++
	e.cfg.Logger.Error("step failed", "iter", step.Iter, "error", step.Err, "in_a_row", e.failures)
	if e.failures < maxFailures {
		return nil
	}
	return fmt.Errorf("engine: %d steps in a row failed, the last with: %w", e.failures, step.Err)
}
