package proxy

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/sse"
)

// attempt is one try of a sub-request on one pair of nodes.
type attempt struct {
	s       *session
	sub     *sub
	n       int
	choice  *pool.Choice
	stop    context.CancelCauseFunc // ends its legs; nil: it was not placed
	style   string
	id      int64 // disagg_request_id; 0: aggregated
	stamps  phase.Stamps
	times   *times
	failure *api.Error
	fault   string // leg that failed it: ctx or gen
	cutNS   *int64 // when the stream was cut that this attempt goes on after; nil: it begins the answer

	had       int             // tokens that earlier attempts gave
	open      [][]byte        // what the bodies of both legs begin with
	calls     []*prefillCall  // context legs: one, unless prefill went on elsewhere
	calls0    [1]*prefillCall // memory of calls
	call0     prefillCall     // of the first of them
	serving   *prefillCall    // the one that served, or failed last; nil: none was sent
	genLeg    *phase.Leg      // nil: not sent
	genLeg0   phase.Leg       // memory of genLeg
	ctxAnswer *api.CtxAnswer  // of the context leg that served
	gen       *upstream.Response
	split     sse.Splitter
	rewriter  *api.Rewriter // of the streamed chunks
	rewriter0 api.Rewriter  // memory of rewriter
	genUsage  *api.Usage
	tokens    int // token ids seen in this attempt's stream
	finish    string
	broke     atomic.Bool    // a node went away under a leg, or could not be reached
	kvThere   atomic.Bool    // the generation node needs no context node any more
	rest      sync.WaitGroup // releases of KV that the answer does not wait for
}

func (a *attempt) fail(e *api.Error) *api.Error {
	if a.failure == nil {
		a.failure = e
	}
	return e
}

// times is the memory of an attempt's stamps, apart from the attempt, which a record must not hold.
type times struct {
	placed, begun, genDispatch, genHeaders, firstToken, lastToken, firstSent int64

	ctx callTimes // of its first context leg
}

// taken is a stamp, or nil where it was not taken.
func taken(ns *int64) *int64 {
	if *ns == 0 {
		return nil
	}
	return ns
}

// stamp writes the time to t.
func (a *attempt) stamp(t *int64) *int64 {
	*t = a.s.p.o.Steady.Now()
	return t
}

func (a *attempt) now() *int64 { return a.stamp(new(int64)) }

func (a *attempt) place(tried *exclusions) *api.Error {
	p := a.s.p
	c, err := a.pick(tried)
	if err != nil {
		return api.Unavailable("place", retryAfter, "no nodes can take this request now: %v", err)
	}
	if !a.sub.fits(c) {
		c.Release()
		return api.Unavailable("place", retryAfter, "no node holds the checkpoint that began this answer")
	}
	a.choice, a.style = c, p.styleOf(c)
	if a.style != Aggregated {
		a.id = p.ids.next()
	}
	p.health.begin(c)
	p.met.decisions.WithLabelValues(c.Decision.Policy, a.style, c.Cause).Inc()
	a.stamps.PlacedNS = a.stamp(&a.times.placed)
	return nil
}

// pick asks the pool, first without the nodes that breakers refuse, so that a breaker never takes the last one. An answer
// that has begun may go on at a node that failed it before, when there is no other.
func (a *attempt) pick(tried *exclusions) (*pool.Choice, error) {
	p := a.s.p
	if ctxs, gens := p.health.refused(); len(ctxs)+len(gens) > 0 {
		careful := exclusions{ctx: append(ctxs, tried.ctx...), gen: append(gens, tried.gen...)}
		if c, err := p.o.Pool.Pick(a.sub.ask(&careful, a.had)); err == nil {
			return c, nil
		}
	}
	c, err := p.o.Pool.Pick(a.sub.ask(tried, a.had))
	if err != nil && len(a.sub.given) > 0 {
		return p.o.Pool.Pick(a.sub.ask(&exclusions{}, a.had))
	}
	return c, err
}

// run runs the legs under one context: what ends one ends the other, and so does the end of the request's life. The first leg
// begins where placing ended, so that what is made for both is in a span.
func (a *attempt) run(ctx context.Context) *api.Error {
	begun := a.stamp(&a.times.begun)
	ctx, cancel := context.WithCancelCause(ctx)
	a.stop = cancel
	life := time.AfterFunc(a.s.left(), func() { cancel(context.DeadlineExceeded) })
	defer life.Stop()
	a.choice.Gen.Watch(a)
	defer a.choice.Gen.Unwatch()
	switch a.style {
	case GenerationFirst:
		a.stamps.GenPrepareNS = begun
		return a.generationFirst(ctx, cancel)
	case ContextFirst:
		return a.contextFirst(ctx, cancel, *begun)
	default:
		a.stamps.GenPrepareNS = begun
		return a.single(ctx, cancel)
	}
}

// Gone cancels the attempt when its generation node goes away. The connection of a finished stream is not cut by it: its body
// was drained, or is closed in settle.
func (a *attempt) Gone(error) { a.gone("gen", a.choice.Gen, a.stop) }

func (a *attempt) gone(stage string, l *pool.Lease, cancel context.CancelCauseFunc) {
	a.broke.Store(true)
	cancel(api.Failed(stage, true, "%s node %s is gone", roleWord(stage), l.Name))
}

