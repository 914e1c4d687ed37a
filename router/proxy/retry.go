package proxy

import (
	"context"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

const (
	// maxInARow is how many attempts of a sub-request may follow each other without a new token.
	maxInARow = 3
	// maxAttempts bounds those that bring new tokens too: a cluster that loses a node every few tokens serves nobody.
	maxAttempts = 8
)

// exclusions are the nodes that failed a sub-request.
type exclusions struct{ ctx, gen []string }

// run tries the sub-request until it ends, or fails for good. An attempt after the first token goes on where the last one
// ended: prompt and tokens so far are prefilled elsewhere, and the client sees a gap.
func (b *sub) run(ctx context.Context) *api.Error {
	var tried exclusions
	var last *api.Error
	var cut *int64 // the answer's last token came before
	for n, row := 0, 0; ; n++ {
		a := b.attempt(n)
		a.cutNS = cut
		if e := a.place(&tried); e != nil {
			if last != nil {
				return last // nobody else is there: what failed first says more
			}
			b.tries = append(b.tries, a)
			return a.fail(e)
		}
		b.tries = append(b.tries, a)
		e := a.run(ctx)
		a.end(e)
		if e == nil {
			return nil
		}
		last = a.fail(e)
		progress := len(b.given) > a.had
		if row++; progress {
			row, cut = 1, a.now()
		}
		if row >= maxInARow || n+1 >= maxAttempts || !b.again(ctx, a, e, progress) {
			return last
		}
		tried.add(a)
		if !pause(ctx, backoff(row-1)) {
			return stopCause(ctx)
		}
	}
}

// attempt makes attempt n.
func (b *sub) attempt(n int) *attempt {
	a := &b.try0
	if n == 0 {
		b.tries = b.tries0[:0]
	} else {
		a = new(attempt)
	}
	a.s, a.sub, a.n, a.had, a.times = b.s, b, n, len(b.given), b.times(n)
	return a
}

// times is the memory of the stamps of attempt n.
func (b *sub) times(n int) *times {
	if n == 0 && b == b.s.subs[0] {
		return &b.s.times.first
	}
	return new(times)
}

// end gives back what the attempt held and judges its nodes.
func (a *attempt) end(e *api.Error) {
	if e != nil {
		if a.fault == "" {
			a.fault = faultOf(a, e)
		}
		if a.serving != nil {
			a.mark("ctx", a.serving.leg, e)
		}
		a.mark("gen", a.genLeg, e)
	}
	a.choice.Release()
	a.open = nil
	for _, k := range a.s.p.health.end(a, e) {
		a.s.p.o.Logger.Warn("breaker opened", "leg", k.Leg, "node", k.Node, "request_id", a.s.id)
	}
}

// mark says in a leg how it ended, for the case that its node cannot say so any more.
func (a *attempt) mark(leg string, l *phase.Leg, e *api.Error) {
	switch {
	case l == nil || leg == "ctx" && a.ctxAnswer != nil:
	case a.fault == leg:
		l.Outcome = outcomeOf(e)
	default:
		l.Outcome = phase.Cancelled
	}
}

// faultOf blames the leg that an error names. KV that did not arrive is the context node's fault, unless it says itself
// that its receiver is gone.
func faultOf(a *attempt, e *api.Error) string {
	if a.choice.Ctx != nil && (e.Stage == "ctx" || e.Stage == "kv") {
		return "ctx"
	}
	return "gen"
}

// again decides whether to try once more, and prepares for it.
func (b *sub) again(ctx context.Context, a *attempt, e *api.Error, progress bool) bool {
	p := b.s.p
	if ctx.Err() != nil || b.s.left() <= 0 || !e.Retryable || (b.started && !b.resumable()) {
		return false
	}
	if !progress && !b.pays(a.broke.Load() || e.Stage == "kv") {
		return false
	}
	if b.resumable() {
		p.met.resumes.Inc()
	} else {
		b.answer, b.given, b.opaque = answer{}, b.given[:0], false
	}
	p.met.retries.WithLabelValues(e.Stage).Inc()
	p.o.Logger.Warn("trying again", "request_id", b.s.id, "stage", e.Stage, "leg", a.fault, "tokens", len(b.given), "error", e.Message)
	return true
}

// pays takes a retry out of the budget. What a node's death broke may go on once for nothing: it hits all its requests at one
// moment, and no later ones, so that these retries cannot multiply.
func (b *sub) pays(broke bool) bool {
	p := b.s.p
	if free := broke && !b.moved; !free && !p.health.takeRetry() {
		p.met.retryRefused.Inc()
		return false
	}
	b.moved = b.moved || broke
	return true
}

// resumable tells whether another node can go on after the tokens so far.
func (b *sub) resumable() bool { return len(b.given) > 0 && !b.opaque }

// fits tells whether the nodes of a choice may go on with an answer that has begun: workers of ours with its checkpoint.
func (b *sub) fits(c *pool.Choice) bool {
	if len(b.given) == 0 {
		b.hash = c.Gen.Model.Hash
		return true
	}
	return !c.Gen.Foreign && c.Gen.Model.Hash == b.hash
}

// add excludes the node at fault.
func (x *exclusions) add(a *attempt) {
	if a.fault == "ctx" {
		x.ctx = append(x.ctx, a.choice.Ctx.Name)
		for _, c := range a.calls {
			x.ctx = append(x.ctx, c.lease.Name)
		}
	} else {
		x.gen = append(x.gen, a.choice.Gen.Name)
	}
}

// pause waits; false when ctx ended meanwhile.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
