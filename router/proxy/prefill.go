package proxy

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// prefillCall is one context leg of an attempt. There is one, unless it fails while its generation node waits for the KV,
// or takes long: then another context node computes the prompt too, under an id of its own, since KV has one consumer.
type prefillCall struct {
	a     *attempt
	lease *pool.Lease
	id    int64 // disagg_request_id
	body  body
	leg   *phase.Leg              // nil: not sent
	leg0  phase.Leg               // memory of leg
	stop  context.CancelCauseFunc // nil: not begun

	times *callTimes

	answer     *api.CtxAnswer
	failure    *api.Error
	releasedNS atomic.Int64 // when the node acknowledged that it holds no KV for the leg any more
}

// callTimes is the memory of a leg's stamps; 0: not taken.
type callTimes struct{ prepare, dispatch, done int64 }

// call makes the next context leg of the attempt.
func (a *attempt) call(l *pool.Lease, id int64, style int, open [][]byte) *prefillCall {
	c, times := &a.call0, &a.times.ctx
	if len(a.calls) == 0 {
		a.calls = a.calls0[:0]
	} else {
		c, times = new(prefillCall), new(callTimes)
	}
	*c = prefillCall{a: a, lease: l, id: id, times: times}
	c.times.prepare = a.s.p.o.Steady.Now()
	c.body = ctxBody(open, id, style)
	a.calls = append(a.calls, c)
	return c
}

// run runs the leg to its end.
func (c *prefillCall) run(ctx context.Context) *api.Error {
	a := c.a
	defer c.lease.Release()
	a.stamp(&c.times.dispatch)
	c.leg0 = a.leg(c.lease)
	c.leg = &c.leg0
	res, e := a.send(ctx, "ctx", c.lease, c.body, c.leg)
	c.body = body{}
	if e != nil {
		return e
	}
	defer res.Close()
	answer, err := res.ReadAll(maxCtxAnswer)
	if err != nil {
		return a.broken(ctx, "ctx", c.lease, err)
	}
	a.stamp(&c.times.done)
	if c.answer, err = api.ParseCtxAnswer(answer); err != nil {
		return api.Failed("ctx", true, "context node %s gave a malformed answer", c.lease.Name)
	}
	a.s.p.health.prefilled(len(a.sub.ids), c.times.done-c.times.dispatch)
	return nil
}

// watched runs the leg under a context that ends when the node goes away: its own, where the attempt may go on without it.
func (c *prefillCall) watched(ctx context.Context) *api.Error {
	if c.a.style == ContextFirst {
		c.lease.Watch(c)
		defer c.lease.Unwatch()
		return c.run(ctx)
	}
	return c.begin(ctx)()
}

// begin makes the context of the leg; what it returns runs it.
func (c *prefillCall) begin(ctx context.Context) func() *api.Error {
	ctx, c.stop = context.WithCancelCause(ctx)
	return func() *api.Error {
		defer c.stop(nil)
		c.lease.Watch(c)
		defer c.lease.Unwatch()
		return c.run(ctx)
	}
}

// Gone ends the leg when its node goes away, and the attempt where that cannot go on without it.
func (c *prefillCall) Gone(error) {
	stop := c.stop
	if stop == nil {
		stop = c.a.stop
	}
	c.a.gone("ctx", c.lease, stop)
}

// prefill runs context legs, whose bodies begin with open, until one of them serves. The first was begun at begun. Its
// caller waits for it before it looks at what they found.
func (a *attempt) prefill(ctx context.Context, style int, begun int64, open [][]byte) *api.Error {
	c := a.call(a.choice.Ctx, a.id, style, open)
	c.times.prepare = begun
	var e *api.Error
	if after, ok := a.s.p.health.hedgeAfter(len(a.sub.ids)); ok {
		c, e = a.race(ctx, c, after, open)
	} else {
		e = c.watched(ctx)
	}
	for e != nil {
		next := a.replace(ctx, c, e, open)
		if next == nil {
			break
		}
		c = next
		e = c.watched(ctx)
	}
	a.served(c, e)
	return e
}

// served takes over what the call found that served, or that failed last.
func (a *attempt) served(c *prefillCall, e *api.Error) {
	a.choice.Ctx, a.serving = c.lease, c
	a.stamps.CtxPrepareNS, a.stamps.CtxDispatchNS, a.stamps.CtxDoneNS = taken(&c.times.prepare), taken(&c.times.dispatch), taken(&c.times.done)
	if e != nil {
		c.leg.Outcome = outcomeOf(e)
		return
	}
	a.ctxAnswer = c.answer
	a.s.p.health.answers("ctx", c.lease.Name)
	if first := a.calls[0]; c != first {
		d := &a.choice.Decision
		d.Ctx = c.lease.Name
		d.Reason += "; prefill went on from " + first.lease.Name + " to " + c.lease.Name
	}
}

// kvWaitMS is how many ms a generation leg waits for another source when its KV breaks off, before it says that it did.
const kvWaitMS = "300"

