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
	n     uint16 // of slots; few+1: they are in Index.many
	slots [few]uint16
}

// Index maps blocks to nodes. Safe for concurrent use.
type Index struct {
	max int

	mu      sync.RWMutex // guards what follows
	blocks  map[blockhash.Hash]entry
	many    map[blockhash.Hash][]uint64
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
	return &Index{max: max, blocks: map[blockhash.Hash]entry{}, many: map[blockhash.Hash][]uint64{}}
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
		x.many[hash] = set
		e.n = few + 1
	default:
		set := x.many[hash]
		for len(set) <= int(s)/64 {
			set = append(set, 0)
		}
		setBit(set, int(s))
		x.many[hash] = set
		return
	}
	x.blocks[hash] = e
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
		set := x.many[hash]
		set[s/64] &^= 1 << (s % 64)
		if count(set) > few {
			return
		}
		e = entry{}
		forEach(set, func(slot int) { e.slots[e.n] = uint16(slot); e.n++ })
		delete(x.many, hash)
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

// Hit is a node that holds the first Blocks blocks of a prompt.
type Hit struct {
	Slot   Slot
	Blocks int
}

// Match appends every node that holds at least the first block, with the length of its prefix.
func (x *Index) Match(dst []Hit, prompt []blockhash.Hash) []Hit {
	if len(prompt) == 0 {
		return dst
	}
	var buf, next [words]uint64
	x.mu.RLock()
	defer x.mu.RUnlock()
	size := (len(x.nodes) + 63) / 64
	active, keep := buf[:size], next[:size]
	for i, hash := range prompt {
		e := x.blocks[hash] // n is 0 where nobody holds it
		clear(keep)
		if e.n > few {
			copy(keep, x.many[hash])
		} else {
			for _, s := range e.slots[:e.n] {
				setBit(keep, int(s))
			}
		}
		if i == 0 {
			copy(active, keep)
			continue
		}
		left := uint64(0)
		for w := range active {
			gone := active[w] &^ keep[w]
			for ; gone != 0; gone &= gone - 1 {
				dst = append(dst, Hit{Slot(w*64 + bits.TrailingZeros64(gone)), i})
			}
			active[w] &= keep[w]
			left |= active[w]
		}
		if left == 0 {
			return dst
		}
	}
	forEach(active, func(s int) { dst = append(dst, Hit{Slot(s), len(prompt)}) })
	return dst
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
