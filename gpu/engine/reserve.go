package engine

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
)

// Reservation holds a slot and the KV blocks of a prompt that another node computes, until Start, Cancel or the
// deadline. Write may be called by several goroutines at once.
type Reservation struct {
	s          *Sequence
	deadlineNS int64
	admitted   chan struct{} // closed when slot and blocks are there

	mu      sync.Mutex // guards the fields below
	tables  [][]int32  // block tables of all groups of layers
	held    int
	report  infer.Report // as of the admission
	spans   []infer.Span // installed
	copies  int          // in flight
	started bool
	err     error // why it ended
	ended   chan struct{}
}

// Reserve waits until slot and blocks for a GenerationOnly request are there, or ctx or the deadline ends. Prompt tokens
// whose KV is cached here are attached at once; see Held.
func (e *Engine) Reserve(ctx context.Context, r infer.Request) (*Reservation, error) {
	if r.Kind != infer.GenerationOnly {
		return nil, fmt.Errorf("%w: a %v request needs no reservation", ErrInvalid, r.Kind)
	}
	s, err := e.newSequence(r)
	if err != nil {
		return nil, err
	}
	s.q.Held, s.q.Fixed = true, true
	h := &Reservation{s: s, admitted: make(chan struct{}), ended: make(chan struct{})}
	h.deadlineNS = e.cfg.Now() + e.cfg.ReserveDeadline.Nanoseconds()
	s.hold = h
	if err := e.accept(s); err != nil {
		return nil, err
	}
	select {
	case <-h.admitted:
		return h, nil
	case <-h.ended:
		return nil, fmt.Errorf("reserve kv of request %d: %w", r.ID, h.why())
	case <-ctx.Done():
		h.Cancel()
		return nil, fmt.Errorf("reserve kv of request %d: %w", r.ID, ctx.Err())
	}
}

// ready is called when the sequence is admitted.
func (h *Reservation) ready(q *sched.Seq) {
	h.mu.Lock()
	h.tables, h.held, h.report = q.Tables(), q.Cached, h.s.report
	h.mu.Unlock()
	close(h.admitted)
}

// Held is the number of tokens at the start of the prompt whose KV is here already, in whole blocks.
func (h *Reservation) Held() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held
}

// Report is what the request has cost so far: slot and blocks, until Start. It is all that there is of one that never starts.
func (h *Reservation) Report() infer.Report {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.report
	r.KV.AllocTotalBlocks = r.KV.AllocNewBlocks + r.KV.ReusedBlocks
	return r
}

// Tokens is the number of tokens whose KV must be here before Start: prompt and Output.
func (h *Reservation) Tokens() int { return h.s.base }

// QueuedNS is when the engine accepted the request.
func (h *Reservation) QueuedNS() int64 { return h.s.report.QueuedNS }

// Write installs the KV of a span from its canonical bytes (see Export.Read) and returns when it is copied, also when ctx
// ends, because the device reads src; not when that hangs. Spans may come in any order; what is Held must not be written.
func (h *Reservation) Write(ctx context.Context, span infer.Span, src []byte) error {
	_, err := h.install(ctx, span, len(src), func(to []backend.Region) *backend.Copy { return h.s.e.b.CopyIn(to, src) })
	return err
}

// Pull installs the KV of a span out of another process's blocks, which hold its tokens in order, and gives the time that
// the copy took in ns.
func (h *Reservation) Pull(ctx context.Context, span infer.Span, from backend.Attached, blocks []int32) (int64, error) {
	return h.install(ctx, span, SpanBytes(h.s.e.info, span), func(to []backend.Region) *backend.Copy {
		p := backend.Pull{LayerFrom: span.LayerFrom, LayerTo: span.LayerTo, TokenFrom: span.TokenFrom, TokenTo: span.TokenTo, From: blocks}
		for _, r := range to {
			p.To = append(p.To, r.Block)
		}
		return from.Pull(p)
	})
}

func (h *Reservation) install(ctx context.Context, span infer.Span, size int, begin func([]backend.Region) *backend.Copy) (tookNS int64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	h.mu.Lock()
	err = h.writable(span, size)
	if err == nil {
		h.copies++
	}
	h.mu.Unlock()
	if err != nil {
		return 0, err
	}
	c := h.s.e.watch.begun(begin(Regions(nil, h.s.e.info, h.tables, span)))
	err = h.s.e.watch.await(c)
	h.mu.Lock()
	h.copies--
	if err == nil {
		h.spans = append(h.spans, span)
	}
	over := h.copies == 0 && h.err != nil
	h.mu.Unlock()
	if over {
		h.s.e.post(func() { h.s.e.release(h, infer.Done{}) })
	}
	if err != nil {
		return 0, fmt.Errorf("copy kv %+v in: %w", span, err)
	}
	return c.EndNS - c.StartNS, nil
}

