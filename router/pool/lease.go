package pool

import (
	"sync"

	"meridian.internal/shared/node"
)

// Lease is one leg's claim on a node: it counts in the node's load from selection until Release. Safe for concurrent use.
type Lease struct {
	Name    string
	Role    node.Role // role of the node
	URL     string
	KVAddr  string // ctx nodes of ours
	Model   node.Model
	Foreign bool

	pool    *Pool
	member  *member
	prefill bool // counts as a prefill leg
	decode  bool // counts as a generation leg
	tokens  int

	mu       sync.Mutex // guards what follows
	released bool
	cause    error // not nil: the node is gone
	watchers map[int]func(error)
	next     int
}

// newLease counts the leg. The pool's mutex is held.
func (p *Pool) newLease(m *member, prefill, decode bool, tokens int) *Lease {
	l := &Lease{
		Name: m.info.Name, Role: m.info.Role, URL: m.info.URL, KVAddr: m.info.KVAddr, Foreign: m.foreign,
		pool: p, member: m, prefill: prefill, decode: decode, tokens: tokens,
	}
	if m.info.Model != nil {
		l.Model = *m.info.Model
	}
	l.count(1)
	m.leases[l] = struct{}{}
	return l
}

func (l *Lease) count(sign int) {
	if l.prefill {
		l.member.ctx.legs += sign
		l.member.ctx.tokens += sign * l.tokens
	}
	if l.decode {
		l.member.gen.legs += sign
	}
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
	l.count(-1)
	delete(l.member.leases, l)
	l.pool.mu.Unlock()
}

// PrefillDone gives back the part of the claim that was for prefill, when decode goes on under the same lease or the
// context leg has answered.
func (l *Lease) PrefillDone() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released || !l.prefill {
		return
	}
	l.member.ctx.legs--
	l.member.ctx.tokens -= l.tokens
	l.prefill = false
}

// Watch calls f once when the node goes away, at once if it is gone. stop ends the watch.
func (l *Lease) Watch(f func(cause error)) (stop func()) {
	l.mu.Lock()
	if cause := l.cause; cause != nil {
		l.mu.Unlock()
		f(cause)
		return func() {}
	}
	defer l.mu.Unlock()
	if l.watchers == nil {
		l.watchers = map[int]func(error){}
	}
	id := l.next
	l.next++
	l.watchers[id] = f
	return func() {
		l.mu.Lock()
		delete(l.watchers, id)
		l.mu.Unlock()
	}
}

func (l *Lease) lost(cause error) {
	l.mu.Lock()
	if l.released || l.cause != nil {
		l.mu.Unlock()
		return
	}
	l.cause = cause
	watchers := l.watchers
	l.watchers = nil
	l.mu.Unlock()
	for _, f := range watchers {
		f(cause)
	}
}

// Lost returns why the node is gone, nil while it is there.
func (l *Lease) Lost() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// Unreachable says that the node could not be reached or broke the connection. It gets no new work until it renews its
// registration or passes a health check, unless there is no other.
func (l *Lease) Unreachable() {
	l.pool.mu.Lock()
	l.member.suspectNS = max(l.pool.o.Now(), 1)
	l.pool.mu.Unlock()
}
