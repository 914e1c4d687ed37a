package pool

import (
	"time"

	"meridian.internal/router/place"
	"meridian.internal/router/prefix"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
)

const (
	// staleAfter: a load that was not told again for so long is not believed; what is reserved counts instead. Nodes
	// tell theirs every 500 ms.
	staleAfter = 3 * time.Second
	// seenAfter is how long after a leg was sent a node's report is taken to include it: the node looks at its load every
	// 20 ms, and reads and tokenizes a request before its engine knows of it.
	seenAfter = 50 * time.Millisecond
)

// member is one node. All fields are guarded by Pool.mu.
type member struct {
	info       node.Info
	static     bool
	foreign    bool // a worker that is not ours: no KV protocol of ours, no ids from us
	load       load
	reportSeq  int64 // of the newest load report; 0: none yet
	checkedNS  int64 // when its last health check ended
	checking   bool
	failures   int    // consecutive failed health checks
	sick       string // why the last of them failed; "": the last check did not fail
	suspectNS  int64  // a leg failed to reach it at this time; 0: no
	lapsed     bool   // its lease ended without a word
	healthy    bool
	leases     map[*Lease]struct{}
	all        use                 // reserved by this router
	unseen     use                 // part of all that the node's load does not include yet
	others     use                 // the same of other routers
	told       use                 // what other routers were told last
	slot       prefix.Slot         // in the index
	prefill    place.Fit           // ns over prompt tokens, measured
	pairs      map[*member]*pair   // of a generation node, by context node
	ways       []*pair             // the same: a choice may look at all of them
	costs      []pairCost          // of pairs, for placement
	loans      map[*member]float64 // of a generation node, by peer: ns of a fetch beyond those of its bytes on the wire
	stalePairs bool                // costs must be made anew
	alone      pair                // aggregated
	proven     bool                // a generation went through it, in a pair or alone
	table      *table              // nil: it cannot be placed
	at         int                 // in table
}

// load is what a node told of itself.
type load struct {
	infer.Load
	ranks []infer.Load // of each data-parallel rank; nil: there is one
	known bool
	stale bool
	atNS  int64 // when it came
}

// use is what is reserved on a node.
type use struct {
	CtxLegs   int `json:"ctx_legs"`
	CtxTokens int `json:"ctx_tokens"` // prompt tokens that will be prefilled
	GenLegs   int `json:"gen_legs"`
	GenTokens int `json:"gen_tokens"` // prompt tokens whose KV will be held
}

func (u *use) add(v use, sign int) {
	u.CtxLegs += sign * v.CtxLegs
	u.CtxTokens += sign * v.CtxTokens
	u.GenLegs += sign * v.GenLegs
	u.GenTokens += sign * v.GenTokens
}

func (p *Pool) newMember(info node.Info) *member {
	return &member{
		info: info, leases: map[*Lease]struct{}{}, pairs: map[*member]*pair{}, alone: pair{state: Unproven}, slot: prefix.None, proven: !p.o.Qualify,
	}
}

// follow gives a node of ours a slot in the index.
func (p *Pool) follow(m *member) {
	if p.o.Index == nil || m.foreign || m.slot != prefix.None {
		return
	}
	if m.slot = p.o.Index.Join(); m.slot == prefix.None {
		return
	}
	for len(p.slots) <= int(m.slot) {
		p.slots = append(p.slots, nil)
	}
	p.slots[m.slot] = m
}

func (m *member) side() place.Side {
	if m.info.Role == node.RoleCtx {
		return place.Prefill
	}
	return place.Decode
}

// usable tells whether a member may get new work.
func (m *member) usable() bool { return m.healthy && m.info.State == node.Ready }

func (m *member) rank() place.Rank {
	switch {
	case !m.usable():
		return place.Excluded
	case m.suspectNS != 0 || m.lapsed:
		return place.Avoided
	case !m.proven:
		return place.Unproven
	}
	return place.Good
}

// perBlock converts blocks to tokens; blocks of an unknown size count as one token.
func (m *member) perBlock() int {
	if m.info.Model == nil {
		return 1
	}
	return max(m.info.Model.TokensPerBlock, 1)
}

// unreported is what must be added to the node's load: all of it when no load is known.
func (m *member) unreported() use {
	if !m.load.known || m.load.stale {
		return m.all
	}
	return m.unseen
}

// sync writes what placement reads.
func (m *member) sync() {
	if m.table == nil {
		return
	}
	extra := m.unreported()
	extra.add(m.others, 1)
	n := &m.table.nodes[m.at]
	n.Rank = m.rank()
	n.QueuedTokens, n.Sequences = extra.CtxTokens, extra.GenLegs
	n.KVUsedTokens, n.KVMaxTokens = extra.GenTokens, 0
	if m.load.known {
		per := m.perBlock()
		n.KVMaxTokens = m.load.KVMaxBlocks * per
		if !m.load.stale {
			n.QueuedTokens += m.load.WaitingTokens
			n.Sequences += m.load.Running + m.load.Waiting
			n.KVUsedTokens += m.load.KVUsedBlocks * per
		}
	}
}

// reported takes the node's word, and drops what it includes from what must be added to it.
func (m *member) reported(l infer.Load, ranks []infer.Load, now int64) {
	for _, n := range []*int{&l.Running, &l.Waiting, &l.WaitingTokens, &l.KVUsedBlocks, &l.KVMaxBlocks} {
		*n = min(max(*n, 0), maxShareSum)
	}
	m.load = load{Load: l, ranks: ranks, known: true, atNS: now}
	for x := range m.leases {
		if !x.seen && x.sentNS != 0 && now-x.sentNS >= int64(seenAfter) {
			x.seen = true
			m.unseen.add(x.use, -1)
		}
	}
}

// Report takes a node's load. Reports of another instance, and older ones that come late, are ignored.
func (p *Pool) Report(r node.Report) (known bool) {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[key(r.Role, r.Name)]
	if m == nil || m.info.ClockID != r.ClockID || r.Seq <= m.reportSeq {
		return false
	}
	before := m.unreported()
	m.reportSeq = r.Seq
	m.reported(r.Load, r.Ranks, now)
	m.sync()
	if m.unreported() != before {
		p.changed()
	}
	return true
}

// age notes whose load is too old to be believed.
func (p *Pool) age(now int64) {
	for _, m := range p.members {
		if stale := m.load.known && now-m.load.atNS > int64(staleAfter); stale != m.load.stale {
			m.load.stale = stale
			m.sync()
			p.changed()
		}
	}
}

// take empties the leases of a member and returns them.
func (m *member) take() []*Lease {
	var out []*Lease
	for l := range m.leases {
		out = append(out, l)
	}
	clear(m.leases)
	return out
}
