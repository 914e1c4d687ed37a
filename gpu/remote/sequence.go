package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/shared/infer"
)

// Sequence is a running request of the rank; see engine.Sequence. Its stamps are those of the rank's clock, but for QueuedNS.
type Sequence struct {
	e        *Engine
	handle   int64
	id       int64
	prompt   int   // tokens
	queuedNS int64 // on the node's clock
	out      engine.Stream
	export   *Export
}

// Submit accepts an Aggregated or ContextOnly request.
func (e *Engine) Submit(r infer.Request) (*Sequence, error) {
	s := e.sequence(r)
	if r.Kind == infer.ContextOnly {
		s.export = newExport(e, s.handle, len(r.Prompt)+len(r.Output))
	}
	o := order{Do: submit, Of: s.handle}
	o.Request, o.Left = e.timed(r)
	e.given.Add(1)
	if err := e.run(s, o); err != nil {
		return nil, err
	}
	return s, nil
}

func (e *Engine) sequence(r infer.Request) *Sequence {
	return &Sequence{e: e, handle: e.handle.Add(1), id: r.ID, prompt: len(r.Prompt), queuedNS: e.o.Now(), out: engine.NewStream()}
}

// timed takes the deadline out of a request: what is left of it is the same on every clock.
func (e *Engine) timed(r infer.Request) (infer.Request, time.Duration) {
	left := time.Duration(0)
	if r.DeadlineNS != 0 {
		left = max(time.Duration(r.DeadlineNS-e.o.Now()), 1)
		r.DeadlineNS = 0
	}
	return r, left
}

// run gives the order by which a sequence begins. It is known here before its first word can come.
func (e *Engine) run(s *Sequence, o order) error {
	e.mu.Lock()
	e.seqs[s.handle] = s
	if s.export != nil {
		e.exports[s.handle] = s.export
	}
	e.mu.Unlock()
	_, err := e.orders.call(context.Background(), o, nil, nil)
	if err != nil {
		e.mu.Lock()
		delete(e.seqs, s.handle)
		delete(e.exports, s.handle)
		e.mu.Unlock()
	}
	return err
}

// end gives the end to the consumer.
func (s *Sequence) end(d *infer.Done) {
	d.Report.QueuedNS = s.queuedNS
	s.out.Give(nil, d)
}

// ID of the request.
func (s *Sequence) ID() int64 { return s.id }

// Rank that runs it.
func (s *Sequence) Rank() int { return s.e.o.Rank }

// Export gives the KV of a ContextOnly sequence; nil for others.
func (s *Sequence) Export() *Export { return s.export }

// Next gives tokens and the end; see engine.Stream.
func (s *Sequence) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	return s.out.Next(ctx)
}

// Cancel ends the sequence soon.
func (s *Sequence) Cancel() { s.e.orders.tell(order{Do: cancel, Of: s.handle}) }

// Reservation holds slot and blocks on the rank; see engine.Reservation.
type Reservation struct {
	s      *Sequence
	held   int
	tokens int
	report infer.Report
}

// Reserve waits until slot and blocks for a GenerationOnly request are there, or ctx ends.
func (e *Engine) Reserve(ctx context.Context, r infer.Request) (*Reservation, error) {
	h := &Reservation{s: e.sequence(r), tokens: len(r.Prompt) + len(r.Output)}
	o := order{Do: reserve, Of: h.s.handle}
	o.Request, o.Left = e.timed(r)
	e.given.Add(1)
	it, err := e.orders.call(ctx, o, nil, nil)
	if err != nil {
		if ctx.Err() != nil {
			h.Cancel()
			err = fmt.Errorf("reserve kv of request %d: %w", r.ID, err)
		}
		return nil, err
	}
	h.held, h.report = it.Held, it.Report
	h.report.Rank, h.report.QueuedNS = &e.o.Rank, h.s.queuedNS
	return h, nil
}

// Held is the number of tokens at the start of the prompt whose KV is there already.
func (h *Reservation) Held() int { return h.held }

// Tokens is the number of tokens whose KV must be there before Start.
func (h *Reservation) Tokens() int { return h.tokens }

// Report is what the request has cost until Start.
func (h *Reservation) Report() infer.Report { return h.report }

