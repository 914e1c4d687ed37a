// Package pool owns what a router knows of the nodes: who is a member, who is alive, how loaded each is, which pairs have
// proven that they work, and what is reserved on each. Members come from the registry (Put, Drop) and from static lists;
// both are checked. Which node a policy takes is decided by router/place; whose cache holds a prompt, by router/prefix. It
// sends no requests of clients, and decides nothing about retries.
//
// The pool's mutex guards plain data for short reads and writes; health checks run in goroutines that Run waits for.
package pool

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/router/prefix"
	"meridian.internal/shared/node"
)

var (
	// ErrGone is the cause given to the legs of a node that is not there any more.
	ErrGone = errors.New("pool: node is gone")
	// ErrNone is returned when no node or pair can take a request now.
	ErrNone = errors.New("pool: no node can take the request")
)

// Static is a worker that is named by an option, not by the registry.
type Static struct {
	Role node.Role
	URL  string
}

// Options of a pool. Now is needed.
type Options struct {
	CtxPolicy place.Policy // "": least_loaded
	GenPolicy place.Policy // "": least_loaded
	// LocalMax is how many uncached prompt tokens a generation node may prefill itself where that is estimated to be
	// faster than a context node and the hand-over. It holds with GenPolicy kv_aware; 0: never.
	LocalMax int
	// Qualify: a node is proven by a generation that went through it (Due, Probed); others get work only where nobody is
	// proven. false: all are taken to be.
	Qualify bool
	// TrustForeign: workers that are not ours are taken to be proven, since a probe costs whoever owns them a generation.
	TrustForeign bool
	Index        *prefix.Index // of the blocks that nodes hold; nil: none is kept
	Static       []Static
	Now          func() int64          // steady clock, ns
	BusUp        func() bool           // tells whether the registry can be heard; nil: there is none
	Ours         func(url string) bool // whether who serves it has shown that it belongs to this cluster; nil: its word is enough
	Client       *http.Client          // for health checks
	Logger       *slog.Logger
}

// Pool is the set of nodes. Safe for concurrent use.
type Pool struct {
	o    Options
	news chan struct{} // one token: what other routers must know has changed

	mu      sync.Mutex // guards what follows
	members map[string]*member
	models  map[string][]*class // by the model's name; rebuilt when membership changes
	turns   [2]int              // of the sides
	chooser place.Chooser
	held    []int32          // memory of place.Query.Held
	slots   []*member        // by slot of the index; nil: free
	others  map[string]*peer // other routers
	moved   place.Fit        // bytes of KV over tokens moved, of all hand-overs
	wire    float64          // bytes a second on the wire, of all hand-overs; 0: not measured
	counts  counts
}

// counts are exported as they are.
type counts struct {
	expired       int64 // leases that were not released in time
	matchedTokens int64 // of the prompts that were placed by kv_aware
	placedTokens  int64
	borrowed      int64    // requests whose node fetches from a peer
	probes        [2]int64 // failed, passed
}

// class is a set of nodes that can serve a request together: one checkpoint, all ours or all foreign.
type class struct {
	model   string
	hash    string
	foreign bool
	sides   [2]table // ctx, gen; by place.Side
}

// table is the nodes of one role, sorted by name, as placement reads them.
type table struct {
	nodes    []place.Node
	members  []*member
	perBlock []int // sizes of KV blocks that occur, in tokens
}