func roleWord(stage string) string {
	if stage == "ctx" {
		return "context"
	}
	return "generation"
}

func (a *attempt) single(ctx context.Context, cancel context.CancelCauseFunc) *api.Error {
	if e := a.openGen(ctx, a.aloneBody()); e != nil {
		cancel(e)
		return e
	}
	return a.ending(cancel, a.relay(ctx))
}

// ending cancels the context of a failed attempt; a good one keeps its connection until it is drained.
func (a *attempt) ending(cancel context.CancelCauseFunc, e *api.Error) *api.Error {
	if e != nil {
		cancel(e)
	}
	return e
}

const (
	verdictWait = 100 * time.Millisecond // for the context leg's own word when KV did not arrive
	answerWait  = 2 * time.Second        // for the context leg's answer after the stream's end: only its usage is missing
)

// generationFirst: the generation node admits, then prefill starts, and its KV travels while it runs.
func (a *attempt) generationFirst(ctx context.Context, cancel context.CancelCauseFunc) *api.Error {
	if e := a.openGen(ctx, a.genFirstBody()); e != nil {
		cancel(e)
		return e
	}
	begun, open := a.s.p.o.Steady.Now(), a.base()
	ctxDone := make(chan *api.Error, 1)
	go func() {
		e := a.prefill(ctx, api.GenerationFirst, begun, open)
		if e != nil && !a.kvThere.Load() {
			cancel(e)
		}
		ctxDone <- e
	}()
	e := a.relay(ctx)
	if e == nil {
		return a.awaitCtx(cancel, ctxDone)
	}
	if e.Stage == "kv" {
		// The context node may be what failed: it says so itself, or its connection does.
		select {
		case ce := <-ctxDone:
			ctxDone <- ce
			if ce != nil && ce.Stage != "kv" {
				e = ce
			}
		case <-time.After(verdictWait):
		}
	}
	if e.Stage == "kv" && context.Cause(ctx) == error(e) { //nolint:errorlint // this very error, not one like it
		a.fault = "gen" // the context node misses its receiver: it was its leg that ended the stream
	}
	cancel(e)
	<-ctxDone
	return e
}

// awaitCtx waits for the context leg's answer after the stream's end. The client does not wait for what only usage needs.
func (a *attempt) awaitCtx(cancel context.CancelCauseFunc, ctxDone <-chan *api.Error) *api.Error {
	select {
	case <-ctxDone:
		return nil
	default:
	}
	if e := a.flush(); e != nil {
		cancel(e)
		<-ctxDone
		return e
	}
	select {
	case <-ctxDone:
	case <-time.After(answerWait):
		cancel(errNoAnswer)
		<-ctxDone
	}
	return nil
}

var errNoAnswer = errors.New("proxy: the context leg did not answer in time")

// contextFirst: prefill, which begins at begun, then generation with what its answer says.
func (a *attempt) contextFirst(ctx context.Context, cancel context.CancelCauseFunc, begun int64) *api.Error {
	if e := a.prefill(ctx, api.ContextFirst, begun, a.base()); e != nil {
		cancel(e)
		a.serving.release() // prefill may have ended while the answer was on its way
		return e
	}
	a.stamps.GenPrepareNS = a.stamps.CtxDoneNS // the generation leg is made of the answer
	first := a.ctxAnswer.Choices[0]
	if !first.GoesOn() {
		return a.complete(first)
	}
	body, e := a.genBodyAfter(a.ctxAnswer)
	if e == nil {
		e = a.openGen(ctx, body)
	}
	if e != nil {
		cancel(e)
		a.serving.release() // nobody has claimed it
		return e
	}
	return a.ending(cancel, a.relay(ctx))
}

// header appends the lines that both legs have.
func (a *attempt) header(b []byte) []byte {
	s := a.s
	line := func(b []byte, name, value string) []byte {
		return append(append(append(append(b, name...), ": "...), value...), "\r\n"...)
	}
	number := func(b []byte, name string, n int64) []byte {
		return append(strconv.AppendInt(append(append(b, name...), ": "...), n, 10), "\r\n"...)
	}
	b = line(b, api.HeaderRequestID, s.publicID()) // ids and names were checked: they hold no line ends
	b = line(b, api.HeaderRouter, s.p.o.Name)
	b = line(b, api.HeaderRouterRequest, s.id)
	b = number(b, api.HeaderSub, int64(a.sub.index))
	b = number(b, api.HeaderAttempt, int64(a.n))
	b = line(b, api.HeaderReturnMetrics, "1")
	streamed := "0"
	if s.req.Stream {
		streamed = "1"
	}
	b = line(b, api.HeaderStreamed, streamed)
	if s.trace != "" {
		b = line(b, api.HeaderTraceparent, s.trace)
	}
	return number(b, api.HeaderDeadline, max(1, s.left().Milliseconds()))
}

func (a *attempt) path() string {
	if a.s.req.Chat {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

// settle gives back what outlived the attempt's run: the connection of the generation leg.
func (a *attempt) settle() {
	a.rest.Wait()
	if a.stop != nil {
		defer a.stop(nil)
	}
	if a.gen == nil {
		return
	}
	if a.failure != nil {
		_ = a.gen.Close()
		return
	}
	a.gen.Drain(drainTime)
}

const drainTime = 50 * time.Millisecond
