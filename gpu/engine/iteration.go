package engine

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
)

// Iteration is what one step was, for whoever keeps statistics. It is reused: valid until OnIteration returns. Counts
// of requests are since the iteration before, probes not among them.
type Iteration struct {
	Iter        int64
	BuiltNS     int64 // the batch was built
	CollectedNS int64 // the host had the results
	EndNS       int64 // the host had dealt with them
	Stamps      backend.Stamps
	Err         error // the device failed the step
	MicroBatch  int   // which of those that are in flight at the same time
	Synthetic   bool  // nothing was to be run: the rank came along with others

	Batch
	Running, Waiting int // sequences, after the step
	// Pool has the KV blocks; its statistics are computed when they are asked for.
	Pool *kv.Pool

	NewRequests int   // accepted
	NewActive   int   // got their first slot
	QueuedNS    int64 // time that these had waited for it, in all
	Completed   int   // stop or length
	Cancelled   int
	Expired     int
	Failed      int
	Preempted   int
	Resumed     int // scheduled again after they were preempted
	// OutputTokens were sampled and given out; those of sequences that had ended already are not counted.
	OutputTokens int
	Decoded      int // those of them that decode entries gave
	PromptTokens int // of NewActive
	CachedTokens int // of these, not computed here
	CachedHost   int // of CachedTokens, loaded from host memory
	CachedDisk   int // and from disk
	DecodeBlocks int // KV blocks that decode entries took
	// WindowDecodeBlocks are those of each window.
	WindowDecodeBlocks []int
	CopiedBlocks       int // KV blocks copied inside the device, in each group of layers, for prompts that share a part of a block
	ProbeBlocks        int // new KV blocks of probes: no record has them
	Requests           []RequestState
}

// Batch counts what a batch holds and what waits for one. It is taken when the batch is built, before the forward changes
// the state of any request.
type Batch struct {
	BatchSize       int
	ContextSeqs     int // entries that are prefill
	ContextTokens   int // computed by them
	ContextKVTokens int // read by them: in KV before the step
	DecodeSeqs      int
	DecodeKVTokens  int

	QueuedContext       int // sequences whose prefill is not in the batch
	QueuedContextTokens int
	QueuedDecode        int // sequences that wait for KV of another node
	QueuedDecodeTokens  int
	Paused              int // preempted sequences
	PausedTokens        int // known tokens of these
}

// Stage is how far a request is.
type Stage string

// The stages, in TensorRT-LLM's words.
const (
	StageQueued  Stage = "QUEUED"
	StageContext Stage = "CONTEXT_IN_PROGRESS"
	StageDecode  Stage = "GENERATION_IN_PROGRESS"
)

// RequestState is one request as of a step; it is collected with Config.RequestStates.
type RequestState struct {
	ID        int64
	Stage     Stage
	Computed  int // tokens of the prompt in KV
	Output    int // tokens given out
	Scheduled bool
	Paused    bool
	KV        infer.KVCounts
}

