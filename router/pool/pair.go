package pool

import (
	"cmp"
	"slices"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/shared/node"
)

// pair is what is known of a way through the cluster: from a context node to a generation node, or through one node
// alone. Its state begins anew when one of its nodes is another instance.
type pair struct {
	ctx       *member // nil: one node alone
	state     QualState
	why       string    // of Refused
	busy      bool      // a probe is on its way
	failures  int       // refused in a row
	nextNS    int64     // when it may be probed again
	atNS      int64     // when it was last probed; 0: never
	probeNS   int64     // how long the last probe took
	handover  place.Fit // ns that the client waits for the hand-over after prefill, over bytes
	costNS    float64   // handover at the bytes of the last one; 0: not measured
	tokenNS   float64   // what a prompt token took on the context node then; 0: not measured
	bytesPerS float64   // while KV was on the wire; 0: not measured
	samples   int64
}

// QualState is the state of a pair's qualification.
type QualState string

// The states.
const (
	Unproven  QualState = "unproven"  // no probe has ended yet
	Qualified QualState = "qualified" // a generation went through
	Refused   QualState = "refused"   // it did not; it is tried again later, and gets no work meanwhile
)

const (
	// maxProbedPairs: with more pairs than this in a class, each node is proven with one peer and the others are taken to
	// work until they fail.
	maxProbedPairs = 64
	probeRetryMin  = time.Second
	probeRetryMax  = 30 * time.Second
	busyRetry      = 500 * time.Millisecond
)

// Probe is a generation that is to go through a pair, or through one node where Ctx is nil.
type Probe struct {
	Ctx, Gen *Target
	Model    string
	Foreign  bool

	ctx, gen *member
}

// Target is a node of a probe.
type Target struct {
	Role        node.Role
	Name        string
	URL, KVAddr string
}

func target(m *member) *Target {
	return &Target{Role: m.info.Role, Name: m.info.Name, URL: m.info.URL, KVAddr: m.info.KVAddr}
}

// Due marks and returns the probes that are to be made now. Aggregated serving needs nodes that are proven alone; aggregated
// says that it is what requests get, fallback that they get it where no pair is.
func (p *Pool) Due(aggregated, fallback bool) []Probe {
	if !p.o.Qualify {
		return nil
	}
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Probe
	for _, list := range p.models {
		for _, c := range list {
			if c.foreign && p.o.TrustForeign {
				continue
			}
			pairs := !aggregated && p.duePairs(c, now, &out)
			if aggregated || (fallback && !pairs) {
				p.dueAlone(c, now, &out)
			}
		}
	}
	return out
}

// duePairs adds the pairs of a class; it returns whether any pair may work, or may turn out to.
func (p *Pool) duePairs(c *class, now int64, out *[]Probe) (hope bool) {
	ctxs, gens := usable(c.sides[place.Prefill].members), usable(c.sides[place.Decode].members)
	few := len(ctxs)*len(gens) <= maxProbedPairs
	refused := map[*member]int{} // with how many a node that is not proven was refused: so many on is the one to try it with next
	if !few {
		for _, g := range gens {
			for _, x := range ctxs {
				if g.proven && x.proven {
					continue
				}
				if w := g.pairs[x]; w != nil && w.state == Refused {
					refused[g]++
					refused[x]++
				}
			}
		}
	}
	for i, g := range gens {
		for j, x := range ctxs {
			if !few && (g.proven || j != (i+refused[g])%len(ctxs)) && (x.proven || i != (j+refused[x])%len(gens)) {
				continue // another pair proves these nodes
			}
			w := g.pair(x)
			hope = hope || w.state != Refused
			if w.due(now) {
				w.busy = true
				*out = append(*out, Probe{Ctx: target(x), Gen: target(g), Model: c.model, Foreign: c.foreign, ctx: x, gen: g})
			}
		}
	}
	return hope
}

func (p *Pool) dueAlone(c *class, now int64, out *[]Probe) {
	for _, side := range []place.Side{place.Decode, place.Prefill} {
		for _, m := range usable(c.sides[side].members) {
			if m.alone.due(now) {
				m.alone.busy = true
				*out = append(*out, Probe{Gen: target(m), Model: c.model, Foreign: c.foreign, gen: m})
			}
		}
	}
}

func usable(list []*member) []*member {
	var out []*member
	for _, m := range list {
		if m.usable() {
			out = append(out, m)
		}
	}
	return out
}

func (w *pair) due(now int64) bool { return w.state != Qualified && !w.busy && now >= w.nextNS }

