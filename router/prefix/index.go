// Package prefix owns what a router knows of the KV blocks that nodes hold: an index from block hashes to nodes, kept by
// the nodes' events (stream.go), and the longest prefix of a prompt that each node holds. It moves no events and fetches
// no snapshots (router/feed does). Its memory is bounded; over the bound it knows less, never something wrong.
//
// The index is a hint: an event may be on its way. Who attaches a block compares its tokens.
package prefix

import (
	"math/bits"
	"sync"

	"meridian.internal/shared/blockhash"
)

// Slot is a node's number in the index.
type Slot int32

// None is the slot of a node that the index does not follow.
const None Slot = -1

const (
	// MaxNodes is how many nodes the index follows; others have no slot.
	MaxNodes = 4096
	words    = MaxNodes / 64
	// few holders of a block are kept in its entry, more in a bit set of their own.
	few = 6
	// DefaultMaxBlocks bounds the blocks of all nodes together. A block costs about 50 bytes a node that holds it.
	DefaultMaxBlocks = 2 << 20
)

// entry is who holds one block.
type entry struct {
	n     uint16 // of slots; few+1: they are in a set
	slots [few]uint16
	set   uint32 // in Index.sets, of more than few
}

// Index maps blocks to nodes. Safe for concurrent use.
type Index struct {
	max int

	mu      sync.RWMutex // guards what follows
	blocks  map[blockhash.Hash]entry
	sets    [][]uint64  // of entries, by slot; nil: free
	free    []uint32    // of sets
	nodes   []*holdings // by slot; nil: free
	held    int         // blocks of all nodes
	dropped int64       // blocks that were not taken in because of max
	gaps    int64
}

// holdings is one node's part of the index.
type holdings struct {
	blocks map[blockhash.Hash]struct{}
	stream
}

// New makes an index of at most max blocks, counted once for each node that holds them; 0: DefaultMaxBlocks.
func New(max int) *Index {
	if max == 0 {
		max = DefaultMaxBlocks
	}
	return &Index{max: max, blocks: map[blockhash.Hash]entry{}}
}

// Join gives a node a slot; None when all are taken.
func (x *Index) Join() Slot {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := &holdings{blocks: map[blockhash.Hash]struct{}{}}
	for i, n := range x.nodes {
		if n == nil {
			x.nodes[i] = h
			return Slot(i)
		}
	}
	if len(x.nodes) == MaxNodes {
		return None
	}
	x.nodes = append(x.nodes, h)
	return Slot(len(x.nodes) - 1)
}

// step is how many blocks are changed under one lock where there are many, so that no placement waits for all of them.
const step = 512

// Leave takes a node out.
func (x *Index) Leave(s Slot) {
	for x.leave(s) {
	}
}

func (x *Index) leave(s Slot) (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.node(s)
	if h == nil {
		return false
	}
	h.stream = stream{leaving: true}
	n := 0
	for hash := range h.blocks {
		if n++; n > step {
			return true
		}
		x.drop(s, h, hash)
	}
	x.nodes[s] = nil
	return false
}

func (x *Index) node(s Slot) *holdings {
	if s < 0 || int(s) >= len(x.nodes) {
		return nil
	}
	return x.nodes[s]
}

// add notes that a node holds a block.
func (x *Index) add(s Slot, h *holdings, hash blockhash.Hash) {
	if _, there := h.blocks[hash]; there {
		return
	}
	if x.held >= x.max {
		x.dropped++
		return
	}
	h.blocks[hash] = struct{}{}
	x.held++
	e := x.blocks[hash]
	switch {
	case e.n < few:
		e.slots[e.n] = uint16(s)
		e.n++
	case e.n == few:
		set := make([]uint64, (len(x.nodes)+63)/64)
		for _, old := range e.slots {
			setBit(set, int(old))
		}
		setBit(set, int(s))
		e = entry{n: few + 1, set: x.keep(set)}
	default:
		set := x.sets[e.set]
		for len(set) <= int(s)/64 {
			set = append(set, 0)
		}
		setBit(set, int(s))
		x.sets[e.set] = set
		return
	}
	x.blocks[hash] = e
}

