// Package pool owns what a router knows of the nodes: who is a member, who is alive, how loaded each is, and which pair
// serves the next request. Members come from the registry (Put, Drop) and from static lists; both are checked. It sends
// no requests of clients, and decides nothing about retries.
//
// The pool's mutex guards plain data for short reads and writes; health checks run in goroutines that Run waits for.
package pool

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"meridian.internal/shared/node"
)

var (
	// ErrGone is the cause given to the legs of a node that is not there any more.
	ErrGone = errors.New("pool: node is gone")
	// ErrNone is returned when no node or pair can take a request now.
	ErrNone = errors.New("pool: no node can take the request")
)

// Policies.
const (
	RoundRobin  = "round_robin"
	LeastLoaded = "least_loaded"
)

// Static is a worker that is named by an option, not by the registry.
type Static struct {
	Role node.Role
	URL  string
}

// Options of a pool.
type Options struct {
	CtxPolicy string // round_robin or least_loaded
	GenPolicy string
	Static    []Static
	Now       func() int64 // steady clock, ns
	BusUp     func() bool  // tells whether the registry can be heard; nil: there is none
	Client    *http.Client // for health checks
	Logger    *slog.Logger
}

// Pool is the set of nodes. Safe for concurrent use.
type Pool struct {
	o Options

	mu      sync.Mutex // guards what follows
	members map[string]*member
	byRole  map[node.Role][]*member // sorted by name; rebuilt when membership changes
	turn    map[node.Role]int       // round robin
	scratch [2][]*member            // of one Pick: candidates for ctx and for gen
	scores  map[node.Role][]float64 // of one Pick
}

// member is one node. All fields are guarded by Pool.mu.
type member struct {
	info      node.Info
	static    bool
	foreign   bool  // a worker that is not ours: no KV protocol of ours, no ids from us
	loadNS    int64 // when info.Load was received; 0: never
	checkedNS int64 // when its last health check ended
	checking  bool
	failures  int   // consecutive failed health checks
	suspectNS int64 // a leg failed to reach it at this time; 0: no
	avoid     bool  // its circuit breaker is open
	healthy   bool
	ctx       use // legs in flight
	gen       use
	leases    map[*Lease]struct{}
}

// use is what this router has given to a node and not got back.
type use struct {
	legs   int
	tokens int // prompt tokens
}

