package pool

import (
	"fmt"
	"slices"
	"strings"

	"meridian.internal/router/place"
	"meridian.internal/shared/node"
)

// KnowsModel tells whether a member serves the model.
func (p *Pool) KnowsModel(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.models) == 0 || p.models[name] != nil // nothing known yet: placing answers "not now", which is the truth
}

// Models lists the models of the members, each name once.
func (p *Pool) Models() []node.Model {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]node.Model, 0, len(p.models))
	for _, list := range p.models {
		if m := list[0].any(); m != nil {
			out = append(out, *m.info.Model)
		}
	}
	slices.SortFunc(out, func(a, b node.Model) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func (c *class) any() *member {
	for i := range c.sides {
		if len(c.sides[i].members) > 0 {
			return c.sides[i].members[0]
		}
	}
	return nil
}

// Source names a checkpoint of the model and a node of ours that can tell its tokenizer; "" when there is none.
func (p *Pool) Source(model string) (hash, url string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.models[model] {
		if c.foreign || c.hash == "" || (hash != "" && c.hash > hash) {
			continue
		}
		for i := range c.sides {
			if at := slices.IndexFunc(c.sides[i].members, func(m *member) bool { return m.healthy }); at >= 0 {
				hash, url = c.hash, c.sides[i].members[at].info.URL
				break
			}
		}
	}
	return hash, url
}

// Status is one member as /cluster shows it.
type Status struct {
	Info           node.Info
	Static         bool
	Foreign        bool
	Healthy        bool
	Qualified      bool   // a generation has gone through it
	Why            string // it is not qualified or not healthy, as far as is known
	LoadAgeNS      *int64 // nil: no load was reported
	LoadStale      bool   // it is too old to be believed
	Reserved       int    // legs of this router
	OthersReserved int    // legs of other routers that the load does not include yet
	PrefillNS      *int64 // measured ns a prompt token; nil: not measured
}

// Snapshot lists the members, sorted by role and name.
func (p *Pool) Snapshot() []Status {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Status, 0, len(p.members))
	for _, m := range p.members {
		s := Status{
			Info: m.info, Static: m.static, Foreign: m.foreign, Healthy: m.healthy, Qualified: m.proven, Reserved: m.all.CtxLegs + m.all.GenLegs,
			OthersReserved: m.others.CtxLegs + m.others.GenLegs, LoadStale: m.load.stale,
		}
		if m.load.known {
			age, l := now-m.load.atNS, m.load.Load
			s.LoadAgeNS, s.Info.Load, s.Info.Ranks = &age, &l, m.load.ranks
		}
		if rate := int64(m.prefill.Slope()); rate > 0 {
			s.PrefillNS = &rate
		}
		if !m.proven || !m.healthy {
			s.Why = p.unprovenBecause(m)
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Status) int {
		return strings.Compare(key(a.Info.Role, a.Info.Name), key(b.Info.Role, b.Info.Name))
	})
	return out
}

// unprovenBecause is what is known of a node through which nothing has gone yet.
func (p *Pool) unprovenBecause(m *member) string {
	switch {
	case !m.healthy && m.sick != "":
		return "it is not healthy: " + m.sick
	case !m.healthy:
		return "it is not healthy"
	case m.info.State != node.Ready:
		return "it is " + string(m.info.State)
	case m.table == nil:
		return "its model is not known yet"
	case m.alone.why != "":
		return m.alone.why
	}
	peers := 0
	for x, w := range m.pairs {
		if w.why != "" {
			return "with " + x.info.Name + ": " + w.why
		}
		peers++
	}
	for _, g := range p.members {
		if w := g.pairs[m]; w != nil {
			if w.why != "" {
				return "with " + g.info.Name + ": " + w.why
			}
			peers++
		}
	}
	if peers == 0 {
		return "no node of the other role has its checkpoint"
	}
	return "its probe has not ended yet"
}

// Static lists the members that are in no registry.
func (p *Pool) Static() []node.Info {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []node.Info
	for _, m := range p.members {
		if m.static {
			out = append(out, m.info)
		}
	}
	return out
}

// PutForeign adds a worker that is not ours and whose model is known: it is taken to be ready and proven, and is not in
// the registry.
func (p *Pool) PutForeign(role node.Role, name, url, model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.newMember(node.Info{Name: name, Role: role, URL: url, State: node.Ready, Model: &node.Model{Name: model}})
	m.foreign, m.static, m.healthy, m.proven = true, true, true, true
	p.members[key(role, name)] = m
	p.rebuild()
}

// Ready tells whether a request of the schedule could be placed now, through nodes that are proven; the error says why not.
func (p *Pool) Ready(aggregated, fallback bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	unproven := ""
	for _, list := range p.models {
		for _, c := range list {
			if (aggregated || fallback) && c.oneProven() || !aggregated && c.pairProven() {
				return nil
			}
			for i := range c.sides {
				for _, m := range usable(c.sides[i].members) {
					if !m.proven {
						unproven = fmt.Sprintf("%s %s: %s", m.info.Role, m.info.Name, p.unprovenBecause(m))
					}
				}
			}
		}
	}
	err := p.whyNone(Ask{})
	if unproven != "" {
		err = fmt.Errorf("%w; no probe has passed: %s", err, unproven)
	}
	return err
}

func (c *class) oneProven() bool {
	for i := range c.sides {
		for _, m := range c.sides[i].members {
			if m.usable() && m.proven {
				return true
			}
		}
	}
	return false
}

// pairProven tells whether some proven generation node has a proven context node that it was not refused with.
func (c *class) pairProven() bool {
	for _, g := range c.sides[place.Decode].members {
		if !g.usable() || !g.proven {
			continue
		}
		for _, x := range c.sides[place.Prefill].members {
			if w := g.pairs[x]; x.usable() && x.proven && (w == nil || w.state != Refused) {
				return true
			}
		}
	}
	return false
}

// whyNone says what is missing.
func (p *Pool) whyNone(a Ask) error {
	var ready, all [2]int
	for _, m := range p.members {
		all[m.side()]++
		if m.usable() {
			ready[m.side()]++
		}
	}
	what := ""
	if a.Model != "" {
		what = fmt.Sprintf(" for model %q", a.Model)
	}
	return fmt.Errorf("%w%s: %d of %d ctx and %d of %d gen nodes are ready, %d and %d were tried, and a pair must hold the same checkpoint and not be refused",
		ErrNone, what, ready[0], all[0], ready[1], all[1], len(a.ExcludeCtx), len(a.ExcludeGen))
}
