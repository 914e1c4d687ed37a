package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
)

// The errors of requests. Those of Submit and Reserve come at once; the others are in Done.Err.
var (
	// ErrQueueFull is returned when MaxWaiting requests wait already.
	ErrQueueFull = errors.New("engine: the queue is full")
	// ErrDraining is returned after Drain.
	ErrDraining = errors.New("engine: draining")
	// ErrStopped is returned when the engine has ended.
	ErrStopped = errors.New("engine: stopped")
	// ErrTooLong is returned when prompt and MaxTokens do not fit into the context or into the KV of the device.
	ErrTooLong = errors.New("engine: too long")
	// ErrInvalid is returned when a request makes no sense.
	ErrInvalid = errors.New("engine: invalid request")
	// ErrCancelled is the error of what was cancelled or released.
	ErrCancelled = errors.New("engine: cancelled")
	// ErrDeadline is the error of what was not done in its time.
	ErrDeadline = errors.New("engine: deadline passed")
	// ErrNoToken is the error of a sequence for which the device could choose no token: its logits were not numbers, or
	// its mask allowed none.
	ErrNoToken = errors.New("engine: no token could be sampled")
)

// Sequence is one running request. Next has one caller at a time; Cancel may be called from anywhere.
type Sequence struct {
	e      *Engine
	req    infer.Request
	export *Export
	hold   *Reservation // nil unless the sequence came from one

	// Owned by the engine's goroutine. What is touched in every step is together.
	q           sched.Seq
	target      int     // tokens known when the sequence was admitted: steps before it are prefill
	step        int     // decode steps so far
	steps       stepLog // on if asked for; read by the consumer once the sequence has ended
	base        int     // tokens before the first that is sampled in this attempt: prompt and Output
	counted     bool    // in Engine.queued
	ended       bool
	poisoned    bool  // a step failed: its KV may be wrong and must not be cached
	preemptedNS int64 // when, 0 if it is not
	blocks      int   // that it had when it was last looked at
	unpriced    int64 // tokens whose energy is not known yet
	priced      bool  // energy holds some
	energy      float64
	report      infer.Report

	out Stream
}

// Submit accepts an Aggregated or ContextOnly request and returns at once. The request's slices must not change after.
func (e *Engine) Submit(r infer.Request) (*Sequence, error) {
	if r.Kind == infer.GenerationOnly {
		return nil, fmt.Errorf("%w: a %v request needs a reservation", ErrInvalid, r.Kind)
	}
	s, err := e.newSequence(r)
	if err != nil {
		return nil, err
	}
	if r.Kind == infer.ContextOnly {
		s.q.Fixed, s.q.Limit = true, s.base+1
		s.export = newExport(s)
	}
	if err := e.accept(s); err != nil {
		return nil, err
	}
	return s, nil
}

// newSequence checks a request.
func (e *Engine) newSequence(r infer.Request) (*Sequence, error) {
	if err := e.checkRequest(&r); err != nil {
		return nil, err
	}
	s := &Sequence{e: e, req: r, base: len(r.Prompt) + len(r.Output), out: NewStream()}
	tokens := make([]int32, 0, s.base+min(r.MaxTokens-len(r.Output), 64))
	s.q = sched.Seq{
		Priority: r.Priority, Pin: r.Pin, Tokens: append(append(tokens, r.Prompt...), r.Output...),
		Limit: len(r.Prompt) + r.MaxTokens, Match: s.base, Data: s,
	}
	s.report.PromptTokens = len(r.Prompt)
	if e.cfg.Peers != nil {
		s.report.Rank = &e.cfg.Rank
	}
	return s, nil
}

