package pool

import (
	"sync"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/shared/node"
)

// Lease is one leg's claim on a node: it counts in the node's load from selection until Release, or until it expires. Safe
// for concurrent use.
type Lease struct {
	Name    string
	Role    node.Role // role of the node
	URL     string
	KVAddr  string // ctx nodes of ours
	Model   node.Model
	Foreign bool

	pool   *Pool
	member *member

	// Guarded by Pool.mu.
	use       use   // what of it still counts
	sentNS    int64 // 0: not sent yet
	seen      bool  // the node's load includes it
	expiresNS int64

	mu       sync.Mutex // guards what follows
	released bool
	cause    error   // not nil: the node is gone
	watcher  Watcher // nil: none
}

// Watcher wants to know when the node of a lease goes away. Gone must not block.
type Watcher interface{ Gone(cause error) }

const (
	// defaultLife is for a request whose time is not known.
	defaultLife = 10 * time.Minute
	// lifeSlack is how long after the request's own end its claims are taken to be forgotten.
	lifeSlack = 30 * time.Second
)

// newLease counts the leg. The pool's mutex is held.
func (p *Pool) newLease(m *member, u use, life time.Duration) *Lease {
	if life <= 0 {
		life = defaultLife
	}
	l := &Lease{
		Name: m.info.Name, Role: m.info.Role, URL: m.info.URL, KVAddr: m.info.KVAddr, Foreign: m.foreign,
		pool: p, member: m, use: u, expiresNS: p.o.Now() + int64(life+lifeSlack),
	}
	if m.info.Model != nil {
		l.Model = *m.info.Model
	}
	m.leases[l] = struct{}{}
	p.count(l, u, 1)
	return l
}

// count adds to or takes from what is reserved on the lease's node.
func (p *Pool) count(l *Lease, u use, sign int) {
	m := l.member
	m.all.add(u, sign)
	if !l.seen {
		m.unseen.add(u, sign)
	}
	m.sync()
	p.changed()
}

// Sent says that the leg is on its way: reports that the node makes some time later include it.
func (l *Lease) Sent() {
	l.pool.mu.Lock()
	l.sentNS = max(l.pool.o.Now(), 1)
	l.pool.mu.Unlock()
}

// Release gives the claim back. Further calls do nothing.
func (l *Lease) Release() {
	l.mu.Lock()
	again := l.released
	l.released = true
	l.mu.Unlock()
	if again {
		return
	}
	l.pool.mu.Lock()
	l.pool.forget(l)
	l.pool.mu.Unlock()
}

func (p *Pool) forget(l *Lease) {
	p.count(l, l.use, -1)
	l.use = use{}
	delete(l.member.leases, l)
}

// PrefillDone gives back the part of the claim that was for prefill, when decode goes on under the same lease.
func (l *Lease) PrefillDone() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	part := use{CtxLegs: l.use.CtxLegs, CtxTokens: l.use.CtxTokens}
	l.pool.count(l, part, -1)
	l.use.add(part, -1)
}

// expire releases the claims that nobody has released in time. There are none unless something was forgotten.
func (p *Pool) expire(now int64) {
	for _, m := range p.members {
		for l := range m.leases {
			if l.expiresNS > now {
				continue
			}
			l.mu.Lock()
			done := l.released
			l.released = true
			l.mu.Unlock()
			if !done {
				p.counts.expired++
				p.o.Logger.Error("a reservation was not released in time", "role", m.info.Role, "node", m.info.Name)
				p.forget(l)
			}
		}
	}
}

// Watch has w told once when the node goes away, at once if it is gone, until Unwatch. A lease has one watcher.
func (l *Lease) Watch(w Watcher) {
	l.mu.Lock()
	cause := l.cause
	if cause == nil {
		l.watcher = w
	}
	l.mu.Unlock()
	if cause != nil {
		w.Gone(cause)
	}
}

// Unwatch ends the watch.
func (l *Lease) Unwatch() {
	l.mu.Lock()
	l.watcher = nil
	l.mu.Unlock()
}

func (l *Lease) lost(cause error) {
	l.mu.Lock()
	if l.released || l.cause != nil {
		l.mu.Unlock()
		return
	}
	l.cause = cause
	w := l.watcher
	l.watcher = nil
	l.mu.Unlock()
	if w != nil {
		w.Gone(cause)
	}
}

// Unreachable says that the node could not be reached or broke the connection. It gets no new work until it renews its
// registration or passes a health check, unless there is no other.
func (l *Lease) Unreachable() {
	l.pool.mu.Lock()
	l.member.suspectNS = max(l.pool.o.Now(), 1)
	l.member.sync()
	l.pool.mu.Unlock()
}

// claims are what the legs of a request reserve.
func claims(side place.Side, tokens int) use {
	if side == place.Prefill {
		return use{CtxLegs: 1, CtxTokens: tokens}
	}
	return use{GenLegs: 1, GenTokens: tokens}
}

func (u use) plus(v use) use {
	u.add(v, 1)
	return u
}