// New makes a pool; Run keeps it alive.
func New(o Options) (*Pool, error) {
	for _, p := range []*place.Policy{&o.CtxPolicy, &o.GenPolicy} {
		if *p == "" {
			*p = place.LeastLoaded
		}
		if !slices.Contains(place.Policies(), *p) {
			return nil, fmt.Errorf("policy %q: want one of %v", *p, place.Policies())
		}
	}
	if o.Client == nil {
		o.Client = &http.Client{CheckRedirect: NoRedirect, Transport: &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Pool{
		o: o, news: make(chan struct{}, 1), members: map[string]*member{}, models: map[string][]*class{},
		others: map[string]*peer{},
	}
	for _, s := range o.Static {
		if err := p.addStatic(s); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func key(role node.Role, name string) string { return string(role) + "." + name }

func serves(role node.Role) bool { return role == node.RoleCtx || role == node.RoleGen }

// NoRedirect is for clients that ask nodes: a node does not choose whom this process asks.
func NoRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Put takes a registration or its renewal. Roles that serve no requests are ignored.
func (p *Pool) Put(info node.Info) {
	if !serves(info.Role) {
		return
	}
	now := p.o.Now()
	var ghosts []func()
	p.mu.Lock()
	if p.members[key(info.Role, info.Name)] == nil {
		for _, m := range p.members {
			if m.lapsed && m.info.URL == info.URL {
				ghosts = append(ghosts, p.drop(m, "its lease ended and "+info.Name+" has its address"))
			}
		}
	}
	gone, slot := p.put(info, now)
	p.mu.Unlock()
	for _, tellAll := range ghosts {
		tellAll()
	}
	p.leave(slot)
	tell(gone, fmt.Errorf("%w: %s %s was restarted", ErrGone, info.Role, info.Name))
}

func (p *Pool) put(info node.Info, now int64) (gone []*Lease, left prefix.Slot) {
	left = prefix.None
	k := key(info.Role, info.Name)
	m := p.members[k]
	if m != nil && m.info.ClockID != info.ClockID {
		gone, left = m.take(), m.slot
		p.remove(k)
		m = nil
	}
	if m == nil {
		m = p.newMember(info)
		m.healthy = true
		p.follow(m)
		p.joined(k, m)
		p.members[k] = m
		p.rebuild()
		p.o.Logger.Info("node joined", "role", info.Role, "node", info.Name, "url", info.URL, "state", info.State)
	} else if info.Seq < m.info.Seq {
		return gone, left // an old value, delivered late
	}
	if m.info.State != info.State {
		p.o.Logger.Info("node changed state", "role", info.Role, "node", info.Name, "state", info.State)
	}
	if info.Seq > m.info.Seq {
		m.suspectNS, m.lapsed = 0, false
	}
	regroup := !sameModel(m.info.Model, info.Model)
	m.info = info
	m.failures, m.healthy = 0, true
	if regroup {
		p.rebuild()
	}
	if info.Load != nil && (m.reportSeq == 0 || now-m.load.atNS > int64(staleAfter)) {
		m.reported(*info.Load, info.Ranks, now) // nobody tells its load faster
	}
	m.sync()
	return gone, left
}

func sameModel(a, b *node.Model) bool {
	return (a == nil) == (b == nil) && (a == nil || *a == *b)
}

// Drop takes a member out; its legs are cancelled at once.
func (p *Pool) Drop(role node.Role, name, reason string) {
	p.mu.Lock()
	tellAll := p.drop(p.members[key(role, name)], reason)
	p.mu.Unlock()
	tellAll()
}

// lapse takes the end of a lease for a question: a node on a machine that is overloaded may be too late with its renewal
// and live. It gets no new work unless there is no other, until it renews its lease or its health checks tell.
func (p *Pool) lapse(info node.Info) {
	tellAll := func() {}
	defer func() { tellAll() }()
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.members[key(info.Role, info.Name)]; m != nil && !m.static && m.info.ClockID == info.ClockID && info.Seq >= m.info.Seq {
		m.lapsed, m.failures, m.checkedNS = true, 0, 0
		m.sync()
		for _, heir := range p.members { // a health check would reach that one
			if heir != m && !heir.static && !heir.lapsed && heir.info.URL == m.info.URL {
				tellAll = p.drop(m, "its lease ended and "+heir.info.Name+" has its address")
				break
			}
		}
	}
}

// drop takes a member out, if it still is one of the registry's. What it returns tells of it, outside the mutex.
func (p *Pool) drop(m *member, reason string) (tellAll func()) {
	if m == nil || m.static || p.members[key(m.info.Role, m.info.Name)] != m {
		return func() {}
	}
	gone, cause := m.take(), fmt.Errorf("%w: %s %s: %s", ErrGone, m.info.Role, m.info.Name, reason)
	p.remove(key(m.info.Role, m.info.Name))
	p.o.Logger.Warn("node left", "role", m.info.Role, "node", m.info.Name, "reason", reason)
	return func() {
		p.leave(m.slot)
		tell(gone, cause)
	}
}

// leave runs outside the mutex: a full cache has many blocks.
func (p *Pool) leave(s prefix.Slot) {
	if s != prefix.None {
		p.o.Index.Leave(s)
	}
}

func (p *Pool) remove(k string) {
	m := p.members[k]
	delete(p.members, k)
	if m.slot != prefix.None {
		p.slots[m.slot] = nil
	}
	m.table = nil
	for _, other := range p.members {
		delete(other.loans, m)
		if _, paired := other.pairs[m]; paired {
			delete(other.pairs, m)
			other.ways = slices.DeleteFunc(other.ways, func(w *pair) bool { return w.ctx == m })
			other.stalePairs = true
		}
	}
	p.rebuild()
}

// rebuild groups the members anew.
func (p *Pool) rebuild() {
	p.models = map[string][]*class{}
	list := make([]*member, 0, len(p.members))
	for _, m := range p.members {
		m.table = nil
		if in := p.members[key(m.info.Role, m.info.Name)]; m.info.Model == nil || (m.static && in != nil && in != m) {
			continue // nothing is known of it, or it is in the registry too: one node is chosen under one entry
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *member) int { return strings.Compare(a.info.Name, b.info.Name) })
	for _, m := range list {
		t := &p.classOf(m).sides[m.side()]
		t.members = append(t.members, m)
		if per := m.info.Model.TokensPerBlock; per > 0 && !m.foreign && !slices.Contains(t.perBlock, per) {
			t.perBlock = append(t.perBlock, per)
		}
		t.nodes = append(t.nodes, place.Node{Name: m.info.Name, Seed: place.SeedOf(m.info.Name), Slot: int(m.slot)})
		m.table, m.at = t, len(t.nodes)-1
	}
	for _, m := range list {
		m.sync()
		m.stalePairs = true
	}
}

// classOf finds or makes the class of a member.
func (p *Pool) classOf(m *member) *class {
	hash := m.info.Model.Hash
	if m.foreign {
		hash = "" // a foreign worker does not say
	}
	for _, c := range p.models[m.info.Model.Name] {
		if c.hash == hash && c.foreign == m.foreign {
			return c
		}
	}
	c := &class{model: m.info.Model.Name, hash: hash, foreign: m.foreign}
	p.models[c.model] = append(p.models[c.model], c)
	return c
}

// tell runs outside the mutex: what a lease calls may release it.
func tell(leases []*Lease, cause error) {
	for _, l := range leases {
		l.lost(cause)
	}
}

func random(n int) int { return rand.IntN(n) }

// Apply takes one event of the registry.
func (p *Pool) Apply(ev node.Event) {
	switch ev.Kind {
	case node.Lost:
		p.lapse(ev.Info)
	case node.Left:
		p.Drop(ev.Info.Role, ev.Info.Name, "it left")
	default:
		p.Put(ev.Info)
	}
}
