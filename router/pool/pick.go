package pool

import (
	"cmp"
	"slices"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/shared/phase"
)

// Ask is what a request needs.
type Ask struct {
	Model        string
	Tokens       int           // prompt tokens; an estimate where the text is not tokenized
	Prefix       []Prefix      // blocks of the prompt, from Hash; nil: its cached part is not looked up
	Conversation string        // what the conversation policy keeps together; "": the beginning of the prompt
	Life         time.Duration // what is left of the request's time; claims expire soon after. 0: not known
	Aggregated   bool          // one node does all
	Fallback     bool          // one node may do all: where no pair is, or where it is faster
	ExcludeCtx   []string      // names that were tried
	ExcludeGen   []string
}

// Causes of a choice, few enough for a label of a metric.
const (
	CausePair       = "pair"          // a context and a generation node
	CauseAggregated = "aggregated"    // one node was asked for
	CauseNoPair     = "no_pair"       // one node, since there is no pair
	CauseLocal      = "local_cheaper" // the generation node prefills: estimated to be faster than a context node
)

// Choice is where a request goes. An aggregated one has only Gen.
type Choice struct {
	Ctx      *Lease
	Gen      *Lease
	Cause    string
	Lender   string // KV address of a peer from which an aggregated request's node fetches cached KV; "": from none
	Decision phase.Decision
}

// Release gives both claims back.
func (c *Choice) Release() {
	if c.Ctx != nil {
		c.Ctx.Release()
	}
	if c.Gen != nil {
		c.Gen.Release()
	}
}

// Pick chooses nodes and claims them. The caller releases the choice.
func (p *Pool) Pick(a Ask) (*Choice, error) {
	a.Tokens = max(a.Tokens, 1)
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if a.Aggregated {
		return p.pickOne(a, now, CauseAggregated)
	}
	if c := p.pickPair(a, now); c != nil {
		return c, nil
	}
	if a.Fallback {
		return p.pickOne(a, now, CauseNoPair)
	}
	return nil, p.whyNone(a)
}

// PickCtx chooses and claims another context node for a generation node that is claimed already.
func (p *Pool) PickCtx(g *Lease, a Ask) (*Lease, error) {
	a.Tokens = max(a.Tokens, 1)
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.member.table == nil {
		return nil, p.whyNone(a)
	}
	q := p.query(a)
	c := p.classOf(g.member)
	at, ok := p.pickCtx(c, g.member, a, &decision{now: now, q: &q})
	if !ok {
		return nil, p.whyNone(a)
	}
	ctxs := &c.sides[place.Prefill]
	return p.newLease(ctxs.members[at], claims(place.Prefill, a.Tokens-q.Matched(&ctxs.nodes[at])), a.Life), nil
}

// pickPair chooses the generation node, and then the context node that suits it; nil when there is no pair.
func (p *Pool) pickPair(a Ask, now int64) *Choice {
	q := p.query(a)
	for _, c := range p.classesOf(a.Model) {
		if ch := p.pickIn(c, a, &q, now); ch != nil {
			return ch
		}
	}
	return nil
}

func (p *Pool) pickIn(c *class, a Ask, q *place.Query, now int64) *Choice {
	if c.sides[place.Prefill].count() == 0 {
		return nil
	}
	gens := &c.sides[place.Decode]
	defer gens.restore(gens.exclude(a.ExcludeGen))
	for range gens.nodes {
		at, ok := p.choose(p.o.GenPolicy, place.Decode, gens, q)
		if !ok {
			return nil
		}
		d := decision{now: now, q: q, policies: [2]place.Policy{p.o.CtxPolicy, p.o.GenPolicy}, looks: p.looks(a)}
		d.gen(p, gens, at)
		if x, ok := p.pickCtx(c, gens.members[at], a, &d); ok {
			return p.claimPair(c, x, at, a, &d)
		}
		gens.nodes[at].Rank = place.Excluded // all its pairs were refused
		defer gens.members[at].sync()
	}
	return nil
}

// pickCtx chooses the context node for g.
func (p *Pool) pickCtx(c *class, g *member, a Ask, d *decision) (int, bool) {
	ctxs := &c.sides[place.Prefill]
	g.charge(ctxs.nodes)
	tried := ctxs.exclude(a.ExcludeCtx)
	at, ok := p.choose(p.o.CtxPolicy, place.Prefill, ctxs, d.q)
	if ok {
		d.ctx(p, ctxs, at)
	}
	g.refund(ctxs)
	ctxs.restore(tried)
	return at, ok
}