// New makes a pool; Run keeps it alive.
func New(o Options) (*Pool, error) {
	for _, p := range []*string{&o.CtxPolicy, &o.GenPolicy} {
		switch *p {
		case "":
			*p = LeastLoaded
		case RoundRobin, LeastLoaded:
		default:
			return nil, fmt.Errorf("policy %q: want %s or %s", *p, RoundRobin, LeastLoaded)
		}
	}
	if o.Client == nil {
		o.Client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Pool{
		o: o, members: map[string]*member{}, byRole: map[node.Role][]*member{}, turn: map[node.Role]int{}, scores: map[node.Role][]float64{},
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

// Put takes a registration or its renewal. Roles that serve no requests are ignored.
func (p *Pool) Put(info node.Info) {
	if !serves(info.Role) {
		return
	}
	now := p.o.Now()
	p.mu.Lock()
	gone := p.put(info, now)
	p.mu.Unlock()
	tell(gone, fmt.Errorf("%w: %s %s was restarted", ErrGone, info.Role, info.Name))
}

func (p *Pool) put(info node.Info, now int64) (gone []*Lease) {
	k := key(info.Role, info.Name)
	m := p.members[k]
	if m != nil && m.info.ClockID != info.ClockID {
		gone = m.take()
		p.remove(k)
		m = nil
	}
	if m == nil {
		m = &member{leases: map[*Lease]struct{}{}, healthy: true}
		p.members[k] = m
		m.info = info
		p.rebuild()
		p.o.Logger.Info("node joined", "role", info.Role, "node", info.Name, "url", info.URL, "state", info.State)
	} else if info.Seq < m.info.Seq {
		return gone // an old value, delivered late
	}
	if m.info.State != info.State {
		p.o.Logger.Info("node changed state", "role", info.Role, "node", info.Name, "state", info.State)
	}
	if info.Seq > m.info.Seq {
		m.suspectNS = 0
	}
	m.info = info
	m.failures, m.healthy = 0, true
	if info.Load != nil {
		m.loadNS = now
	}
	return gone
}

// Drop takes a member out; its legs are cancelled at once.
func (p *Pool) Drop(role node.Role, name, reason string) {
	p.mu.Lock()
	k := key(role, name)
	var gone []*Lease
	if m := p.members[k]; m != nil && !m.static {
		gone = m.take()
		p.remove(k)
		p.o.Logger.Warn("node left", "role", role, "node", name, "reason", reason)
	}
	p.mu.Unlock()
	tell(gone, fmt.Errorf("%w: %s %s: %s", ErrGone, role, name, reason))
}

func (p *Pool) remove(k string) {
	delete(p.members, k)
	p.rebuild()
}

// rebuild makes new slices, so that readers may keep the old ones.
func (p *Pool) rebuild() {
	p.byRole = map[node.Role][]*member{}
	for _, m := range p.members {
		if m.static && p.members[key(m.info.Role, m.info.Name)] != nil && p.members[key(m.info.Role, m.info.Name)] != m {
			continue // it is in the registry too: one node is chosen under one entry
		}
		p.byRole[m.info.Role] = append(p.byRole[m.info.Role], m)
	}
	for _, list := range p.byRole {
		slices.SortFunc(list, func(a, b *member) int { return strings.Compare(a.info.Name, b.info.Name) })
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

// tell runs outside the mutex: what a lease calls may release it.
func tell(leases []*Lease, cause error) {
	for _, l := range leases {
		l.lost(cause)
	}
}

// usable tells whether a member may get new work.
func (m *member) usable() bool {
	return m.healthy && m.info.State == node.Ready
}

// shunned tells whether a member gets work only when there is no other.
func (m *member) shunned() bool { return m.suspectNS != 0 || m.avoid }

// KnowsModel tells whether a member serves the model.
func (p *Pool) KnowsModel(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := false
	for _, m := range p.members {
		if m.info.Model == nil {
			continue
		}
		known = true
		if m.info.Model.Name == name {
			return true
		}
	}
	return !known // nothing known yet: placing answers "not now", which is the truth
}

// Models lists the models of the members, each name once.
func (p *Pool) Models() []node.Model {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []node.Model
	for _, m := range p.members {
		if m.info.Model != nil && !slices.ContainsFunc(out, func(x node.Model) bool { return x.Name == m.info.Model.Name }) {
			out = append(out, *m.info.Model)
		}
	}
	slices.SortFunc(out, func(a, b node.Model) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Status is one member as /cluster shows it.
type Status struct {
	Info      node.Info
	Static    bool
	Foreign   bool
	Healthy   bool
	LoadAgeNS *int64 // nil: no load was reported
	Reserved  int    // legs of this router
}

// Snapshot lists the members, sorted by role and name.
func (p *Pool) Snapshot() []Status {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Status, 0, len(p.members))
	for _, m := range p.members {
		s := Status{Info: m.info, Static: m.static, Foreign: m.foreign, Healthy: m.healthy, Reserved: m.ctx.legs + m.gen.legs}
		if m.loadNS != 0 {
			age := now - m.loadNS
			s.LoadAgeNS = &age
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Status) int {
		return strings.Compare(key(a.Info.Role, a.Info.Name), key(b.Info.Role, b.Info.Name))
	})
	return out
}

// Source names a checkpoint of the model and a node of ours that can tell its tokenizer; "" when there is none.
func (p *Pool) Source(model string) (hash, url string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		if i := m.info; !m.foreign && m.healthy && i.Model != nil && i.Model.Name == model && i.Model.Hash != "" {
			if hash == "" || i.Model.Hash < hash {
				hash, url = i.Model.Hash, i.URL
			}
		}
	}
	return hash, url
}

// PutForeign adds a worker that is not ours and whose model is known: it is taken to be ready, and is not in the registry.
func (p *Pool) PutForeign(role node.Role, name, url, model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members[key(role, name)] = &member{
		info:    node.Info{Name: name, Role: role, URL: url, State: node.Ready, Model: &node.Model{Name: model}},
		foreign: true, static: true, healthy: true, leases: map[*Lease]struct{}{},
	}
	p.rebuild()
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
