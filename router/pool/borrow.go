package pool

import (
	"meridian.internal/router/place"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// loan is KV that a generation node can fetch from a peer which has more of a prompt cached.
type loan struct {
	lender  *member // nil: there is none, or nothing is known of what it would take
	had     int     // tokens that the node has itself
	matched int     // tokens that it has after
	fetchNS float64
	localNS float64 // the fetch, then prefill of the rest
}

// borrow looks for the peer of g, of either role, that has most of the prompt.
func (p *Pool) borrow(c *class, x, g *member, gn *place.Node, q *place.Query) loan {
	has := q.Matched(gn)
	b := loan{had: has, matched: has}
	for slot, tokens := range q.Held {
		if int(tokens) <= b.matched {
			continue
		}
		m := p.slots[slot]
		if m == nil || m == g || m.table == nil || m.info.KVAddr == "" || m.rank() != place.Good {
			continue
		}
		if m.table != &c.sides[place.Prefill] && m.table != &c.sides[place.Decode] {
			continue // another checkpoint: its KV is not this one's
		}
		if n := q.Matched(&m.table.nodes[m.at]); n > b.matched {
			b.lender, b.matched = m, n
		}
	}
	if b.lender == nil {
		return b
	}
	if p.wire == 0 || !p.moved.Known() {
		return loan{}
	}
	b.fetchNS = p.onWire(p.moved.Slope()*float64(b.matched-b.had)) + g.loans[b.lender]
	b.localNS = place.Borrow(gn, &g.prefill, &x.prefill, q.Tokens-b.matched, b.fetchNS)
	return b
}

// learnLoan takes what a fetch from a peer took, from the request to the last installed byte.
func (p *Pool) learnLoan(f *timeline.Phase) {
	var asked, installed int64
	for i := range f.Transfer {
		switch s := &f.Transfer[i]; s.Name {
		case "requested_ns":
			asked = s.Raw
		case "installed_ns":
			installed = s.Raw
		}
	}
	g, lender := p.byName(string(f.Role), f.Node), p.byName(string(phase.Gen), f.Peer)
	if lender == nil {
		lender = p.byName(string(phase.Ctx), f.Peer)
	}
	if g == nil || lender == nil || f.Bytes <= 0 || asked == 0 || installed <= asked || p.wire == 0 {
		return
	}
	over, known := g.loans[lender]
	switch {
	case g.loans == nil:
		g.loans = map[*member]float64{}
	case !known && len(g.loans) >= maxPairs:
		return
	}
	g.loans[lender] = over + (max(float64(installed-asked)-p.onWire(float64(f.Bytes)), 0)-over)/8
}

// onWire is what bytes take at the rate of all hand-overs, in ns.
func (p *Pool) onWire(bytes float64) float64 { return bytes * 1e9 / p.wire }

// declined takes note of a loan that was too dear. What is not tried is not measured, so that one bad time would be believed
// for ever: it fades.
func (b *loan) declined(g *member) {
	if over := g.loans[b.lender]; over > 0 {
		g.loans[b.lender] = over * (1 - 1.0/32)
	}
}