func (e *Engine) checkRequest(r *infer.Request) error {
	switch total := len(r.Prompt) + r.MaxTokens; {
	case len(r.Prompt) == 0:
		return fmt.Errorf("%w: the prompt has no tokens", ErrInvalid)
	case r.MaxTokens < 1 || r.MaxTokens <= len(r.Output):
		return fmt.Errorf("%w: max_tokens is %d, must be more than the %d tokens already given", ErrInvalid, r.MaxTokens, len(r.Output))
	case r.MaxTokens > e.info.ContextLen || total > e.info.ContextLen:
		return fmt.Errorf("%w: %d prompt tokens and %d more exceed the context of %d", ErrTooLong, len(r.Prompt), r.MaxTokens, e.info.ContextLen)
	case e.pool.Blocks(total) > e.info.KVBlocks:
		return fmt.Errorf("%w: %d tokens need %d KV blocks, the device has %d", ErrTooLong, total, e.pool.Blocks(total), e.info.KVBlocks)
	}
	for i := range e.info.Windows {
		w, total := &e.info.Windows[i], len(r.Prompt)+r.MaxTokens
		if n := kv.MostHeld(w.Tokens, e.ahead(), e.info.TokensPerBlock, total); n > w.Blocks {
			return fmt.Errorf("%w: %d tokens need %d KV blocks of the layers with a window of %d, the device has %d", ErrTooLong, total, n, w.Tokens, w.Blocks)
		}
	}
	for _, list := range [][]int32{r.Prompt, r.Output} {
		for i, t := range list {
			if t < 0 || int(t) >= e.info.Vocab {
				return fmt.Errorf("%w: token %d at %d is not in the vocabulary of %d", ErrInvalid, t, i, e.info.Vocab)
			}
		}
	}
	return nil
}

// accept queues a sequence.
func (e *Engine) accept(s *Sequence) error {
	if e.draining.Load() {
		return ErrDraining
	}
	if n := e.queued.Add(1); n > int64(e.cfg.MaxWaiting) {
		e.queued.Add(-1)
		return fmt.Errorf("%w: %d requests wait, the limit", ErrQueueFull, e.cfg.MaxWaiting)
	}
	s.counted = true
	s.report.QueuedNS = e.cfg.Now()
	if !e.post(func() { e.add(s) }) {
		e.queued.Add(-1)
		return ErrStopped
	}
	return nil
}

func (e *Engine) add(s *Sequence) {
	if !s.req.Probe {
		e.interval.NewRequests++
	}
	e.sched.Add(&s.q)
	e.noteDeadline(s.deadline())
}

// ID of the request.
func (s *Sequence) ID() int64 { return s.req.ID }

// Rank is the data-parallel rank that runs the sequence.
func (s *Sequence) Rank() int { return s.e.cfg.Rank }

// Export gives the KV of a ContextOnly sequence; nil for others.
func (s *Sequence) Export() *Export { return s.export }

// Next gives tokens and the end; see Stream.
func (s *Sequence) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	tokens, done, err := s.out.Next(ctx)
	if done != nil && s.steps.on { // here, so that the engine's goroutine need not
		done.Report.Steps, s.steps = s.steps.records(), stepLog{}
	}
	return tokens, done, err
}

// Cancel ends the sequence soon. What was sampled before is still given out, then Done with FinishCancelled. It may be
// called at any time, more than once.
func (s *Sequence) Cancel() {
	s.e.post(func() { s.e.end(s, infer.Done{Reason: infer.FinishCancelled, Err: ErrCancelled}, nil) })
}

// finish tells whether the newest known token ends the sequence.
func (s *Sequence) finish() (infer.Done, bool) {
	t := s.q.Tokens[len(s.q.Tokens)-1]
	switch {
	case (!s.req.IgnoreEOS && slices.Contains(s.e.cfg.EOS, t)) || slices.Contains(s.req.StopTokens, t):
		return infer.Done{Reason: infer.FinishStop, StopToken: &t}, true
	case len(s.q.Tokens) >= s.q.Limit:
		return infer.Done{Reason: infer.FinishLength}, true
	}
	return infer.Done{}, false
}

// Finished tells whether a ContextOnly request is complete with its first token: nothing is left for a generation node.
func Finished(r infer.Request, d *infer.Done) bool {
	return d.Reason != infer.FinishLength || r.MaxTokens <= len(r.Output)+1
}

// end ends a sequence with its last tokens. The blocks go when nothing in flight names them.
func (e *Engine) end(s *Sequence, done infer.Done, last []infer.Token) {
	if s.ended {
		return
	}
	s.ended = true
	now := e.cfg.Now()
	s.uncount()
	e.sched.Finish(&s.q)
	s.endReport(now)
	s.report.EnergyJ = e.settleEnergy(s)
	s.steps.close()
	done.Report = s.report
	if s.export != nil {
		e.endExport(s.export, done, now)
	}
	if s.hold != nil {
		s.hold.fail(done.Err)
	}
	if !s.req.Probe {
		e.interval.count(done.Reason)
	}
	e.traceRequest(s, done.Reason)
	s.out.Give(last, &done)
}

// uncount takes the sequence out of the queue's count.
func (s *Sequence) uncount() {
	if s.counted {
		s.counted = false
		s.e.queued.Add(-1)
	}
}