func (it *Iteration) reset() {
	clear(it.WindowDecodeBlocks)
	*it = Iteration{Requests: it.Requests, WindowDecodeBlocks: it.WindowDecodeBlocks}
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

// activated counts a sequence that got its first slot.
func (e *Engine) activated(s *Sequence) {
	if e.cfg.OnIteration == nil || s.req.Probe {
		return
	}
	e.interval.NewActive++
	e.interval.QueuedNS += e.cfg.Now() - s.report.QueuedNS
	e.interval.PromptTokens += s.report.PromptTokens
	e.interval.CachedTokens += s.report.CachedTokens
	e.interval.CachedHost += s.report.KV.HostBlocks * e.info.TokensPerBlock
	e.interval.CachedDisk += s.report.KV.DiskBlocks * e.info.TokensPerBlock
}

// count counts the entries of the batch.
func (c *Batch) count(items []sched.Item) {
	decodeKV := 0 // and nothing else is touched for what decodes: that is nearly all
	for i := range items {
		if it := &items[i]; it.KVLen >= it.Seq.Data.(*Sequence).target {
			decodeKV += it.KVLen
		} else {
			c.ContextSeqs++
			c.ContextTokens += it.Tokens
			c.ContextKVTokens += it.KVLen
		}
	}
	c.BatchSize, c.DecodeSeqs, c.DecodeKVTokens = len(items), len(items)-c.ContextSeqs, decodeKV
}

// countBatch counts what the batch of a step holds and what is left out of it.
func (e *Engine) countBatch(f *flight) {
	if e.cfg.OnIteration == nil {
		return
	}
	c := &f.counts
	c.count(f.items)
	for _, q := range e.sched.Waiting() {
		c.countWaiting(q)
	}
	if running := e.sched.Running(); len(running) > len(f.items) {
		for _, q := range running {
			if q.Held || q.Data.(*Sequence).report.LastIter != e.iter {
				c.countWaiting(q)
			}
		}
	}
}

func (c *Batch) countWaiting(q *sched.Seq) {
	s := q.Data.(*Sequence)
	switch {
	case s.preemptedNS != 0:
		c.Paused++
		c.PausedTokens += len(q.Tokens)
	case q.Held:
		c.QueuedDecode++
		c.QueuedDecodeTokens += len(q.Tokens)
	default:
		c.QueuedContext++
		c.QueuedContextTokens += len(q.Tokens) - q.Computed
	}
}

// iterated reports a collected step.
func (e *Engine) iterated(f *flight, now int64) {
	if e.cfg.OnIteration == nil {
		return
	}
	it := &e.interval
	it.Iter, it.BuiltNS, it.CollectedNS = f.batch.Iter, f.builtNS, now
	it.MicroBatch = int(f.batch.Iter % int64(max(e.info.Stages, 1)))
	it.Stamps, it.Err, it.Batch, it.Synthetic = f.step.Stamps, f.step.Err, f.counts, f.synthetic
	if e.cfg.RequestStates {
		it.Requests = e.requestStates(it.Requests[:0], f.batch.Iter)
	}
	it.Running, it.Waiting, it.Pool = len(e.sched.Running()), len(e.sched.Waiting()), e.pool
	it.EndNS = e.cfg.Now()
	e.cfg.OnIteration(it)
	it.reset()
}

// idled hands out what was counted since the last step, when there is no step in flight and none to submit.
func (e *Engine) idled() {
	if e.cfg.OnIdle != nil {
		e.cfg.OnIdle(e.look())
		e.interval.reset()
	}
}

// look completes what was counted since the last step with how things are.
func (e *Engine) look() *Iteration {
	it := &e.interval
	it.Iter = e.iter
	if e.cfg.RequestStates {
		it.Requests = e.requestStates(it.Requests[:0], e.iter)
	}
	it.Running, it.Waiting, it.Pool = len(e.sched.Running()), len(e.sched.Waiting()), e.pool
	it.EndNS = e.cfg.Now()
	return it
}

func (e *Engine) requestStates(dst []RequestState, iter int64) []RequestState {
	for _, list := range [][]*sched.Seq{e.sched.Running(), e.sched.Waiting()} {
		for _, q := range list {
			dst = append(dst, q.Data.(*Sequence).state(iter))
		}
	}
	return dst
}

func (s *Sequence) state(iter int64) RequestState {
	st := RequestState{
		ID: s.req.ID, Stage: StageQueued, Computed: min(s.q.Computed, len(s.req.Prompt)), Output: s.report.OutputTokens,
		Scheduled: s.report.LastIter >= iter && s.report.FirstIter <= iter && s.q.Running(), Paused: s.preemptedNS != 0, KV: s.report.KV,
	}
	switch {
	case !s.q.Running() || s.q.Held:
	case s.q.Computed < s.target:
		st.Stage = StageContext
	default:
		st.Stage = StageDecode
	}
	return st
}