// pair finds or makes what is known of the way from ctx to m.
func (m *member) pair(ctx *member) *pair {
	w := m.pairs[ctx]
	if w == nil {
		w = &pair{ctx: ctx, state: Unproven}
		m.pairs[ctx], m.ways = w, append(m.ways, w)
	}
	return w
}

// Result is how a probe ended.
type Result struct {
	Err    error // nil: a token was generated
	Busy   bool  // Err says only that the nodes had no room: nothing is proven
	TookNS int64
}

// Probed takes a probe's end.
func (p *Pool) Probed(b Probe, r Result) {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	w := &b.gen.alone
	if b.ctx != nil {
		if w = b.gen.pairs[b.ctx]; w == nil {
			return // the context node is gone
		}
	}
	w.busy, b.gen.stalePairs = false, true
	switch {
	case r.Busy:
		w.why, w.nextNS = r.Err.Error(), now+int64(busyRetry)
	case r.Err != nil:
		p.counts.probes[0]++
		w.state, w.why, w.atNS, w.probeNS = Refused, r.Err.Error(), now, r.TookNS
		w.nextNS = now + int64(min(probeRetryMin<<min(w.failures, 5), probeRetryMax))
		if w.failures++; w.failures == 1 {
			p.o.Logger.Warn("a probe failed: the pair gets no work", "ctx", name(b.Ctx), "gen", b.Gen.Name, "error", r.Err)
		}
	default:
		p.counts.probes[1]++
		if w.state == Refused {
			p.o.Logger.Info("the pair works now", "ctx", name(b.Ctx), "gen", b.Gen.Name)
		}
		w.state, w.why, w.failures, w.atNS, w.probeNS = Qualified, "", 0, now, r.TookNS
		for _, m := range []*member{b.ctx, b.gen} {
			if m != nil {
				m.proven = true
				m.sync()
			}
		}
	}
}

func name(t *Target) string {
	if t == nil {
		return ""
	}
	return t.Name
}

// presumed tells whether a node is taken to work without a probe.
func (p *Pool) presumed(m *member) bool { return !p.o.Qualify || m.foreign && p.o.TrustForeign }

// unprove forgets what was proven with a node that was away.
func (p *Pool) unprove(m *member) {
	m.proven, m.alone, m.stalePairs = p.presumed(m), pair{state: Unproven}, true
	for _, w := range m.pairs {
		w.state, w.nextNS, w.failures = Unproven, 0, 0
	}
	for _, g := range p.members {
		if w := g.pairs[m]; w != nil {
			w.state, w.nextNS, w.failures, g.stalePairs = Unproven, 0, 0, true
		}
	}
	m.sync()
}

// PairStatus is one pair as /cluster shows it.
type PairStatus struct {
	Ctx       string    `json:"ctx,omitempty"` // absent: a node alone
	Gen       string    `json:"gen"`
	State     QualState `json:"state"`
	Why       string    `json:"why,omitempty"` // it is not qualified
	AgeNS     *int64    `json:"age_ns"`        // since the last probe; null: none has ended
	ProbeNS   *int64    `json:"probe_ns"`
	CostNS    *int64    `json:"handover_ns"` // what a client waits for the hand-over after prefill; null: not measured
	BytesPerS *int64    `json:"bytes_per_s"` // of KV, as its receiver saw it; null: not measured
	Samples   int64     `json:"handovers"`   // measured
}

// maxPairStatus bounds what /cluster shows.
const maxPairStatus = 256

// Pairs lists what is known of the ways through the cluster, by name; total is how many there are.
func (p *Pool) Pairs() (list []PairStatus, total int) {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.members {
		for x, w := range g.pairs {
			list = append(list, w.status(x.info.Name, g.info.Name, now))
		}
		if g.alone.atNS != 0 {
			list = append(list, g.alone.status("", g.info.Name, now))
		}
	}
	slices.SortFunc(list, func(a, b PairStatus) int {
		return cmp.Or(cmp.Compare(a.Gen, b.Gen), cmp.Compare(a.Ctx, b.Ctx))
	})
	total = len(list)
	return append([]PairStatus{}, list[:min(total, maxPairStatus)]...), total
}

func (w *pair) status(ctx, gen string, now int64) PairStatus {
	s := PairStatus{Ctx: ctx, Gen: gen, State: w.state, Why: w.why, Samples: w.samples}
	if w.atNS != 0 {
		age, took := now-w.atNS, w.probeNS
		s.AgeNS, s.ProbeNS = &age, &took
	}
	if w.samples > 0 {
		cost := int64(w.costNS)
		s.CostNS = &cost
	}
	if w.bytesPerS > 0 {
		rate := int64(w.bytesPerS)
		s.BytesPerS = &rate
	}
	return s
}
