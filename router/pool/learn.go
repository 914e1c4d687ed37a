package pool

import (
	"slices"

	"meridian.internal/router/place"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

// maxPairs bounds the pairs of one generation node that are measured.
const maxPairs = 1024

// Learn measures rates from a request's line: prefill per node, hand-over per pair.
func (p *Pool) Learn(l *timeline.Line) {
	if l.Outcome != phase.Finished {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range l.Phases {
		if f := &l.Phases[i]; f.Role != phase.Disagg {
			p.learnPrefill(f)
			if l.Decision != nil && l.Decision.Ctx == "" && f.Peer != "" {
				p.learnLoan(f)
			}
		}
	}
	if d, h := l.Decision, l.Handover; d != nil && h != nil && d.Ctx != "" {
		p.learnHandover(d.Ctx, d.Gen, h)
	}
}

// learnPrefill takes the time of the chunks' steps, without the queue before and between them. In a pipeline several run at the same
// time.
func (p *Pool) learnPrefill(f *timeline.Phase) {
	m := p.byName(string(f.Role), f.Node)
	start, end, tokens := f.Chunks.Column("forward_start_ns"), f.Chunks.Column("sample_end_ns"), f.Chunks.Column("tokens")
	if m == nil || len(start) == 0 {
		return
	}
	var ns, n int64
	for i := range start {
		from := start[i]
		if i > 0 {
			from = max(from, end[i-1])
		}
		ns += end[i] - from
		n += tokens[i]
	}
	if n > 0 && ns > 0 {
		m.prefill.AddWork(float64(n), float64(ns))
	}
}

// learnHandover takes the part of the hand-over that prefill did not hide. Without aligned clocks that part is not known,
// and the pair stays as it was.
func (p *Pool) learnHandover(ctx, gen string, h *timeline.Handover) {
	x, g := p.byName("ctx", ctx), p.byName("gen", gen)
	if x == nil || g == nil || h.Bytes <= 0 || h.Tokens <= 0 || h.VisibleNS == nil {
		return
	}
	if g.pairs[x] == nil && len(g.pairs) >= maxPairs {
		return
	}
	w := g.pair(x)
	w.handover.Add(float64(h.Bytes), max(float64(*h.VisibleNS), 0))
	w.costNS, w.tokenNS = w.handover.At(float64(h.Bytes)), x.prefill.Slope()
	w.samples++
	g.stalePairs = true
	p.moved.Add(float64(h.Tokens), float64(h.Bytes))
	if h.WireNS > 0 { // while prefill runs, reads wait for it too: the wire may be faster than this
		w.bytesPerS = smooth(w.bytesPerS, float64(h.Bytes)*1e9/float64(h.WireNS))
		p.wire = smooth(p.wire, float64(h.Bytes)*1e9/float64(h.WireNS))
	}
}

func smooth(old, sample float64) float64 {
	if old == 0 {
		return sample
	}
	return old + (sample-old)/8
}

func (p *Pool) byName(role, name string) *member {
	if m := p.members[key(node.Role(role), name)]; m != nil {
		return m
	}
	for _, m := range p.members { // static nodes are kept by their address
		if m.static && string(m.info.Role) == role && m.info.Name == name {
			return m
		}
	}
	return nil
}

// costGrain: differences of hand-over costs below so many prompt tokens are noise, and nodes that differ by less take turns.
const costGrain = 32

// pairCost is what a context node's hand-over costs over the cheapest one, in prompt tokens of that node's measured rate.
type pairCost struct {
	at      int // of the context node in its table
	tokens  float64
	refused bool
}

// pairCosts lists the context nodes whose hand-over to m is refused or costs more than the cheapest one. Pairs that were never
// measured cost nothing more, so that they get measured. It is made anew when a pair of m has changed.
func (m *member) pairCosts() []pairCost {
	if !m.stalePairs {
		return m.costs
	}
	m.stalePairs, m.costs = false, slices.Grow(m.costs[:0], len(m.ways))
	cheapest := -1.0
	for _, w := range m.ways {
		if w.samples > 0 && (cheapest < 0 || w.costNS < cheapest) {
			cheapest = w.costNS
		}
	}
	for _, w := range m.ways {
		c := pairCost{refused: w.state == Refused}
		if w.samples > 0 && w.tokenNS > 0 {
			c.tokens = float64(int((w.costNS-cheapest)/w.tokenNS) / costGrain * costGrain)
		}
		if (c.refused || c.tokens > 0) && w.ctx.table != nil { // when it comes back, the tables and this are made anew
			c.at = w.ctx.at
			m.costs = append(m.costs, c)
		}
	}
	return m.costs
}

// charge writes the costs of hand-overs to m, until refund.
func (m *member) charge(nodes []place.Node) {
	for _, c := range m.pairCosts() {
		n := &nodes[c.at]
		n.PairTokens = c.tokens
		if c.refused {
			n.Rank = place.Excluded
		}
	}
}

func (m *member) refund(t *table) {
	for _, c := range m.costs {
		t.nodes[c.at].PairTokens = 0
		if c.refused {
			t.nodes[c.at].Rank = t.members[c.at].rank()
		}
	}
}
