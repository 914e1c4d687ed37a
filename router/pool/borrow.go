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

// borrow looks for the peer of g, of either role, that has most of the prompt. The caller has written what each node holds.
func (p *Pool) borrow(c *class, x, g *member, gn *place.Node, a Ask) loan {
	b := loan{had: gn.Matched, matched: gn.Matched}
	for _, h := range p.hits {
		if int(h.Slot) >= len(p.slots) {
			continue
		}
		m := p.slots[h.Slot]
		if m == nil || m == g || m.table == nil || m.info.KVAddr == "" || m.rank() != place.Good {
			continue
		}
		if m.table != &c.sides[place.Prefill] && m.table != &c.sides[place.Decode] {
			continue // another checkpoint: its KV is not this one's
		}
		if n := m.table.nodes[m.at].Matched; n > b.matched {
			b.lender, b.matched = m, n
		}
	}
	if b.lender == nil {
		return b
	}
	bytes := p.moved.Slope() * float64(b.matched-b.had)
	switch w := g.loans[b.lender]; {
	case w != nil:
		b.fetchNS = w.At(bytes)
	case p.wire > 0 && bytes > 0: // never tried: as fast as hand-overs are
		b.fetchNS = bytes * 1e9 / p.wire
	default:
		return loan{}
	}
	b.localNS = place.Borrow(gn, &g.prefill, &x.prefill, a.Tokens-b.matched, b.fetchNS)
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
	if g == nil || lender == nil || f.Bytes <= 0 || asked == 0 || installed <= asked {
		return
	}
	if g.loans == nil {
		g.loans = map[*member]*place.Fit{}
	}
	w := g.loans[lender]
	if w == nil && len(g.loans) >= maxPairs {
		return
	}
	if w == nil {
		w = new(place.Fit)
		g.loans[lender] = w
	}
	w.Add(float64(f.Bytes), float64(installed-asked))
}
