package pool

import (
	"fmt"
	"slices"

	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

// Ask is what a request needs.
type Ask struct {
	Model      string
	Tokens     int      // prompt tokens; an estimate where the text is not tokenized
	Aggregated bool     // one node does all
	Fallback   bool     // no pair: one node may do all
	ExcludeCtx []string // names that were tried
	ExcludeGen []string
}

// Choice is where a request goes. An aggregated one has only Gen.
type Choice struct {
	Ctx      *Lease
	Gen      *Lease
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

// maxCandidates bounds the decision record; with more nodes it keeps the best.
const maxCandidates = 8

// Pick chooses nodes and claims them. The caller releases the choice.
func (p *Pool) Pick(a Ask) (*Choice, error) {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if a.Aggregated {
		return p.pickOne(a, now, "aggregated was asked for")
	}
	ctxs := p.eligible(&p.scratch[0], node.RoleCtx, a.Model, a.ExcludeCtx)
	gens := p.eligible(&p.scratch[1], node.RoleGen, a.Model, a.ExcludeGen)
	gens = slices.DeleteFunc(gens, func(g *member) bool { return !anyPairs(ctxs, g) })
	if len(gens) == 0 {
		if a.Fallback {
			return p.pickOne(a, now, "no pair is available")
		}
		return nil, p.whyNone(a)
	}
	c := &Choice{Decision: phase.Decision{Policy: p.o.CtxPolicy + "/" + p.o.GenPolicy}}
	gen, gs := p.best(gens, node.RoleGen, p.o.GenPolicy)
	ctxs = slices.DeleteFunc(ctxs, func(x *member) bool { return !pairs(x, gen) })
	ctx, cs := p.best(ctxs, node.RoleCtx, p.o.CtxPolicy)
	c.Decision.Ctx, c.Decision.Gen = ctx.info.Name, gen.info.Name
	c.Decision.Reason = fmt.Sprintf("%s among %d ctx, %s among %d gen", p.o.CtxPolicy, len(ctxs), p.o.GenPolicy, len(gens))
	c.Decision.Candidates = append(candidates(ctxs, cs, now), candidates(gens, gs, now)...)
	c.Ctx = p.newLease(ctx, true, false, a.Tokens)
	c.Gen = p.newLease(gen, false, true, 0)
	return c, nil
}

// pickOne places an aggregated request: generation nodes first, since decode is most of its time.
func (p *Pool) pickOne(a Ask, now int64, why string) (*Choice, error) {
	role, policy := node.RoleGen, p.o.GenPolicy
	list := p.eligible(&p.scratch[1], role, a.Model, a.ExcludeGen)
	if len(list) == 0 {
		role, policy = node.RoleCtx, p.o.CtxPolicy
		list = p.eligible(&p.scratch[1], role, a.Model, a.ExcludeGen)
	}
	if len(list) == 0 {
		return nil, p.whyNone(a)
	}
	m, scores := p.best(list, role, policy)
	return &Choice{
		Gen: p.newLease(m, true, true, a.Tokens),
		Decision: phase.Decision{
			Policy: policy, Gen: m.info.Name, Reason: fmt.Sprintf("%s; %s among %d", why, policy, len(list)),
			Candidates: candidates(list, scores, now),
		},
	}, nil
}

// PickGen claims another generation node that can go on with the KV of ctx.
func (p *Pool) PickGen(ctx *Lease, exclude []string) (*Lease, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.eligible(&p.scratch[1], node.RoleGen, ctx.Model.Name, exclude)
	list = slices.DeleteFunc(list, func(g *member) bool { return !pairs(ctx.member, g) })
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: no other generation node", ErrNone)
	}
	m, _ := p.best(list, node.RoleGen, p.o.GenPolicy)
	return p.newLease(m, false, true, 0), nil
}

// PickCtx claims another context node whose KV can go to gen, for a prefill of so many tokens.
func (p *Pool) PickCtx(gen *Lease, tokens int, exclude []string) (*Lease, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.eligible(&p.scratch[0], node.RoleCtx, gen.Model.Name, exclude)
	list = slices.DeleteFunc(list, func(c *member) bool { return !pairs(c, gen.member) })
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: no other context node", ErrNone)
	}
	m, _ := p.best(list, node.RoleCtx, p.o.CtxPolicy)
	return p.newLease(m, true, false, tokens), nil
}

// Avoid says whether a node's circuit breaker is open: it then gets no new work unless there is no other.
func (p *Pool) Avoid(role node.Role, name string, avoid bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if m.info.Role == role && m.info.Name == name {
			m.avoid = avoid
		}
	}
}

