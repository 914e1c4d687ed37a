package engine

import (
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
)

// admitted takes note that a sequence got its slot and blocks. It begins when its blocks are loaded from the host.
func (e *Engine) admitted(q *sched.Seq) {
	s := q.Data.(*Sequence)
	s.countBlocks(q)
	if len(q.Loads) > 0 {
		e.onboard(s)
		return
	}
	e.begin(s)
}

// begin takes note that all that is cached of a sequence is in its blocks.
func (e *Engine) begin(s *Sequence) {
	q := &s.q
	s.target = len(q.Tokens)
	if s.counted { // the first time
		s.uncount()
		s.report.CachedTokens = min(q.Cached, len(s.req.Prompt))
		e.activated(s)
	}
	if s.export != nil {
		e.lease(s.export)
	}
	if s.hold != nil && q.Held {
		s.hold.ready(q)
	}
}

// scheduled takes note that a sequence is in a batch.
func (e *Engine) scheduled(s *Sequence, it sched.Item, now int64) {
	r := &s.report
	if r.FirstScheduledNS == 0 {
		r.FirstScheduledNS, r.FirstIter = now, e.iter
		if s.req.ReturnPerfMetrics {
			s.steps.on, s.steps.max = true, e.cfg.MaxStepRecords
		}
	}
	r.LastIter = e.iter
	s.countGrowth(it.KVLen >= s.target)
	if s.preemptedNS != 0 {
		r.PreemptedNS += now - s.preemptedNS
		s.preemptedNS = 0
		e.interval.Resumed++
	}
}

// countGrowth counts the blocks that the sequence got since it was last looked at.
func (s *Sequence) countGrowth(decodes bool) {
	q, in := &s.q, &s.e.interval
	if n := len(q.Blocks); n > s.blocks {
		if s.e.full {
			s.tookBlocks(n-s.blocks, decodes, &in.DecodeBlocks)
		}
		s.blocks = n
	}
	for i := range q.Columns {
		c := &q.Columns[i]
		if n := c.Attached + c.Taken; n > c.Counted {
			s.tookBlocks(n-c.Counted, decodes, &in.WindowDecodeBlocks[i])
			c.Counted = n
		}
	}
}

// tookBlocks counts new blocks.
func (s *Sequence) tookBlocks(n int, decodes bool, decoded *int) {
	s.report.KV.AllocTotalBlocks += n
	s.report.KV.AllocNewBlocks += n
	if decodes {
		*decoded += n
	}
	if s.req.Probe {
		s.e.interval.ProbeBlocks += n
	}
}

// countBlocks counts what a sequence got when it was admitted; it may be admitted again after a preemption.
func (s *Sequence) countBlocks(q *sched.Seq) {
	c, missed := &s.report.KV, s.e.missedBlocks()
	attached, groups := 0, len(q.Columns)
	s.blocks = len(q.Blocks)
	if s.e.full {
		attached = q.Prefix.Blocks()
		s.tookBlocks(s.blocks-attached, false, nil)
		groups++
	}
	for i := range q.Columns {
		w := &q.Columns[i]
		attached += w.Attached
		w.Counted = w.Attached + w.Taken
		s.tookBlocks(w.Taken, false, nil)
	}
	c.AllocTotalBlocks += attached
	c.ReusedBlocks += attached
	if q.Copy.Tokens > 0 {
		c.ReusedBlocks += groups
		c.PartialBlocks += groups
	}
	c.MissedBlocks += int(missed - s.e.missed)
	s.e.missed = missed
}

// missedBlocks counts the blocks of all layers that were asked for and came from nowhere.
func (e *Engine) missedBlocks() int64 {
	n := int64(0)
	if e.full {
		n = e.pool.Missed()
	}
	for _, w := range e.windows {
		n += w.Missed()
	}
	return n
}

// countLoads counts the blocks that tiers below the device gave, and those that they failed to give.
func (s *Sequence) countLoads(loads []kv.Move, good int) {
	c, first := &s.report.KV, 0 // the group whose blocks are counted by tier: where there are such, layers that see all tokens
	if !s.e.full {
		first = 1
	}
	for i, m := range loads {
		switch {
		case m.Group < first: // these blocks have no bytes, and no statistics
		case i >= good:
			c.MissedBlocks++
			s.e.missed++
		default:
			c.ReusedBlocks++
			if m.Group == first && m.Tier == kvevent.Host {
				c.HostBlocks++
			} else if m.Group == first {
				c.DiskBlocks++
			}
		}
	}
}

// record keeps the sequence's part of a step: a chunk of prefill, or a decode step when these were asked for. It is a chunk
// if the prompt is computed here and no token was sampled before; computing anew what a preemption lost belongs to the
// decode step that waits for it.
func (s *Sequence) record(it *sched.Item, f *flight, now int64) {
	if it.KVLen < s.target && s.report.OutputTokens == 0 && s.req.Kind != infer.GenerationOnly {
		st := &f.step.Stamps
		s.report.Chunks = append(s.report.Chunks, infer.Chunk{
			Iter: f.batch.Iter, Tokens: it.Tokens, KVTokens: it.KVLen, BatchSize: len(f.items),
			ForwardStartNS: st.ForwardStartNS, ForwardEndNS: st.ForwardEndNS, SampleEndNS: st.SampleEndNS, StageNS: appendCuts(nil, f.step.Stages),
		})
		return
	}
	if s.steps.on {
		if !f.logged {
			f.log(&s.e.log, now)
		}
		s.steps.add(&s.e.log, s.step, it.KVLen, it.Tokens)
	}
	if it.Sample {
		s.step++
	}
}

// log keeps what the requests of the step have in common.
func (f *flight) log(l *batchLog, now int64) {
	f.logged = true
	st := &f.step.Stamps
	l.cuts = appendCuts(l.cuts[:0], f.step.Stages)
	l.add(infer.StepRow{
		Iter: f.batch.Iter, ForwardStartNS: st.ForwardStartNS, ForwardEndNS: st.ForwardEndNS, SampleEndNS: st.SampleEndNS,
		TokenNS: now, BatchSize: int64(len(f.items)), StageNS: l.cuts,
	})
}

func (s *Sequence) stampToken(now int64) {
	if s.report.FirstTokenNS == 0 {
		s.report.FirstTokenNS = now
	}
	s.report.LastTokenNS = now
}

func (s *Sequence) endReport(now int64) {
	r := &s.report
	r.FinishedNS = now
	if s.preemptedNS != 0 {
		r.PreemptedNS += now - s.preemptedNS
		s.preemptedNS = 0
	}
}
