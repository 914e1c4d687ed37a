package kv

import (
	"fmt"

	"meridian.internal/shared/blockhash"
)

// host is the second tier: blocks of host memory that keep what cached device blocks hold, so that it can be loaded when the
// device has evicted it. It is filled behind the work: a device block that becomes cached is put into a queue, and whoever
// owns the pool copies it (NextOffload, Offloaded) when it likes.
type host struct {
	blocks []hostBlock
	free   []int32
	index  map[blockhash.Hash]int32
	order  lru     // blocks that no copy needs
	queue  []int32 // device blocks to be copied, oldest first
}

type hostBlock struct {
	content
	pins int32 // copies that read or write it
	here bool  // written; only then it can be found
}

// Move is a copy of one block between the tiers.
type Move struct{ Device, Host int32 }

// AddHost gives the pool so many blocks of host memory. It must be called before the pool is used.
func (p *Pool) AddHost(blocks int) {
	h := &host{blocks: make([]hostBlock, blocks), free: make([]int32, blocks), index: make(map[blockhash.Hash]int32), order: newLRU(blocks)}
	for i := range h.free {
		h.free[i] = int32(blocks - 1 - i)
	}
	p.host = h
}

// holds tells whether the host has a content, or is getting it.
func (h *host) holds(c content) bool {
	if h == nil {
		return false
	}
	id, ok := h.index[c.hash]
	return ok && h.blocks[id].serial == c.serial
}

// find looks a written block up, and verifies that it is what the hash says.
func (h *host) find(hash blockhash.Hash, parent uint64, tokens []int32) (int32, bool) {
	if h == nil {
		return none, false
	}
	id, ok := h.index[hash]
	return id, ok && h.blocks[id].here && h.blocks[id].is(parent, tokens)
}

func (h *host) pin(id int32) {
	b := &h.blocks[id]
	if b.pins == 0 && b.here {
		h.order.remove(id)
	}
	b.pins++
}

func (h *host) unpin(id int32) {
	b := &h.blocks[id]
	b.pins--
	if b.pins == 0 && b.here {
		h.order.add(id)
	}
}

// enqueue wants a cached device block copied.
func (p *Pool) enqueue(id int32) {
	b := &p.blocks[id]
	if p.host == nil || b.queued || p.host.holds(b.content) {
		return
	}
	b.queued = true
	p.host.queue = append(p.host.queue, id)
}

// NextOffload names the next device block to be copied to the host, and where to; false if there is none. The block is leased,
// and its place on the host taken, until Offloaded.
func (p *Pool) NextOffload() (Move, bool) {
	h := p.host
	if h == nil {
		return Move{}, false
	}
	for len(h.queue) > 0 {
		id := h.queue[0]
		h.queue = h.queue[1:]
		b := &p.blocks[id]
		b.queued = false
		if !b.indexed || h.holds(b.content) {
			continue // evicted since, or here by now
		}
		to, ok := p.hostRoom(b.hash)
		if !ok {
			continue // copies hold all of it
		}
		p.lease(id)
		h.blocks[to] = hostBlock{content: b.content, pins: 1}
		h.index[b.hash] = to
		return Move{Device: id, Host: to}, true
	}
	return Move{}, false
}

// Offloaded ends a move of NextOffload; not ok: the copy failed.
func (p *Pool) Offloaded(m Move, ok bool) {
	b := &p.host.blocks[m.Host]
	if ok {
		b.here = true
		p.totals.Offloaded++
	}
	p.host.unpin(m.Host)
	if !ok {
		p.hostForget(m.Host)
	}
	device := &p.blocks[m.Device]
	device.queued = !ok // not at once again: the next time that it becomes cached
	p.Unlease([]int32{m.Device})
	device.queued = false
}

// hostRoom takes a free host block, or that of the longest unused content, or that of another content with the same hash.
func (p *Pool) hostRoom(hash blockhash.Hash) (int32, bool) {
	h := p.host
	id, taken := h.index[hash]
	switch {
	case taken && h.blocks[id].pins > 0:
		return none, false
	case taken:
	case len(h.free) > 0:
		id = h.free[len(h.free)-1]
		h.free = h.free[:len(h.free)-1]
		return id, true
	case h.order.oldest == none:
		return none, false
	default:
		id = h.order.oldest
	}
	h.order.remove(id)
	p.totals.HostDropped++
	p.hostForget(id)
	h.free = h.free[:len(h.free)-1] // it was just put there
	return id, true
}

// hostForget frees a host block that is in no list.
func (p *Pool) hostForget(id int32) {
	h := p.host
	hash := h.blocks[id].hash
	delete(h.index, hash)
	h.blocks[id] = hostBlock{}
	h.free = append(h.free, id)
	if _, ok := p.index[hash]; !ok && p.events.Removed != nil {
		p.events.Removed(hash)
	}
}

// matchHost finds the blocks that follow a prefix and are on the host, at most limit tokens of the whole, and pins them.
func (p *Pool) matchHost(at Prefix, tokens []int32, limit int) (found []int32, end Prefix) {
	if p.host == nil {
		return nil, at
	}
	for want := min(limit, len(tokens)) / p.perBlock; at.n < want; at.n++ {
		part := tokens[at.n*p.perBlock : (at.n+1)*p.perBlock]
		hash := blockhash.Chain(at.hash, part)
		id, ok := p.host.find(hash, at.serial, part)
		if !ok {
			break
		}
		p.host.pin(id)
		found = append(found, id)
		at.hash, at.serial = hash, p.host.blocks[id].serial
	}
	return found, at
}

// Loaded ends the loads of a Grant; not ok: a copy failed, and what they should have brought must be computed. The content of
// loaded blocks can be found once they are published.
func (p *Pool) Loaded(loads []Move, ok bool) {
	for _, m := range loads {
		p.host.unpin(m.Host)
	}
	if !ok {
		p.totals.Loaded -= int64(len(loads))
		p.totals.Missed += int64(len(loads))
	}
}

// checkHost verifies that each host block is free, in the order of use, or pinned, and that the index is right.
func (p *Pool) checkHost() error {
	h := p.host
	if h == nil {
		return nil
	}
	pinned, named := 0, 0
	for id := range h.blocks {
		b := &h.blocks[id]
		switch {
		case b.pins < 0:
			return fmt.Errorf("kv: host block %d has %d pins", id, b.pins)
		case b.pins > 0:
			pinned++
		}
		if b.serial != 0 {
			named++
			if at, ok := h.index[b.hash]; !ok || at != int32(id) {
				return fmt.Errorf("kv: host block %d has a name that the index does not give to it", id)
			}
		}
	}
	if len(h.free)+h.order.n+pinned != len(h.blocks) || named != len(h.index) || named != h.order.n+pinned {
		return fmt.Errorf("kv: of %d host blocks %d are free, %d cached, %d pinned; %d have names, the index holds %d",
			len(h.blocks), len(h.free), h.order.n, pinned, named, len(h.index))
	}
	return nil
}
