package pool

import (
	"fmt"
	"math"
	"strconv"

	"meridian.internal/router/place"
	"meridian.internal/shared/phase"
)

// maxCandidates of each role are kept in a decision: a record stays small however many nodes there are.
const maxCandidates = 3

// decision is the record of a choice while it is made.
type decision struct {
	now      int64
	q        *place.Query
	policies [2]place.Policy // ctx, gen
	names    [2]string
	looked   [2]int
	list     [2][maxCandidates]phase.Candidate
	listed   [2]int
	looks    bool // matched is known
	matched  int
	costs    place.Costs
	known    bool  // costs are estimated
	borrow   *loan // nil: it fetches nothing from a peer
}

func (d *decision) ctx(p *Pool, t *table, at int) { d.add(p, place.Prefill, t, at) }
func (d *decision) gen(p *Pool, t *table, at int) { d.add(p, place.Decode, t, at) }

// add notes the last choice of the pool's chooser.
func (d *decision) add(p *Pool, side place.Side, t *table, at int) {
	d.names[side], d.looked[side] = t.members[at].info.Name, p.chooser.Looked()
	var buf [maxCandidates]place.Candidate
	best := p.chooser.Best(buf[:0], at, maxCandidates)
	d.listed[side] = len(best)
	for i, x := range best {
		d.list[side][i] = d.describe(t.members[x.At], &t.nodes[x.At], x.Score)
	}
}

func (d *decision) describe(m *member, n *place.Node, score float64) phase.Candidate {
	c := phase.Candidate{
		Node: n.Name, Score: math.Round(score*1000) / 1000, QueuedTokens: n.QueuedTokens, Reserved: m.all.CtxLegs + m.all.GenLegs,
	}
	if d.looks {
		tokens := int64(d.q.Matched(n))
		c.MatchedTokens = &tokens
	}
	if m.load.known {
		age := d.now - m.load.atNS
		c.Running, c.Waiting, c.LoadAgeNS = m.load.Running, m.load.Waiting, &age
	}
	return c
}

func (d *decision) record(policy, reason string) phase.Decision {
	out := phase.Decision{
		Policy: policy, Ctx: d.names[place.Prefill], Gen: d.names[place.Decode], Reason: reason, Candidates: d.candidates(),
	}
	if d.looks {
		tokens := int64(d.matched)
		out.MatchedTokens = &tokens
	}
	if d.known {
		local, remote := int64(d.costs.LocalNS), int64(d.costs.RemoteNS)
		out.LocalNS, out.RemoteNS = &local, &remote
	}
	return out
}

func (d *decision) candidates() []phase.Candidate {
	out := make([]phase.Candidate, 0, d.listed[place.Prefill]+d.listed[place.Decode])
	for side, n := range d.listed {
		out = append(out, d.list[side][:n]...)
	}
	return out
}

func (d *decision) pair() phase.Decision {
	ctx, gen := d.policies[place.Prefill], d.policies[place.Decode]
	if ctx == gen {
		return d.record(string(ctx), string(ctx)+" among "+strconv.Itoa(d.looked[place.Prefill])+" ctx, "+strconv.Itoa(d.looked[place.Decode])+" gen")
	}
	return d.record(string(ctx+"/"+gen), fmt.Sprintf("%s among %d ctx, %s among %d gen", ctx, d.looked[place.Prefill], gen, d.looked[place.Decode]))
}

// local is the generation node alone. The context node that was looked at stays among the candidates.
func (d *decision) local(left int) phase.Decision {
	ctx, gen := d.policies[place.Prefill], d.policies[place.Decode]
	reason := fmt.Sprintf("local prefill: %d uncached tokens take %.1f ms on %s, %.1f ms by %s and hand-over",
		left, d.costs.LocalNS/1e6, d.names[place.Decode], d.costs.RemoteNS/1e6, d.names[place.Prefill])
	if b := d.borrow; b != nil {
		reason += fmt.Sprintf("; %d tokens are fetched from %s in %.1f ms", b.matched-b.had, b.lender.info.Name, b.fetchNS/1e6)
	}
	d.names[place.Prefill] = ""
	return d.record(string(ctx+"/"+gen), reason)
}

// alone is one node of whatever role.
func (d *decision) alone(node, cause string) phase.Decision {
	policy, n := d.policies[0], max(d.looked[0], d.looked[1])
	d.names = [2]string{place.Decode: node}
	why := "aggregated was asked for"
	if cause == CauseNoPair {
		why = "no pair is available"
	}
	return d.record(string(policy), fmt.Sprintf("%s; %s among %d", why, policy, n))
}