// eligible lists the members of a role that may serve the model, in scratch, which is good until the next call with it.
// Suspects are used only when there is nobody else.
func (p *Pool) eligible(scratch *[]*member, role node.Role, model string, exclude []string) []*member {
	dst, suspects := (*scratch)[:0], 0
	for _, m := range p.byRole[role] {
		if !m.usable() || slices.Contains(exclude, m.info.Name) {
			continue
		}
		if m.info.Model != nil && m.info.Model.Name != model {
			continue
		}
		if m.shunned() {
			suspects++
		}
		dst = append(dst, m)
	}
	*scratch = dst
	if suspects > 0 && suspects < len(dst) {
		dst = slices.DeleteFunc(dst, func(m *member) bool { return m.shunned() })
	}
	return dst
}

// pairs tells whether KV can go from c to g: both are ours with the same checkpoint, or both are foreign.
func pairs(c, g *member) bool {
	if c.foreign != g.foreign {
		return false
	}
	if c.foreign {
		return true
	}
	return c.info.Model != nil && g.info.Model != nil && c.info.Model.Hash == g.info.Model.Hash
}

func anyPairs(ctxs []*member, g *member) bool {
	for _, c := range ctxs {
		if pairs(c, g) {
			return true
		}
	}
	return false
}

// best chooses one of list and returns the scores, in its order.
func (p *Pool) best(list []*member, role node.Role, policy string) (*member, []float64) {
	turn := p.turn[role]
	p.turn[role]++
	scores := slices.Grow(p.scores[role][:0], len(list))[:len(list)]
	p.scores[role] = scores
	for i, m := range list {
		scores[i] = m.score(role)
	}
	if policy == RoundRobin {
		return list[turn%len(list)], scores
	}
	at := turn % len(list) // equal scores take turns
	for i := range list {
		j := (turn + i) % len(list)
		if scores[j] < scores[at] {
			at = j
		}
	}
	return list[at], scores
}

// score is the load of a member in the unit of its role: prompt tokens not yet prefilled for ctx, sequences for gen with
// the share of KV in use as a fraction. What it reported and what this router gave it overlap, so the larger one counts.
func (m *member) score(role node.Role) float64 {
	load := m.info.Load
	if role == node.RoleCtx {
		tokens := m.ctx.tokens
		if load != nil {
			tokens = max(tokens, load.WaitingTokens)
		}
		return float64(tokens) + float64(m.ctx.legs)
	}
	legs := m.gen.legs
	kv := 0.0
	if load != nil {
		legs = max(legs, load.Running+load.Waiting)
		if load.KVMaxBlocks > 0 {
			kv = float64(load.KVUsedBlocks) / float64(load.KVMaxBlocks)
		}
	}
	return float64(legs) + kv
}

// candidates describes the best of list, best first.
func candidates(list []*member, scores []float64, now int64) []phase.Candidate {
	var order [maxCandidates]int
	n := 0
	for i := range list {
		at := n
		for at > 0 && scores[i] < scores[order[at-1]] {
			at--
		}
		if at == maxCandidates {
			continue
		}
		n = min(n+1, maxCandidates)
		copy(order[at+1:n], order[at:n-1])
		order[at] = i
	}
	out := make([]phase.Candidate, 0, n)
	for _, i := range order[:n] {
		out = append(out, describe(list[i], scores[i], now))
	}
	return out
}

func describe(m *member, score float64, now int64) phase.Candidate {
	c := phase.Candidate{Node: m.info.Name, Score: score}
	if m.info.Load != nil {
		c.Running, c.Waiting = m.info.Load.Running, m.info.Load.Waiting
	}
	if m.loadNS != 0 {
		age := now - m.loadNS
		c.LoadAgeNS = &age
	}
	return c
}

// whyNone says what is missing.
func (p *Pool) whyNone(a Ask) error {
	count := func(role node.Role) (usable, all int) {
		for _, m := range p.byRole[role] {
			all++
			if m.usable() {
				usable++
			}
		}
		return usable, all
	}
	cu, ca := count(node.RoleCtx)
	gu, ga := count(node.RoleGen)
	return fmt.Errorf("%w for model %q: %d of %d ctx and %d of %d gen nodes are ready, %d and %d were tried, and a pair must hold the same checkpoint",
		ErrNone, a.Model, cu, ca, gu, ga, len(a.ExcludeCtx), len(a.ExcludeGen))
}

// Ready tells whether a request of the schedule could be placed now; the error says why not.
func (p *Pool) Ready(aggregated, fallback bool) error {
	models := p.Models()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, model := range models {
		ctxs := p.eligible(&p.scratch[0], node.RoleCtx, model.Name, nil)
		gens := p.eligible(&p.scratch[1], node.RoleGen, model.Name, nil)
		if (aggregated || fallback) && len(ctxs)+len(gens) > 0 {
			return nil
		}
		for _, g := range gens {
			if anyPairs(ctxs, g) {
				return nil
			}
		}
	}
	return p.whyNone(Ask{})
}