// replace sends the context leg to another node when c failed with e while the generation node waits: that keeps its
// admission. Nil: there is none, or nothing that it could do.
func (a *attempt) replace(ctx context.Context, c *prefillCall, e *api.Error, open [][]byte) *prefillCall {
	p := a.s.p
	if a.style != GenerationFirst || ctx.Err() != nil || !e.Retryable || a.kvThere.Load() || len(a.calls) >= maxInARow {
		return nil
	}
	l, err := a.pickCtx()
	if err != nil {
		return nil
	}
	broke := a.broke.Load() || e.Stage == "kv"
	if !a.sub.pays(broke) || !pause(ctx, backoff(len(a.calls)-1)) {
		l.Release()
		return nil
	}
	next := a.call(l, p.ids.next(), api.GenerationFirst, open)
	if a.move(ctx, next) != nil {
		l.Release()
		a.calls = a.calls[:len(a.calls)-1]
		return nil
	}
	a.stamp(&next.times.prepare)
	c.leg.Outcome = outcomeOf(e)
	p.health.ctxEnd(c.lease.Name, e)
	p.health.ctxBegin(l.Name)
	p.met.retries.WithLabelValues("ctx").Inc()
	p.o.Logger.Warn("prefill goes on elsewhere", "request_id", a.s.id, "from", c.lease.Name, "to", l.Name, "error", e.Message)
	return next
}

// pickCtx chooses a context node that the attempt has not asked yet.
func (a *attempt) pickCtx() (*pool.Lease, error) {
	ctxs, _ := a.s.p.health.refused()
	x := exclusions{ctx: ctxs}
	for _, c := range a.calls {
		x.ctx = append(x.ctx, c.lease.Name)
	}
	return a.s.p.o.Pool.PickCtx(a.choice.Gen, a.sub.ask(&x, a.had))
}

// move tells the generation node to fetch the KV from c, and waits until it says that it does.
func (a *attempt) move(ctx context.Context, c *prefillCall) *api.Error {
	body := api.LegParams{Type: api.GenerationOnly, ID: c.id, CtxID: c.id, Style: api.GenerationFirst, Endpoint: "tcp://" + c.lease.KVAddr}.Append(nil)
	res, err := a.s.p.o.Client.Do(ctx, &upstream.Request{Method: "PUT", URL: a.choice.Gen.URL, Path: "/kv/" + strconv.FormatInt(a.id, 10), Header: a.header(nil), Body: [][]byte{body}})
	if err != nil {
		return api.Failed("gen", true, "generation node %s: %s", a.choice.Gen.Name, reason(err))
	}
	defer res.Close()
	text, err := res.ReadAll(maxErrorBody)
	switch {
	case err != nil:
		return api.Failed("gen", true, "generation node %s: %s", a.choice.Gen.Name, reason(err))
	case res.Status == 204:
		return nil
	}
	e := api.ParseError(res.Status, text, "gen")
	if res.Status == 404 && e.Stage == "kv" {
		a.kvThere.Store(true)
	}
	return e
}

var errSlower = errors.New("proxy: another context node was faster")

// race runs a second context leg beside first when that takes longer than after. The first that serves wins, the other is
// cancelled. It returns the winner, or the one that failed last.
func (a *attempt) race(ctx context.Context, first *prefillCall, after time.Duration, open [][]byte) (*prefillCall, *api.Error) {
	ended := make(chan *prefillCall, 2)
	start := func(c *prefillCall) {
		run := c.begin(ctx)
		go func() {
			c.failure = run()
			ended <- c
		}()
	}
	start(first)
	running := 1
	timer := time.NewTimer(after)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			if c := a.hedge(open); c != nil {
				start(c)
				running++
			}
		case c := <-ended:
			running--
			if c != first && c.failure == nil && a.style == GenerationFirst {
				c.failure = a.move(ctx, c)
			}
			if c != first {
				a.s.p.met.hedges.WithLabelValues(won(c)).Inc()
			}
			switch {
			case c.failure == nil && running > 0:
				a.giveUp(c, ended)
				return c, nil
			case running == 0:
				return c, c.failure
			}
			c.lost(outcomeOf(c.failure), c.failure)
		}
	}
}

func won(c *prefillCall) string {
	if c.failure == nil {
		return "won"
	}
	return "lost"
}

// hedge makes the second leg, if the cluster and then the budget have room for it.
func (a *attempt) hedge(open [][]byte) *prefillCall {
	p := a.s.p
	if a.kvThere.Load() {
		return nil
	}
	l, err := a.pickCtx()
	if err != nil {
		return nil
	}
	if !p.health.takeHedge() {
		l.Release()
		return nil
	}
	p.health.ctxBegin(l.Name)
	return a.call(l, p.ids.next(), api.ContextFirst, open) // its KV waits under a lease until it is known who wins
}

// giveUp cancels the leg that winner has beaten, and has its node acknowledge that it holds nothing for it.
func (a *attempt) giveUp(winner *prefillCall, ended <-chan *prefillCall) {
	for _, c := range a.calls {
		if c != winner && c.stop != nil {
			c.stop(errSlower)
		}
	}
	loser := <-ended
	if loser != a.calls[0] {
		a.s.p.met.hedges.WithLabelValues("lost").Inc()
	}
	loser.lost(phase.Cancelled, nil)
}

// lost ends a leg that does not serve, beside one that may.
func (c *prefillCall) lost(o phase.Outcome, e *api.Error) {
	c.leg.Outcome = o
	c.a.s.p.health.ctxEnd(c.lease.Name, e)
	c.a.rest.Go(c.release)
}
