package pool

import (
	"meridian.internal/router/place"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// minLearn is the fewest prompt tokens whose prefill says something of a node's rate.
const minLearn = 8

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
		}
	}
	if d, h := l.Decision, l.Handover; d != nil && h != nil && d.Ctx != "" {
		p.learnHandover(d.Ctx, d.Gen, h)
	}
}

// learnPrefill takes the time of the chunks' steps, without the queue before and between them.
func (p *Pool) learnPrefill(f *timeline.Phase) {
	m := p.byName(string(f.Role), f.Node)
	start, end, tokens := f.Chunks.Column("forward_start_ns"), f.Chunks.Column("sample_end_ns"), f.Chunks.Column("tokens")
	if m == nil || len(start) == 0 {
		return
	}
	var ns, n int64
	for i := range start {
		ns += end[i] - start[i]
		n += tokens[i]
	}
	if n >= minLearn && ns > 0 {
		m.prefill.Add(float64(n), float64(ns))
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
	w.costNS = w.handover.At(float64(h.Bytes))
	w.samples++
	p.moved.Add(float64(h.Tokens), float64(h.Bytes))
	if h.WireNS > 0 { // while prefill runs, reads wait for it too: the wire may be faster than this
		w.bytesPerS = smooth(w.bytesPerS, float64(h.Bytes)*1e9/float64(h.WireNS))
	}
}

func smooth(old, sample float64) float64 {
	if old == 0 {
		return sample
	}
	return old + (sample-old)/8
}

func (p *Pool) byName(role, name string) *member {
	if m := p.members[role+"."+name]; m != nil {
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

// pairCosts writes what each context node's hand-over to g costs over the cheapest one, in prompt tokens of that node's
// measured rate. Pairs that were never measured cost nothing more, so that they get measured.
func (p *Pool) pairCosts(c *class, g *member) {
	nodes := c.sides[place.Prefill].nodes
	cheapest := -1.0
	for _, w := range g.pairs {
		if w.samples > 0 && (cheapest < 0 || w.costNS < cheapest) {
			cheapest = w.costNS
		}
	}
	for x, w := range g.pairs {
		if x.table == nil {
			continue
		}
		if w.state == Refused {
			nodes[x.at].Rank = place.Excluded
		}
		if slope := x.prefill.Slope(); w.samples > 0 && slope > 0 {
			extra := int((w.costNS - cheapest) / slope)
			nodes[x.at].PairTokens = float64(extra / costGrain * costGrain)
		}
	}
}

// forgetCosts undoes pairCosts.
func (p *Pool) forgetCosts(c *class, g *member) {
	nodes := c.sides[place.Prefill].nodes
	for x := range g.pairs {
		if x.table != nil {
			nodes[x.at].PairTokens, nodes[x.at].Rank = 0, x.rank()
		}
	}
}
