package ranks

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/infer"
)

// choice is a rank as the queue sees it.
type choice struct {
	rank    int
	load    infer.Load
	queued  int // accepted, without a slot; newer than load
	matched int // tokens of the prompt whose KV is there
}

// sequenceTokens is what a sequence that decodes, or waits, costs a rank as a newcomer sees it, in tokens of prefill.
const sequenceTokens = 32

// cost is the work between a prompt and its first token on a rank, in tokens of prefill: what is to be computed of it, and what
// stands before it or beside it.
func (c *choice) cost(prompt int) int {
	return prompt - c.matched + c.load.WaitingTokens + sequenceTokens*(c.load.Running+max(c.queued, c.load.Waiting))
}

// order sorts ranks by their cost for a prompt; of equals the first one from the rank whose turn it is.
func order(list []choice, prompt, turn int) {
	n := len(list)
	slices.SortFunc(list, func(a, b choice) int {
		if x, y := a.cost(prompt), b.cost(prompt); x != y {
			return x - y
		}
		return (a.rank-turn+n)%n - (b.rank-turn+n)%n
	})
}

// candidates are the ranks for a request, best first.
func (g *Group) candidates(r *infer.Request) []choice {
	list := make([]choice, len(g.ranks))
	for i, r := range g.ranks {
		list[i] = choice{rank: i, load: r.Load(), queued: r.Queued()}
	}
	if g.cache != nil {
		g.cache.match(r, list)
	}
	g.mu.Lock()
	turn := g.next
	g.next = (g.next + 1) % len(list)
	g.mu.Unlock()
	order(list, len(r.Prompt)+len(r.Output), turn)
	return list
}

// place gives a request to the best rank that takes it. It stays there: its KV does. A rank whose queue is full may take it later, one with
// too little KV never: the latter says nothing where there is one of the former.
func (g *Group) place(r *infer.Request, give func(executor) error) (err error) {
	if len(g.ranks) == 1 {
		return give(g.ranks[0])
	}
	for _, c := range g.candidates(r) {
		switch e := give(g.ranks[c.rank]); {
		case errors.Is(e, engine.ErrQueueFull):
			err = e
		case errors.Is(e, engine.ErrTooLong):
			err = cmp.Or(err, e)
		default:
			return e
		}
	}
	return err
}

// Lend leases what the rank with most of it has cached of the beginning of a prompt; nil if none has any. See engine.Lend.
func (g *Group) Lend(tokens []int32) (most Export) {
	for _, r := range g.ranks {
		switch x := r.Lend(tokens); {
		case x == nil:
		case most == nil || x.Tokens() > most.Tokens():
			if most != nil {
				most.Release()
			}
			most = x
		default:
			x.Release()
		}
	}
	return most
}

// Submit accepts an Aggregated or ContextOnly request; see engine.Engine.
func (g *Group) Submit(r infer.Request) (s Sequence, err error) {
	err = g.place(&r, func(k executor) (err error) {
		s, err = k.Submit(r)
		return err
	})
	return s, err
}

// Reserve waits until slot and blocks for a GenerationOnly request are there; see engine.Engine.
func (g *Group) Reserve(ctx context.Context, r infer.Request) (h Reservation, err error) {
	err = g.place(&r, func(k executor) (err error) {
		h, err = k.Reserve(ctx, r)
		return err
	})
	return h, err
}