// keep gives a set its place.
func (x *Index) keep(set []uint64) uint32 {
	if n := len(x.free); n > 0 {
		at := x.free[n-1]
		x.free = x.free[:n-1]
		x.sets[at] = set
		return at
	}
	x.sets = append(x.sets, set)
	return uint32(len(x.sets) - 1)
}

// drop notes that a node does not hold a block any more.
func (x *Index) drop(s Slot, h *holdings, hash blockhash.Hash) {
	if _, there := h.blocks[hash]; !there {
		return
	}
	delete(h.blocks, hash)
	x.held--
	e := x.blocks[hash]
	if e.n > few {
		set := x.sets[e.set]
		set[s/64] &^= 1 << (s % 64)
		if count(set) > few {
			return
		}
		x.sets[e.set], x.free = nil, append(x.free, e.set)
		e = entry{}
		forEach(set, func(slot int) { e.slots[e.n] = uint16(slot); e.n++ })
		x.blocks[hash] = e
		return
	}
	for i := range e.n {
		if e.slots[i] == uint16(s) {
			e.n--
			e.slots[i] = e.slots[e.n]
			break
		}
	}
	if e.n == 0 {
		delete(x.blocks, hash)
		return
	}
	x.blocks[hash] = e
}

// Match writes how many tokens of a prompt each node holds to held, by slot: whole blocks of its beginning, which have perBlock
// tokens each. Slots that hold none are left as they are, and so are those that held has no room for.
func (x *Index) Match(held []int32, prompt []blockhash.Hash, perBlock int) {
	if len(prompt) == 0 {
		return
	}
	var all, own [words]uint64
	x.mu.RLock()
	defer x.mu.RUnlock()
	active := all[:(len(x.nodes)+63)/64] // hold all blocks so far
	for i, hash := range prompt {
		holders := own[:len(active)]
		if e := x.blocks[hash]; e.n > few {
			holders = x.sets[e.set] // it may be shorter
		} else { // n is 0 where nobody holds it
			clear(holders)
			for _, s := range e.slots[:e.n] {
				setBit(holders, int(s))
			}
		}
		if i == 0 {
			copy(active, holders)
			continue
		}
		left := uint64(0)
		for w, before := range active {
			now := uint64(0)
			if w < len(holders) {
				now = before & holders[w]
			}
			if now != before {
				write(held, w, before&^now, i*perBlock)
				active[w] = now
			}
			left |= now
		}
		if left == 0 {
			return
		}
	}
	for w, slots := range active {
		write(held, w, slots, len(prompt)*perBlock)
	}
}

// write gives the slots of one word of a set what they hold.
func write(held []int32, word int, slots uint64, tokens int) {
	for ; slots != 0; slots &= slots - 1 {
		if s := word*64 + bits.TrailingZeros64(slots); s < len(held) {
			held[s] = int32(tokens)
		}
	}
}

// Stats of an index.
type Stats struct {
	Blocks  int   // counted once for each node that holds them
	Max     int   // bound of Blocks
	Dropped int64 // blocks that were not taken in because of the bound, ever
	Gaps    int64 // times that events were missing, ever
	Behind  int   // nodes of which a snapshot is needed
}

// Stats counts.
func (x *Index) Stats() Stats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	st := Stats{Blocks: x.held, Max: x.max, Dropped: x.dropped, Gaps: x.gaps}
	for _, h := range x.nodes {
		if h != nil && !h.leaving && !h.synced {
			st.Behind++
		}
	}
	return st
}

func setBit(set []uint64, i int) { set[i/64] |= 1 << (i % 64) }

func count(set []uint64) int {
	n := 0
	for _, w := range set {
		n += bits.OnesCount64(w)
	}
	return n
}

func forEach(set []uint64, f func(i int)) {
	for w, v := range set {
		for ; v != 0; v &= v - 1 {
			f(w*64 + bits.TrailingZeros64(v))
		}
	}
}
