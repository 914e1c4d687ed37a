// Package kv owns the accounting of KV blocks: which block is free, used, leased to a transfer or cached, who counts on
// it, and which prefix of tokens it holds. It is pure: it knows block numbers, never bytes, devices, clocks or
// goroutines. One goroutine, the engine's, owns a Pool.
//
// Each block is in exactly one of four states, and free + used + leased + cached = all:
//
//	free    nobody holds it and its content has no name
//	used    at least one sequence or reservation holds it
//	leased  only transfers hold it
//	cached  nobody holds it, but its content can be found by its tokens; it is evicted when free blocks run out
//
// A block is found by the chained hash of its prefix and attached only if its tokens are equal and its parent is the very
// content that was attached before it, so a hash collision costs a miss and never gives wrong text.
//
// Layers that see only the last tokens can have pools of their own (AddWindow), whose blocks are given back while a sequence
// runs. A prefix is of use only if they, too, have what is seen from its end.
//
// Of a block whose beginning only is wanted, that part can be copied into an empty one (Grant.Copy). With tiers below the device
// (AddTier) what it evicts can be loaded again (Grant.Loads). The pool says what to copy; its owner does it.
package kv

import (
	"fmt"
	"slices"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

// none ends a list of blocks.
const none = int32(-1)

type block struct {
	refs, leases int32
	indexed      bool
	queued       uint8 // bit i: for the tier below[i]
	class        uint8 // of the content, once it has a name; see shelves
	sibling      int32
	content
}

// content is what a block holds, once it has a name.
type content struct {
	parentHash, hash blockhash.Hash
	serial           uint64 // names the content, in every tier; a parent is remembered by it
	parent           uint64 // serial of the parent's content, 0 for the first block of a prefix
	tokens           []int32
}

// is tells whether the content is that of these tokens after that parent: a hash alone proves nothing.
func (c *content) is(parent uint64, tokens []int32) bool {
	return c.parent == parent && slices.Equal(c.tokens, tokens)
}

// Events are told of changes of the index, in order: what is stored in a tier, moves to another one, the fastest that has it,
// or is removed from the last. A nil function is not called; the tokens may be kept, not changed.
type Events struct {
	Stored  func(parent, hash blockhash.Hash, tokens []int32, in kvevent.Tier)
	Moved   func(hash blockhash.Hash, from, to kvevent.Tier)
	Removed func(hash blockhash.Hash)
}

func (p *Pool) tellStored(c *content, in kvevent.Tier) {
	if p.events.Stored != nil {
		p.events.Stored(c.parentHash, c.hash, c.tokens, in)
	}
}

// tellMoved tells where a hash is now that was in a tier until now.
func (p *Pool) tellMoved(hash blockhash.Hash, was kvevent.Tier) {
	switch is, here := p.levelOf(hash); {
	case !here && p.events.Removed != nil:
		p.events.Removed(hash)
	case here && is != was && p.events.Moved != nil:
		p.events.Moved(hash, was, is)
	}
}

// levelOf is the fastest tier that has a hash.
func (p *Pool) levelOf(hash blockhash.Hash) (kvevent.Tier, bool) {
	if _, ok := p.index[hash]; ok {
		return kvevent.Device, true
	}
	for _, t := range p.below {
		if _, ok := t.index[hash]; ok {
			return t.tier, true
		}
	}
	return 0, false
}

// Pool is the set of KV blocks of one device.
type Pool struct {
	perBlock     int
	root         blockhash.Hash
	blocks       []block
	free         []int32
	index        map[blockhash.Hash]int32
	children     map[uint64][]int32 // serial of a content -> indexed blocks whose parent it is
	cached       shelves
	used, leased int
	serial       uint64
	below        []*below  // the tiers below the device, the fastest first
	windows      []*window // nil: all layers see everything
	windowPools  []*Pool   // those of windows
	group        int       // 0, i+1 for window number i of another pool
	of           *Pool     // of a window: that pool
	// Of a window: blocks that its sequences may take when they slide on, since what they let go of is held by others, too.
	promised int
	events   Events
	totals   Totals
	peaks    Peaks
}

// Totals count since the pool was made.
type Totals struct {
	Allocated int64 // blocks handed out empty
	Reused    int64 // full blocks attached as they are
	Loaded    int64 // full blocks of which a tier below had the content; the blocks count as Allocated too
	Partial   int64 // blocks of which a part was copied from another; they count as Allocated too
	Missed    int64 // full blocks that were asked for and came from nowhere
	Evicted   int64 // cached blocks that Alloc took
	Freed     int64 // blocks that became free; Allocated - Freed = Used + Leased + Cached at every moment
}

// Stats is the state of the pool. Max = Free + Used + Leased + Cached.
type Stats struct {
	Max, Free, Used, Leased, Cached int
	Host, Disk                      TierStats
	Totals
}

// TierStats is the state of a tier below the device, all 0 if there is none.
type TierStats struct {
	Max, Used int // slots
	Evictable int // of the used ones, those that no copy needs
	Moved
}

// Peaks are the most blocks that could be handed out, that were held or leased, and that were cached at one moment.
type Peaks struct{ Available, Used, Evictable int }

// peak takes note of a new state.
func (k *Peaks) peak(available, used, evictable int) {
	k.Available, k.Used, k.Evictable = max(k.Available, available), max(k.Used, used), max(k.Evictable, evictable)
}

// TakePeaks gives the peaks since it was last called, and those of the host tier.
func (p *Pool) TakePeaks() (device, host Peaks) {
	p.peak()
	device, p.peaks = p.peaks, Peaks{}
	p.peak()
	for _, t := range p.below {
		if t.tier == kvevent.Host {
			t.peak()
			host, t.peaks = t.peaks, Peaks{}
			t.peak()
		}
	}
	return device, host
}

func (p *Pool) peak() { p.peaks.peak(len(p.free)+p.cached.n, p.used+p.leased, p.cached.n) }

// Has tells whether the pool, or one of its windows, has a tier below the device.
func (p *Pool) Has(tier kvevent.Tier) bool {
	for _, t := range p.below {
		if t.tier == tier {
			return true
		}
	}
	for _, w := range p.windowPools {
		if w.Has(tier) {
			return true
		}
	}
	return false
}

// Conserved is an error with both numbers if blocks were lost or made up.
func (s *Stats) Conserved() error {
	if n := s.Free + s.Used + s.Leased + s.Cached; n != s.Max {
		return fmt.Errorf("kv: %d free, %d used, %d leased and %d cached blocks are %d, there are %d", s.Free, s.Used, s.Leased, s.Cached, n, s.Max)
	}
	if held := s.Allocated - s.Freed; held != int64(s.Max-s.Free) {
		return fmt.Errorf("kv: %d blocks allocated and %d freed are %d, not free are %d", s.Allocated, s.Freed, held, s.Max-s.Free)
	}
	return nil
}

// New makes a pool of free blocks of perBlock tokens each. The root is the identity of model and adapter.
func New(blocks, perBlock int, root blockhash.Hash, events Events) *Pool {
	p := &Pool{
		perBlock: perBlock, root: root, events: events,
		blocks: make([]block, blocks), free: make([]int32, blocks),
		index: make(map[blockhash.Hash]int32), children: make(map[uint64][]int32), cached: newShelves(blocks),
	}
	for i := range p.free {
		p.free[i] = int32(blocks - 1 - i) // the first block is handed out first
	}
	return p
}

// Stats returns the state of the pool.
func (p *Pool) Stats() Stats {
	s := Stats{Max: len(p.blocks), Free: len(p.free), Used: p.used, Leased: p.leased, Cached: p.cached.n, Totals: p.totals}
	for _, t := range p.below {
		at := &s.Host
		if t.tier == kvevent.Disk {
			at = &s.Disk
		}
		*at = TierStats{len(t.slots), len(t.slots) - len(t.free), t.order.n, t.moved}
	}
	return s
}

// Missed is Totals.Missed, which is asked for at every admission.
func (p *Pool) Missed() int64 { return p.totals.Missed }

// Available is the number of blocks that Alloc can hand out: free and cached ones.
func (p *Pool) Available() int { return len(p.free) + p.cached.n - p.promised }

// Alloc appends n empty blocks to dst, each held once, evicting the longest unused cached ones, in the order of shelves, when free ones run out.
// With fewer than n available it changes nothing and returns false.
func (p *Pool) Alloc(dst []int32, n int) ([]int32, bool) {
	if p.Available() < n {
		return dst, false
	}
	for range n {
		if len(p.free) == 0 {
			p.totals.Evicted++
			p.forget(p.cached.next())
		}
		id := p.free[len(p.free)-1]
		p.free = p.free[:len(p.free)-1]
		p.blocks[id].refs, p.blocks[id].class = 1, 0
		p.used++
		dst = append(dst, id)
	}
	p.totals.Allocated += int64(n)
	p.peak()
	return dst, true
}

// PerBlock is the number of tokens of a block.
func (p *Pool) PerBlock() int { return p.perBlock }

// Blocks is the number of blocks that hold so many tokens.
func (p *Pool) Blocks(tokens int) int { return (tokens + p.perBlock - 1) / p.perBlock }

// Retain adds a holder to each block, which must be held or leased already.
func (p *Pool) Retain(blocks []int32) {
	for _, id := range blocks {
		p.hold(id)
	}
}

// Prefer says that a request of a priority uses the blocks that it holds: content of a higher one stays cached longer, and what is
// pinned longer than all that is not. Of several requests the highest counts.
func (p *Pool) Prefer(blocks []int32, priority int, pin bool) {
	class := classOf(priority, pin)
	for _, id := range blocks {
		b := &p.blocks[id]
		b.class = max(b.class, class)
	}
}

// PreferColumns does so for what columns hold.
func (p *Pool) PreferColumns(columns []Column, priority int, pin bool) {
	for i := range columns {
		columns[i].Held(func(blocks []int32) { p.windows[i].Prefer(blocks, priority, pin) })
	}
}

// Release drops one holder of each block. What nobody holds becomes cached if its content can be found, else free. The
// end of a prefix is dropped first, so that it is evicted before what it depends on.
func (p *Pool) Release(blocks []int32) {
	for i := len(blocks) - 1; i >= 0; i-- {
		b := &p.blocks[blocks[i]]
		if b.refs <= 0 {
			panic(fmt.Sprintf("kv: block %d released though nobody holds it", blocks[i]))
		}
		b.refs--
		if b.refs > 0 {
			p.promise(-1)
			continue
		}
		p.used--
		if b.leases > 0 {
			p.leased++
		} else {
			p.drop(blocks[i])
		}
	}
}

// Lease gives a transfer a hold on each block; the blocks must be held or leased already.
func (p *Pool) Lease(blocks []int32) {
	for _, id := range blocks {
		if b := &p.blocks[id]; b.refs == 0 && b.leases == 0 {
			panic(fmt.Sprintf("kv: block %d leased though nobody holds it", id))
		}
		p.lease(id)
	}
}

// lease adds a lease, whatever the state of the block but free.
func (p *Pool) lease(id int32) {
	b := &p.blocks[id]
	b.leases++
	if b.refs == 0 && b.leases == 1 {
		p.cached.remove(id)
		p.leased++
	}
}

// Unlease ends a transfer's hold.
func (p *Pool) Unlease(blocks []int32) {
	for i := len(blocks) - 1; i >= 0; i-- {
		b := &p.blocks[blocks[i]]
		if b.leases <= 0 {
			panic(fmt.Sprintf("kv: lease of block %d ended though it has none", blocks[i]))
		}
		b.leases--
		if b.refs == 0 && b.leases == 0 {
			p.leased--
			p.drop(blocks[i])
		}
	}
}

// hold adds a holder, whatever the state of the block but free.
func (p *Pool) hold(id int32) {
	b := &p.blocks[id]
	b.refs++
	if b.refs > 1 {
		p.promise(1)
		return
	}
	p.used++
	switch {
	case b.leases > 0:
		p.leased--
	case b.indexed:
		p.cached.remove(id)
	default:
		panic(fmt.Sprintf("kv: free block %d retained", id))
	}
	p.peak()
}

// promise counts the holders of blocks of a window beyond the first ones.
func (p *Pool) promise(n int) {
	if p.group > 0 {
		p.promised += n
	}
}

// drop takes in a block that nobody holds any more.
func (p *Pool) drop(id int32) {
	if p.blocks[id].indexed {
		p.cached.add(id, p.blocks[id].class)
		p.enqueue(id)
	} else {
		p.totals.Freed++
		p.free = append(p.free, id)
	}
	p.peak()
}

// forget takes a cached block out of the cache and makes it free.
func (p *Pool) forget(id int32) {
	p.cached.remove(id)
	p.unindex(id)
	p.totals.Freed++
	p.free = append(p.free, id)
}