// Write installs the KV of a span and returns when it is copied. src is free then, also after an error.
func (h *Reservation) Write(ctx context.Context, span infer.Span, src []byte) error {
	_, err := h.s.e.kv.call(ctx, order{Do: write, Of: h.s.handle, Span: span}, src, nil)
	return err
}

// Pull is refused: what another process shares is not open to this one's ranks.
func (h *Reservation) Pull(context.Context, infer.Span, backend.Attached, []int32) (int64, error) {
	return 0, fmt.Errorf("%w: rank %d is another process, and takes KV as bytes", engine.ErrInvalid, h.s.e.o.Rank)
}

// Start begins to decode.
func (h *Reservation) Start(first []infer.Token) (*Sequence, error) {
	if err := h.s.e.run(h.s, order{Do: start, Of: h.s.handle, First: first}); err != nil {
		return nil, err
	}
	return h.s, nil
}

// Keep ends the reservation; what was installed of the first tokens stays, cached.
func (h *Reservation) Keep(tokens int) {
	h.s.e.orders.tell(order{Do: keep, Of: h.s.handle, Count: tokens})
}

// Cancel gives slot and blocks back; after Start it does nothing.
func (h *Reservation) Cancel() { h.s.e.orders.tell(order{Do: give, Of: h.s.handle}) }

// Export is KV of the rank, leased to a transfer; see engine.Export.
type Export struct {
	e      *Engine
	handle int64
	tokens int
	wake   chan struct{} // capacity 1

	mu       sync.Mutex // guards the fields below
	spans    []infer.Span
	end      error // io.EOF when all spans are there
	released bool
}

func newExport(e *Engine, handle int64, tokens int) *Export {
	return &Export{e: e, handle: handle, tokens: tokens, wake: make(chan struct{}, 1)}
}

// Lend leases what the rank has cached of the beginning of a prompt; nil: nothing.
func (e *Engine) Lend(tokens []int32) *Export {
	x := newExport(e, e.handle.Add(1), 0)
	e.mu.Lock()
	e.exports[x.handle] = x
	e.mu.Unlock()
	it, err := e.orders.call(context.Background(), order{Do: lend, Of: x.handle, Tokens: tokens}, nil, nil)
	if err == nil && it.Count > 0 {
		x.tokens = it.Count
		return x
	}
	e.mu.Lock()
	delete(e.exports, x.handle)
	e.mu.Unlock()
	return nil
}

// Tokens is the number of tokens whose KV is exported.
func (x *Export) Tokens() int { return x.tokens }

// NextSpan waits for the next part that is written; see engine.Export.
func (x *Export) NextSpan(ctx context.Context) (infer.Span, error) {
	return engine.AwaitSpan(ctx, x.wake, x.next)
}

func (x *Export) next() (span infer.Span, ok bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.released:
		return span, true, engine.ErrCancelled
	case x.end != nil && !errors.Is(x.end, io.EOF):
		return span, true, x.end
	case len(x.spans) > 0:
		span = x.spans[0]
		x.spans = x.spans[1:]
		return span, true, nil
	}
	return span, x.end != nil, x.end
}

func (x *Export) add(spans []infer.Span) {
	x.mu.Lock()
	x.spans = append(x.spans, spans...)
	x.mu.Unlock()
	x.signal()
}

func (x *Export) fail(err error) {
	x.mu.Lock()
	x.end = err
	x.mu.Unlock()
	x.signal()
}

func (x *Export) signal() {
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// Read copies a span to dst, which has its size. It waits for the copy also when ctx ends.
func (x *Export) Read(ctx context.Context, span infer.Span, dst []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := x.e.kv.call(ctx, order{Do: read, Of: x.handle, Span: span, Count: len(dst)}, nil, dst)
	return err
}

// Blocks is refused: the blocks are not this process's.
func (x *Export) Blocks(infer.Span) ([]int32, error) {
	return nil, fmt.Errorf("%w: rank %d is another process, and gives KV as bytes", engine.ErrInvalid, x.e.o.Rank)
}

// Release ends the lease.
func (x *Export) Release() {
	x.mu.Lock()
	done := x.released
	x.released, x.spans = true, nil
	x.mu.Unlock()
	x.signal()
	if done {
		return
	}
	x.e.mu.Lock()
	delete(x.e.exports, x.handle)
	x.e.mu.Unlock()
	x.e.orders.tell(order{Do: release, Of: x.handle})
}
