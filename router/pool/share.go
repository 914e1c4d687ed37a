package pool

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"meridian.internal/shared/node"
)

// What a router has reserved and the nodes' loads do not include yet is told to the other routers: as sums for each node,
// not as changes, so that a lost message is repaired by the next one.

// ErrBadShare is returned when a message of another router cannot be understood.
var ErrBadShare = errors.New("pool: bad message of another router")

const (
	// ShareEvery is how often a router tells everything it has reserved; changes are told at once to routers that are there.
	ShareEvery = 500 * time.Millisecond
	// peerExpires: what a router has reserved counts no more when nothing was heard of it for so long.
	peerExpires = 2 * time.Second
	maxShareSum = 1 << 40
)

// Share is what one router has reserved.
type Share struct {
	Router string      `json:"router"`
	Epoch  string      `json:"epoch"` // clock id of the process
	Seq    int64       `json:"seq"`   // rises with each message
	Full   bool        `json:"full"`  // nodes that are not listed have nothing; false: they are as before
	Nodes  []ShareNode `json:"nodes"`
}

// ShareNode is what is reserved on one node; all zero: nothing any more.
type ShareNode struct {
	Role node.Role `json:"role"`
	Node string    `json:"node"`
	use
}

// ParseShare reads and checks a message.
func ParseShare(b []byte) (Share, error) {
	var s Share
	if err := json.Unmarshal(b, &s); err != nil {
		return Share{}, fmt.Errorf("%w: %w", ErrBadShare, err)
	}
	if s.Router == "" || s.Epoch == "" || s.Seq < 1 {
		return Share{}, fmt.Errorf("%w: router %q, epoch %q, seq %d: want names, and 1 or more", ErrBadShare, s.Router, s.Epoch, s.Seq)
	}
	for _, n := range s.Nodes {
		for _, v := range []int{n.CtxLegs, n.CtxTokens, n.GenLegs, n.GenTokens} {
			if v < 0 || v > maxShareSum {
				return Share{}, fmt.Errorf("%w: node %q of %s has a sum of %d, want 0 to %d", ErrBadShare, n.Node, s.Router, v, maxShareSum)
			}
		}
	}
	return s, nil
}

// peer is another router.
type peer struct {
	epoch string
	seq   int64
	atNS  int64
	nodes map[string]use // by key
}

// Others takes what another router has reserved.
func (p *Pool) Others(s Share) {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.others[s.Router]
	switch {
	case o == nil || o.epoch != s.Epoch:
		if !s.Full {
			return // its first full message comes within ShareEvery
		}
		p.dropPeer(s.Router)
		o = &peer{epoch: s.Epoch, nodes: map[string]use{}}
		p.others[s.Router] = o
	case s.Seq <= o.seq:
		return
	}
	o.seq, o.atNS = s.Seq, now
	old := o.nodes
	if s.Full {
		o.nodes = make(map[string]use, len(s.Nodes))
	}
	for _, n := range s.Nodes {
		k := key(n.Role, n.Node)
		if s.Full {
			p.move(k, o.nodes[k], use{}) // listed twice: the last counts
		}
		p.move(k, old[k], n.use)
		if n.use == (use{}) {
			delete(o.nodes, k)
		} else {
			o.nodes[k] = n.use
		}
		if s.Full {
			delete(old, k)
		}
	}
	if s.Full {
		for k, u := range old {
			p.move(k, u, use{})
		}
	}
}

// move replaces what one other router has reserved on a node.
func (p *Pool) move(k string, from, to use) {
	m := p.members[k]
	if m == nil || from == to {
		return
	}
	m.others.add(from, -1)
	m.others.add(to, 1)
	m.sync()
}

func (p *Pool) dropPeer(router string) {
	o := p.others[router]
	if o == nil {
		return
	}
	delete(p.others, router)
	for k, u := range o.nodes {
		p.move(k, u, use{})
	}
}

// forgetPeers drops the routers that fell silent.
func (p *Pool) forgetPeers(now int64) {
	for name, o := range p.others {
		if now-o.atNS > int64(peerExpires) {
			p.dropPeer(name)
		}
	}
}

// joined gives a node that is new what other routers have reserved on it already.
func (p *Pool) joined(k string, m *member) {
	for _, o := range p.others {
		m.others.add(o.nodes[k], 1)
	}
}

// News has a token when what others must know has changed.
func (p *Pool) News() <-chan struct{} { return p.news }

// changed says that there is news. Without other routers there is nobody to tell: one that comes hears everything within
// ShareEvery.
func (p *Pool) changed() {
	if len(p.others) == 0 {
		return
	}
	select {
	case p.news <- struct{}{}:
	default:
	}
}

// Reserved lists what this router has reserved and the nodes' loads do not include. With full false it lists only the nodes
// at which that has changed since the last call.
func (p *Pool) Reserved(full bool) []ShareNode {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []ShareNode
	for _, m := range p.members {
		u := m.unreported()
		if (full && u != use{}) || (!full && u != m.told) {
			out = append(out, ShareNode{m.info.Role, m.info.Name, u})
		}
		m.told = u
	}
	return out
}
