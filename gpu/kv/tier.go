package kv

import (
	"cmp"
	"fmt"
	"slices"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

// below is a tier below the device: slots that keep what cached device blocks hold, so that it can be loaded when the device
// has evicted it. It is filled behind the work: a device block that becomes cached is put into a queue, and whoever owns the
// pool copies it (NextOffload, Offloaded) when it likes.
type below struct {
	tier  kvevent.Tier
	slots []slot
	free  []int32
	index map[blockhash.Hash]int32
	order shelves // slots that no copy needs
	queue []int32 // device blocks to be copied, oldest first
	moved Moved
	peaks Peaks
}

func (t *below) peak() { t.peaks.peak(len(t.free), len(t.slots)-len(t.free), t.order.n) }

type slot struct {
	content       // none: it is free, or a copy that names it fails
	class   uint8 // of the content, once a block with it became cached; see shelves
	pins    int32 // copies that read or write it
	here    bool  // written; only then it can be found
}

// Moved counts the blocks of a tier since the pool was made.
type Moved struct {
	Stored  int64 // copied from the device
	Loaded  int64 // copied to the device
	Dropped int64 // given up for others
	Broken  int64 // found unreadable, and forgotten
}

// Move is a copy of one block between the device and a tier below it.
type Move struct {
	Group        int // 0: of the pool, i+1: of its window number i
	Tier         kvevent.Tier
	Device, Slot int32
}

// Kept is what a slot holds beyond the life of a pool. Serials go on where the highest one ended, so that they name the
// same contents in all lives.
type Kept struct {
	Slot                 int32
	ParentHash, Hash     blockhash.Hash
	ParentSerial, Serial uint64
	Tokens               []int32
}

// AddTier gives the pool so many slots of a tier, host before disk, some of which may hold something from an earlier life. It
// must be called before the pool is used; of a window, after the same tier of the pool that it belongs to. It returns how many of these are of use: a block whose parent is lost is not.
func (p *Pool) AddTier(tier kvevent.Tier, slots int, kept []Kept) int {
	t := &below{tier: tier, slots: make([]slot, slots), index: make(map[blockhash.Hash]int32), order: newShelves(slots)}
	p.below = append(p.below, t)
	used := p.restore(t, kept)
	for id := int32(slots - 1); id >= 0; id-- {
		if t.slots[id].serial == 0 {
			t.free = append(t.free, id)
		}
	}
	return used
}

// restore takes in what a tier has kept: parents first, and into the order of use so that children go first. A window's block
// follows a content of the pool that it belongs to.
func (p *Pool) restore(t *below, kept []Kept) int {
	slices.SortFunc(kept, func(a, b Kept) int { return cmp.Compare(a.Serial, b.Serial) })
	newest := map[uint64]uint64{} // content -> the highest serial of those that follow it
	follows := func(serial uint64) bool { _, ok := newest[serial]; return ok }
	if p.of != nil {
		follows = p.of.serials(t.tier)
	}
	good := kept[:0]
	for _, k := range kept {
		p.serial = max(p.serial, k.Serial)
		if p.of == nil {
			p.serial = max(p.serial, k.ParentSerial)
		} else {
			p.of.serial = max(p.of.serial, k.ParentSerial)
		}
		_, twice := t.index[k.Hash]
		begins := k.ParentSerial == 0 && k.ParentHash == p.root
		if twice || !(begins || follows(k.ParentSerial)) || len(k.Tokens) != p.perBlock || blockhash.Chain(k.ParentHash, k.Tokens) != k.Hash {
			continue
		}
		newest[k.Serial] = k.Serial
		t.slots[k.Slot] = slot{content: content{k.ParentHash, k.Hash, k.Serial, k.ParentSerial, k.Tokens}, here: true}
		t.index[k.Hash] = k.Slot
		good = append(good, k)
		p.tellStored(&t.slots[k.Slot].content, t.tier)
	}
	if p.of == nil {
		for _, k := range slices.Backward(good) { // children first
			newest[k.ParentSerial] = max(newest[k.ParentSerial], newest[k.Serial])
		}
	}
	slices.SortStableFunc(good, func(a, b Kept) int {
		return cmp.Or(cmp.Compare(newest[a.Serial], newest[b.Serial]), cmp.Compare(b.Serial, a.Serial))
	})
	for _, k := range good {
		t.order.add(k.Slot, 0) // who used it in an earlier life is not known
	}
	return len(good)
}

// serials tells of which contents a tier has kept the blocks.
func (p *Pool) serials(tier kvevent.Tier) func(serial uint64) bool {
	has := map[uint64]bool{}
	for _, t := range p.below {
		for i := 0; t.tier == tier && i < len(t.slots); i++ {
			has[t.slots[i].serial] = true
		}
	}
	return func(serial uint64) bool { return serial != 0 && has[serial] }
}

// Keep describes what the slot of a move of NextOffload is to hold.
func (p *Pool) Keep(m Move) Kept {
	c := &p.tier(m.Tier).slots[m.Slot].content
	return Kept{m.Slot, c.parentHash, c.hash, c.parent, c.serial, c.tokens}
}

// tier finds a tier below the device that the pool has.
func (p *Pool) tier(tier kvevent.Tier) *below {
	for _, t := range p.below {
		if t.tier == tier {
			return t
		}
	}
	panic(fmt.Sprintf("kv: the pool has no tier %q", tier))
}

// holds tells whether the tier has a content, or is getting it.
func (t *below) holds(c content) bool {
	id, ok := t.index[c.hash]
	return ok && t.slots[id].serial == c.serial
}

// find looks a written block up, and verifies that it is what the hash says.
func (t *below) find(hash blockhash.Hash, parent uint64, tokens []int32) (int32, bool) {
	id, ok := t.index[hash]
	return id, ok && t.slots[id].here && t.slots[id].is(parent, tokens)
}

// findBelow looks a block up in all tiers below the device, the fastest first.
func (p *Pool) findBelow(hash blockhash.Hash, parent uint64, tokens []int32) (*below, int32) {
	for _, t := range p.below {
		if id, ok := t.find(hash, parent, tokens); ok {
			return t, id
		}
	}
	return nil, none
}

func (t *below) pin(id int32) {
	s := &t.slots[id]
	if s.pins == 0 && s.here {
		t.order.remove(id)
	}
	s.pins++
}

// unpin ends a copy. A slot that holds nothing then is free.
func (t *below) unpin(id int32) {
	s := &t.slots[id]
	s.pins--
	switch {
	case s.pins > 0:
	case s.here:
		t.order.add(id, s.class)
	default:
		t.free = append(t.free, id)
	}
	t.peak()
}

// prefer makes a class that of a content, if it is a higher one: then it counts as used now.
func (t *below) prefer(id int32, class uint8) {
	s := &t.slots[id]
	if class <= s.class {
		return
	}
	s.class = class
	if s.pins == 0 {
		t.order.remove(id)
		t.order.add(id, class)
	}
}

// enqueue wants a cached device block copied to the tiers that lack it. The others hear of its class.
func (p *Pool) enqueue(id int32) {
	b := &p.blocks[id]
	if p.isTail(b) {
		return
	}
	for i, t := range p.below {
		if t.holds(b.content) {
			t.prefer(t.index[b.hash], b.class)
		} else if bit := uint8(1) << i; b.queued&bit == 0 {
			b.queued |= bit
			t.queue = append(t.queue, id)
		}
	}
}

// NextOffload names the next device block to be copied to a tier, and where to; false if there is none. The block is leased,
// and its slot taken, until Offloaded.
func (p *Pool) NextOffload(tier kvevent.Tier) (Move, bool) {
	i := slices.IndexFunc(p.below, func(t *below) bool { return t.tier == tier })
	if i < 0 {
		return Move{}, false
	}
	t := p.below[i]
	for len(t.queue) > 0 {
		id := t.queue[0]
		t.queue = t.queue[1:]
		b := &p.blocks[id]
		b.queued &^= 1 << i
		if !b.indexed || p.isTail(b) || t.holds(b.content) {
			continue // evicted since, or there by now
		}
		to, ok := p.room(t, b.hash)
		if !ok {
			continue // copies hold all of it
		}
		p.lease(id)
		t.slots[to] = slot{content: b.content, pins: 1}
		t.index[b.hash] = to
		return Move{p.group, tier, id, to}, true
	}
	return Move{}, false
}

// Offloaded ends a move of NextOffload; not ok: the copy failed.
func (p *Pool) Offloaded(m Move, ok bool) {
	t := p.tier(m.Tier)
	if ok {
		t.slots[m.Slot].here = true
		t.moved.Stored++
	} else {
		p.forgetSlot(t, m.Slot)
	}
	t.unpin(m.Slot)
	b, bit := &p.blocks[m.Device], uint8(1)<<slices.Index(p.below, t)
	if !ok {
		b.queued |= bit // not at once again: the next time that it becomes cached
	}
	p.Unlease([]int32{m.Device})
	if !ok {
		b.queued &^= bit
	}
}

// room takes a free slot, or that of another content with the same hash, or the first in the order of shelves.
func (p *Pool) room(t *below, hash blockhash.Hash) (int32, bool) {
	id, taken := t.index[hash]
	switch {
	case taken && t.slots[id].pins > 0:
		return none, false
	case taken:
	case len(t.free) > 0:
		id = t.free[len(t.free)-1]
		t.free = t.free[:len(t.free)-1]
		return id, true
	default:
		if id = t.order.next(); id == none {
			return none, false
		}
	}
	t.order.remove(id)
	t.moved.Dropped++
	p.forgetSlot(t, id)
	return id, true
}

// forgetSlot takes its content from a slot that is in no list.
func (p *Pool) forgetSlot(t *below, id int32) {
	hash := t.slots[id].hash
	was, _ := p.levelOf(hash)
	delete(t.index, hash)
	t.slots[id] = slot{pins: t.slots[id].pins}
	p.tellMoved(hash, was)
}

// matchBelow finds the blocks that follow a prefix in the tiers below the device, at most limit tokens of the whole, and pins
// them.
func (p *Pool) matchBelow(at Prefix, tokens []int32, limit int) (found []Move, end Prefix) {
	if len(p.below) == 0 {
		return nil, at
	}
	for want := min(limit, len(tokens)) / p.perBlock; at.n < want; at.n++ {
		part := tokens[at.n*p.perBlock : (at.n+1)*p.perBlock]
		hash := blockhash.Chain(at.hash, part)
		t, id := p.findBelow(hash, at.serial, part)
		if t == nil {
			break
		}
		t.pin(id)
		found = append(found, Move{Group: p.group, Tier: t.tier, Slot: id})
		at.hash, at.serial = hash, t.slots[id].serial
	}
	return found, at
}

// Loaded ends the loads of a Grant, of which the first good ones brought their blocks; what the others should have brought must
// be computed. The content of loaded blocks can be found once they are published. What the disk could not give is forgotten.
func (p *Pool) Loaded(loads []Move, good int) {
	for len(loads) > 0 { // those of one group after those of another
		n := slices.IndexFunc(loads, func(m Move) bool { return m.Group != loads[0].Group })
		if n < 0 {
			n = len(loads)
		}
		p.Group(loads[0].Group).loaded(loads[:n], min(good, n))
		loads, good = loads[n:], max(good-n, 0)
	}
}

func (p *Pool) loaded(loads []Move, good int) {
	for i, m := range loads {
		t := p.tier(m.Tier)
		if i == good && m.Tier == kvevent.Disk && t.slots[m.Slot].here {
			t.moved.Broken++
			p.forgetSlot(t, m.Slot)
		}
		t.unpin(m.Slot)
		if i >= good {
			t.moved.Loaded--
		}
	}
	p.totals.Loaded -= int64(len(loads) - good)
	p.totals.Missed += int64(len(loads) - good)
}

// checkBelow verifies that each slot of each tier is free, in the order of use, or pinned, and that order and index are right.
func (p *Pool) checkBelow() error {
	for _, t := range p.below {
		pinned, named, nameless := 0, 0, 0
		for id := range t.slots {
			s := &t.slots[id]
			switch {
			case s.pins < 0:
				return fmt.Errorf("kv: slot %d of the %s has %d pins", id, t.tier, s.pins)
			case s.pins > 0:
				pinned++
			}
			if s.serial != 0 {
				named++
				if at, ok := t.index[s.hash]; !ok || at != int32(id) {
					return fmt.Errorf("kv: slot %d of the %s has a name that the index does not give to it", id, t.tier)
				}
			} else if s.pins > 0 {
				nameless++
			}
		}
		if len(t.free)+t.order.n+pinned != len(t.slots) || named != len(t.index) || named != t.order.n+pinned-nameless {
			return fmt.Errorf("kv: of %d slots of the %s %d are free, %d cached, %d pinned, %d of them for nothing; %d have names, the index holds %d",
				len(t.slots), t.tier, len(t.free), t.order.n, pinned, nameless, named, len(t.index))
		}
		if err := t.order.check(t.ordered); err != nil {
			return fmt.Errorf("slots of the %s: %w", t.tier, err)
		}
	}
	return nil
}

// ordered tells whether a slot belongs where it is in the order: of more pins than their share some are lost.
func (t *below) ordered(id int32) bool {
	s, class := &t.slots[id], t.order.class[id]
	return s.pins == 0 && s.here && (class == s.class || class == usual && (s.class == 0 || s.class == pinned))
}