// claimPair claims the two, or the generation node alone where it is faster without the other.
func (p *Pool) claimPair(c *class, ctxAt, genAt int, a Ask, d *decision) *Choice {
	q := d.q
	ctxs, gens := &c.sides[place.Prefill], &c.sides[place.Decode]
	x, g := ctxs.members[ctxAt], gens.members[genAt]
	xn, gn := &ctxs.nodes[ctxAt], &gens.nodes[genAt]
	way := place.Way{Ctx: xn, Gen: gn, CtxPrefill: &x.prefill, GenPrefill: &g.prefill, BytesPerToken: p.moved.Slope()}
	if w := g.pairs[x]; w != nil {
		way.Handover = &w.handover
	}
	d.costs, d.known = way.Estimate(q)
	costs := &d.costs
	if d.looks {
		p.counts.placedTokens += int64(a.Tokens)
	}
	have, lender := q.Matched(gn), ""
	if d.known && p.o.GenPolicy.Matches() {
		b := p.borrow(c, x, g, gn, q)
		switch {
		case b.lender == nil:
		case b.localNS < costs.LocalNS+costs.TokenNS*float64(b.matched-b.had):
			costs.LocalNS, have, lender = b.localNS, b.matched, b.lender.info.KVAddr
			d.borrow = &b
		default:
			b.declined(g)
		}
	}
	left := a.Tokens - have
	if a.Fallback && p.o.GenPolicy.Matches() && left <= p.o.LocalMax && d.known && costs.Local(left) {
		d.matched = have
		p.counts.matchedTokens += int64(have)
		if lender != "" {
			p.counts.borrowed++
		}
		u := claims(place.Decode, a.Tokens).plus(claims(place.Prefill, left))
		return &Choice{Cause: CauseLocal, Lender: lender, Gen: p.newLease(g, u, a.Life), Decision: d.local(left)}
	}
	d.matched = q.Matched(xn)
	p.counts.matchedTokens += int64(d.matched)
	return &Choice{
		Cause: CausePair, Ctx: p.newLease(x, claims(place.Prefill, a.Tokens-d.matched), a.Life),
		Gen: p.newLease(g, claims(place.Decode, a.Tokens), a.Life), Decision: d.pair(),
	}
}

// pickOne places an aggregated request: generation nodes first, since decode is most of its time.
func (p *Pool) pickOne(a Ask, now int64, cause string) (*Choice, error) {
	q := p.query(a)
	classes := p.classesOf(a.Model)
	for _, side := range []place.Side{place.Decode, place.Prefill} {
		policy := p.o.GenPolicy
		if side == place.Prefill {
			policy = p.o.CtxPolicy
		}
		for _, c := range classes {
			t := &c.sides[side]
			tried := t.exclude(a.ExcludeGen)
			at, ok := p.choose(policy, side, t, &q)
			t.restore(tried)
			if ok {
				d := decision{now: now, q: &q, policies: [2]place.Policy{policy, policy}, looks: p.looks(a), matched: q.Matched(&t.nodes[at])}
				d.add(p, side, t, at)
				u := claims(place.Decode, a.Tokens).plus(claims(place.Prefill, a.Tokens-d.matched))
				return &Choice{Cause: cause, Gen: p.newLease(t.members[at], u, a.Life), Decision: d.alone(t.members[at].info.Name, cause)}, nil
			}
		}
	}
	return nil, p.whyNone(a)
}

// classesOf lists the checkpoints under a model's name: the one with the fewest sequences per generation node first.
func (p *Pool) classesOf(model string) []*class {
	list := p.models[model]
	if len(list) < 2 {
		return list
	}
	load := func(c *class) float64 {
		gens, sum := &c.sides[place.Decode], 0
		for i := range gens.nodes {
			sum += gens.nodes[i].Sequences
		}
		return float64(sum) / float64(max(gens.count(), 1))
	}
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b *class) int { return cmp.Compare(load(a), load(b)) })
	return list
}

// count is the number of nodes that may be chosen.
func (t *table) count() int {
	n := 0
	for i := range t.nodes {
		if t.nodes[i].Rank != place.Excluded {
			n++
		}
	}
	return n
}

// exclude takes the named nodes out of a choice, until restore.
func (t *table) exclude(names []string) []int {
	if len(names) == 0 {
		return nil
	}
	var out []int
	for i := range t.nodes {
		if slices.Contains(names, t.nodes[i].Name) {
			t.nodes[i].Rank = place.Excluded
			out = append(out, i)
		}
	}
	return out
}

func (t *table) restore(excluded []int) {
	for _, i := range excluded {
		t.nodes[i].Rank = t.members[i].rank()
	}
}

// query is what placement asks for a request; it is good until the next.
func (p *Pool) query(a Ask) place.Query {
	q := place.Query{Tokens: a.Tokens, Rand: random, Held: p.match(a)}
	switch {
	case a.Conversation != "":
		q.Key = place.SeedOf(a.Conversation)
	case len(a.Prefix) > 0 && len(a.Prefix[0].Blocks) > 0:
		q.Key = uint64(a.Prefix[0].Blocks[0]) | 1
	}
	return q
}

func (p *Pool) choose(policy place.Policy, side place.Side, t *table, q *place.Query) (int, bool) {
	q.Turn = p.turns[side]
	p.turns[side]++
	return p.chooser.Choose(policy, side, t.nodes, q)
}

// looks tells whether cached prefixes matter for the choice.
func (p *Pool) looks(a Ask) bool {
	return a.Prefix != nil && (p.o.CtxPolicy.Matches() || p.o.GenPolicy.Matches())
}

// match looks up how much of the prompt each node holds, by slot; nil where it does not matter.
func (p *Pool) match(a Ask) []int32 {
	if !p.looks(a) {
		return nil
	}
	p.held = slices.Grow(p.held[:0], len(p.slots))[:len(p.slots)]
	clear(p.held)
	for _, f := range a.Prefix {
		p.o.Index.Match(p.held, f.Blocks, f.PerBlock)
	}
	return p.held
}
