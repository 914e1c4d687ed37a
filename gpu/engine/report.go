package engine

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
)

// Iteration is what one step was, for whoever keeps statistics. It is reused: valid until OnIteration returns. Counts
// of requests are since the iteration before.
type Iteration struct {
	Iter        int64
	BuiltNS     int64 // the batch was built
	CollectedNS int64 // the host had the results
	Stamps      backend.Stamps
	Err         error // the device failed the step

	BatchSize     int
	ContextSeqs   int // entries that are prefill
	ContextTokens int
	DecodeSeqs    int
	KVTokens      int // tokens in KV before the step, of all entries

	Running, Waiting int // sequences, after the step
	KV               kv.Stats

	NewRequests int
	Completed   int // stop or length
	Cancelled   int
	Expired     int
	Failed      int
	Preempted   int
	// OutputTokens were sampled and given out; those of sequences that had ended already are not counted.
	OutputTokens int
}

func (it *Iteration) count(reason infer.FinishReason) {
	switch reason {
	case infer.FinishCancelled:
		it.Cancelled++
	case infer.FinishExpired:
		it.Expired++
	case infer.FinishFailed:
		it.Failed++
	default:
		it.Completed++
	}
}

// iterated reports a collected step.
func (e *Engine) iterated(f *flight, now int64) {
	if e.cfg.OnIteration == nil {
		return
	}
	it := &e.interval
	it.Iter, it.BuiltNS, it.CollectedNS = f.batch.Iter, f.builtNS, now
	it.Stamps, it.Err, it.BatchSize = f.step.Stamps, f.step.Err, len(f.items)
	for _, i := range f.items {
		it.KVTokens += i.KVLen
		if i.KVLen < i.Seq.Data.(*Sequence).target {
			it.ContextSeqs++
			it.ContextTokens += i.Tokens
		} else {
			it.DecodeSeqs++
		}
	}
	it.Running, it.Waiting, it.KV = len(e.sched.Running()), len(e.sched.Waiting()), e.pool.Stats()
	e.cfg.OnIteration(it)
	*it = Iteration{}
}

// admitted takes note that a sequence got its slot and blocks.
func (e *Engine) admitted(q *sched.Seq) {
	s := q.Data.(*Sequence)
	s.target = len(q.Tokens)
	if s.counted { // the first time
		s.uncount()
		s.report.CachedTokens = min(q.Cached, len(s.req.Prompt))
		s.report.KV.ReusedBlocks = q.Prefix.Blocks()
		s.report.KV.MissedBlocks = s.base/e.info.TokensPerBlock - q.Prefix.Blocks()
	}
	s.blocks = max(s.blocks, len(q.Blocks))
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
	}
	r.LastIter = e.iter
	s.blocks = max(s.blocks, len(it.Seq.Blocks))
	if s.preemptedNS != 0 {
		r.PreemptedNS += now - s.preemptedNS
		s.preemptedNS = 0
	}
}

// record keeps the sequence's part of a step: a chunk of prefill, or a decode step when these were asked for.
func (s *Sequence) record(it sched.Item, f *flight, now int64) {
	st := f.step.Stamps
	if it.KVLen < s.target {
		s.report.Chunks = append(s.report.Chunks, infer.Chunk{
			Iter: f.batch.Iter, Tokens: it.Tokens, KVTokens: it.KVLen, BatchSize: len(f.items),
			ForwardStartNS: st.ForwardStartNS, ForwardEndNS: st.ForwardEndNS, SampleEndNS: st.SampleEndNS,
		})
		return
	}
	s.steps++
	c := s.report.Steps
	if c == nil {
		return
	}
	if len(c.Step) >= s.e.cfg.MaxStepRecords {
		c.Truncated++
		return
	}
	c.Step = append(c.Step, int32(s.steps-1))
	c.Iter = append(c.Iter, f.batch.Iter)
	c.ForwardStartNS = append(c.ForwardStartNS, st.ForwardStartNS)
	c.ForwardEndNS = append(c.ForwardEndNS, st.ForwardEndNS)
	c.SampleEndNS = append(c.SampleEndNS, st.SampleEndNS)
	c.TokenNS = append(c.TokenNS, now)
	c.KVTokens = append(c.KVTokens, int32(it.KVLen))
	c.BatchSize = append(c.BatchSize, int32(len(f.items)))
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
	r.KV.AllocTotalBlocks = s.blocks
	r.KV.AllocNewBlocks = s.blocks - r.KV.ReusedBlocks
}
