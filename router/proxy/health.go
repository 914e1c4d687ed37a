package proxy

import (
	"math/rand/v2"
	"sync"
	"time"

	"meridian.internal/router/breaker"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
)

// health is what the legs of this router have learned of the nodes, and what may be tried again.
type health struct {
	now func() int64

	mu       sync.Mutex // held for short reads and writes; guards the rest
	breakers breaker.Set
	budget   *breaker.Budget
	hedge    *breaker.Hedge // nil: there is no second prefill
}

// newHealth makes one; hedge is the quantile of prefill times after which a second one may begin. 0: never.
func newHealth(now func() int64, hedge float64) *health {
	h := &health{now: now, budget: breaker.NewBudget(now())}
	if hedge > 0 {
		h.hedge = breaker.NewHedge(hedge)
	}
	return h
}

// refused lists the nodes whose breakers let no leg through.
func (h *health) refused() (ctx, gen []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.breakers.Refused("ctx", h.now(), nil), h.breakers.Refused("gen", h.now(), nil)
}

// begin says that legs are sent to the nodes of a choice.
func (h *health) begin(c *pool.Choice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.Ctx != nil {
		h.breakers.Begin(breaker.Key{Leg: "ctx", Node: c.Ctx.Name}, h.now())
	}
	h.breakers.Begin(breaker.Key{Leg: "gen", Node: c.Gen.Name}, h.now())
}

// end judges the nodes of an attempt, and returns the legs whose breakers opened by it. Only the leg at fault counts
// against its node.
func (h *health) end(a *attempt, e *api.Error) (opened []breaker.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	judge := func(leg, node string, done bool) {
		r := breaker.Neutral
		switch {
		case e != nil && a.fault == leg && countsAsFailure(e):
			r = breaker.Bad
		case done:
			r = breaker.Good
		}
		if k := (breaker.Key{Leg: leg, Node: node}); h.breakers.End(k, r, h.now()) {
			opened = append(opened, k)
		}
	}
	if a.choice.Ctx != nil {
		judge("ctx", a.choice.Ctx.Name, a.ctxAnswer != nil)
	}
	judge("gen", a.choice.Gen.Name, e == nil && a.gen != nil)
	return opened
}

// answers says that a node has answered its leg: others may try it too while the attempt goes on.
func (h *health) answers(leg, node string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.breakers.End(breaker.Key{Leg: leg, Node: node}, breaker.Neutral, h.now())
}

// ctxBegin says that a further context leg is sent to a node.
func (h *health) ctxBegin(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.breakers.Begin(breaker.Key{Leg: "ctx", Node: name}, h.now())
}

// ctxEnd judges the node of a context leg that does not serve; e is nil where that says nothing of it.
func (h *health) ctxEnd(name string, e *api.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := breaker.Neutral
	if e != nil && countsAsFailure(e) {
		r = breaker.Bad
	}
	h.breakers.End(breaker.Key{Leg: "ctx", Node: name}, r, h.now())
}

// prefilled takes the time of a context leg.
func (h *health) prefilled(tokens int, ns int64) {
	if h.hedge == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hedge.Observe(tokens, ns)
}

// hedgeAfter is how long to wait for a context leg before a second may be sent; false: none is.
func (h *health) hedgeAfter(tokens int) (time.Duration, bool) {
	if h.hedge == nil {
		return 0, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hedge.After(tokens)
}

func (h *health) takeHedge() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hedge.Take()
}

// countsAsFailure: overload, a client's fault and the end of the request's time are not the node's.
func countsAsFailure(e *api.Error) bool {
	switch e.Type {
	case api.TypeCancelled, api.TypeTimeout, api.TypeOverloaded, api.TypeUnavailable:
		return false
	}
	return e.Status() >= 500
}

// request adds what a request earns to the retry budget.
func (h *health) request() {
	h.mu.Lock()
	h.budget.Request(h.now())
	if h.hedge != nil {
		h.hedge.Request()
	}
	h.mu.Unlock()
}

// takeRetry spends one retry of the budget.
func (h *health) takeRetry() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.budget.Take(h.now())
}

// snapshot is for metrics.
func (h *health) snapshot() (breakers []breaker.Status, retriesLeft float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.breakers.Snapshot(h.now()), h.budget.Left(h.now())
}

func backoff(n int) time.Duration { return breaker.Backoff(n, rand.Float64()) }