func (h *Reservation) writable(span infer.Span, size int) error {
	switch {
	case h.err != nil:
		return fmt.Errorf("write kv %+v: %w", span, h.err)
	case h.started:
		return fmt.Errorf("write kv %+v: %w: the sequence has started", span, ErrInvalid)
	}
	if err := checkSpan(h.s.e.info, span, extent{h.held, h.s.base}, size); err != nil {
		return fmt.Errorf("write kv: %w", err)
	}
	return nil
}

// Start begins to decode. All KV must be installed; first holds the tokens that the context node sampled, which Next
// gives out first, with the time of Start.
func (h *Reservation) Start(first []infer.Token) (*Sequence, error) {
	s, e := h.s, h.s.e
	if len(first) == 0 || len(first) > s.q.Limit-s.base {
		return nil, fmt.Errorf("%w: %d first tokens, must be 1 to %d", ErrInvalid, len(first), s.q.Limit-s.base)
	}
	for _, t := range first {
		if t.ID < 0 || int(t.ID) >= e.info.Vocab {
			return nil, fmt.Errorf("%w: first token %d is not in the vocabulary of %d", ErrInvalid, t.ID, e.info.Vocab)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.err != nil:
		return nil, fmt.Errorf("start request %d: %w", s.req.ID, h.err)
	case h.started || h.copies > 0:
		return nil, fmt.Errorf("%w: request %d has started, or KV is being written", ErrInvalid, s.req.ID)
	}
	if err := h.complete(s.base); err != nil {
		return nil, err
	}
	first = slices.Clone(first)
	for i := range first {
		first[i].AtNS = e.cfg.Now()
	}
	if !e.post(func() { e.start(h, first) }) {
		return nil, ErrStopped
	}
	h.started = true
	return s, nil
}

// complete verifies that every layer has every one of the first tokens that it keeps.
func (h *Reservation) complete(tokens int) error {
	st := h.s.e.info.Stage
	slices.SortFunc(h.spans, func(a, b infer.Span) int { return cmp.Compare(a.TokenFrom, b.TokenFrom) })
	for layer := st.First; layer < st.End; layer++ {
		to := max(h.held, firstKept(&h.s.e.info, layer, tokens))
		for _, sp := range h.spans {
			if sp.LayerFrom <= layer && layer < sp.LayerTo && sp.TokenFrom <= to {
				to = max(to, sp.TokenTo)
			}
		}
		if to < tokens {
			return fmt.Errorf("%w: request %d: KV of layer %d, token %d is missing", ErrInvalid, h.s.req.ID, layer, to)
		}
	}
	return nil
}

// start turns a reservation into a running sequence, on the engine's goroutine.
func (e *Engine) start(h *Reservation, first []infer.Token) {
	s := h.s
	if s.ended {
		return
	}
	e.sched.Publish(&s.q, s.base)
	now := first[0].AtNS
	s.stampToken(now)
	for _, t := range first {
		s.q.Tokens = append(s.q.Tokens, t.ID)
	}
	e.sched.Ready(&s.q, s.base)
	if done, ok := s.finish(); ok {
		e.end(s, done, first)
		return
	}
	s.out.Give(first, nil)
}

// Cancel gives slot and blocks back, after the copies in flight. It may be called more than once; after Start it does
// nothing.
func (h *Reservation) Cancel() {
	h.s.e.post(func() {
		h.mu.Lock()
		started := h.started
		h.mu.Unlock()
		if !started {
			h.s.e.release(h, infer.Done{Reason: infer.FinishCancelled, Err: ErrCancelled})
		}
	})
}

// release ends a reservation that has not started: now, or when the last copy in flight calls again.
func (e *Engine) release(h *Reservation, done infer.Done) {
	h.mu.Lock()
	if h.err == nil {
		h.err = done.Err
	}
	busy := h.copies > 0
	done.Err = h.err
	h.mu.Unlock()
	if busy {
		return
	}
	if done.Reason == "" {
		done.Reason = infer.FinishCancelled
	}
	e.end(h.s, done, nil)
}

// fail goes with the end of the sequence.
func (h *Reservation) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		h.err = err
	}
	if h.err == nil {
		h.err = ErrCancelled // it ran to its end: nothing may be written any more
	}
	select {
	case <-h.ended:
	default:
		close(h.ended)
	}
}

func (h *Reservation) why() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}
