package kv

import (
	"fmt"
	"slices"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

// Prefix is how far the full blocks of one sequence are known to the index. The zero value is the start of a sequence.
type Prefix struct {
	n      int
	hash   blockhash.Hash
	serial uint64
}

// Blocks is the number of blocks of the prefix.
func (x Prefix) Blocks() int { return x.n }

// Match finds the longest prefix of the tokens whose full blocks are here, at most limit tokens of it, and appends the
// blocks to dst, each with one more holder.
func (p *Pool) Match(dst []int32, tokens []int32, limit int) ([]int32, Prefix) {
	at := Prefix{hash: p.root}
	for want := min(limit, len(tokens)) / p.perBlock; at.n < want; at.n++ {
		part := tokens[at.n*p.perBlock : (at.n+1)*p.perBlock]
		hash := blockhash.Chain(at.hash, part)
		id, ok := p.find(hash, at.serial, part)
		if !ok {
			p.totals.Missed += int64(want - at.n)
			break
		}
		p.hold(id)
		p.totals.Reused++
		at.hash, at.serial = hash, p.blocks[id].serial
		dst = append(dst, id)
	}
	return dst, at
}

// LeasePrefix leases the full blocks on the device that hold the beginning of the tokens. It counts as no request.
func (p *Pool) LeasePrefix(tokens []int32) []int32 {
	totals := p.totals
	blocks, _ := p.Match(nil, tokens, len(tokens))
	p.totals = totals
	p.Lease(blocks)
	p.Release(blocks)
	return blocks
}

// find looks a block up and verifies that it is what the hash says: the same tokens after the same block.
func (p *Pool) find(hash blockhash.Hash, parent uint64, tokens []int32) (int32, bool) {
	id, ok := p.index[hash]
	if !ok {
		return none, false
	}
	return id, p.blocks[id].is(parent, tokens)
}

// Publish makes the full blocks of a sequence up to block number to findable; they must be written. Tokens are those of
// the sequence from its start, blocks its block table, at what Match or the last Publish returned. A block whose content
// is here already stays without a name, and becomes free when its last holder drops it.
func (p *Pool) Publish(at Prefix, tokens, blocks []int32, columns []Column, to int) Prefix {
	if at.n == 0 {
		at.hash = p.root
	}
	for ; at.n < to; at.n++ {
		part := tokens[at.n*p.perBlock : (at.n+1)*p.perBlock]
		hash := blockhash.Chain(at.hash, part)
		p.nameColumns(columns, at, hash, part)
		at.serial = p.name(blocks[at.n], at, hash, part)
		at.hash = hash
	}
	return at
}

// PublishTail lets the beginning of a last block be copied (see Grant.Copy) whose other tokens are not known yet: it has the tokens
// after those of at, of which there is less than a block. It is on the device only, and nobody is told of it.
func (p *Pool) PublishTail(at Prefix, tokens, blocks []int32) {
	if at.n == 0 {
		at.hash = p.root
	}
	from := at.n * p.perBlock
	if len(tokens) <= from || len(tokens) >= from+p.perBlock || p.blocks[blocks[at.n]].indexed {
		return
	}
	tail := tokens[from:]
	hash := blockhash.Chain(at.hash, tail)
	if _, taken := p.index[hash]; taken {
		return
	}
	family := p.children[at.serial]
	for _, id := range family[max(0, len(family)-maxSiblings):] {
		if common(p.blocks[id].tokens, tail) == len(tail) {
			return // that one serves as well
		}
	}
	p.serial++
	b := &p.blocks[blocks[at.n]]
	b.content = content{at.hash, hash, p.serial, at.serial, slices.Clone(tail)}
	p.enter(blocks[at.n])
}

// isTail tells whether an indexed block is known by its beginning only.
func (p *Pool) isTail(b *block) bool { return len(b.tokens) < p.perBlock }

// enter puts a block that has its content into the index.
func (p *Pool) enter(id int32) {
	b := &p.blocks[id]
	b.indexed = true
	p.index[b.hash] = id
	b.sibling = int32(len(p.children[b.parent]))
	p.children[b.parent] = append(p.children[b.parent], id)
}

// name gives a block its name, unless another block has it rightly, and returns the serial of the content.
func (p *Pool) name(id int32, parent Prefix, hash blockhash.Hash, tokens []int32) uint64 {
	if other, taken := p.index[hash]; taken {
		if _, same := p.find(hash, parent.serial, tokens); same {
			return p.blocks[other].serial
		}
		p.replace(other)
	}
	b := &p.blocks[id]
	if b.indexed {
		p.unindex(id)
	}
	was, _ := p.levelOf(hash)
	tier, at := p.findBelow(hash, parent.serial, tokens)
	if tier != nil {
		b.content, b.class = tier.slots[at].content, max(b.class, tier.slots[at].class)
	} else {
		p.serial++
		b.content = content{parent.hash, hash, p.serial, parent.serial, slices.Clone(tokens)}
	}
	p.enter(id)
	if tier != nil {
		p.tellMoved(hash, was)
	} else {
		p.tellStored(&b.content, kvevent.Device)
	}
	return b.serial
}

// replace takes the name of a block that cannot be reached any more, because its parent was evicted and written again, or
// whose hash collides.
func (p *Pool) replace(id int32) {
	b := &p.blocks[id]
	if b.refs == 0 && b.leases == 0 {
		p.forget(id)
	} else {
		p.unindex(id)
	}
}

func (p *Pool) unindex(id int32) {
	b := &p.blocks[id]
	delete(p.index, b.hash)
	family := p.children[b.parent]
	last := family[len(family)-1]
	family[b.sibling], p.blocks[last].sibling = last, b.sibling
	if len(family) > 1 {
		p.children[b.parent] = family[:len(family)-1]
	} else {
		delete(p.children, b.parent)
	}
	if !p.isTail(b) {
		p.tellMoved(b.hash, kvevent.Device)
	}
	b.indexed, b.content = false, content{}
}

// Check verifies that the four states are disjoint and complete, and that lists, index and counters agree. It costs one
// pass over all blocks.
func (p *Pool) Check() error {
	var used, shared, leased, cached, indexed int
	for id := range p.blocks {
		b := &p.blocks[id]
		switch {
		case b.refs < 0 || b.leases < 0:
			return fmt.Errorf("kv: block %d has %d holders and %d leases", id, b.refs, b.leases)
		case b.refs > 0:
			used++
			shared += int(b.refs) - 1
		case b.leases > 0:
			leased++
		case b.indexed:
			cached++
		}
		if b.indexed {
			indexed++
			if family := p.children[b.parent]; int(b.sibling) >= len(family) || family[b.sibling] != int32(id) {
				return fmt.Errorf("kv: block %d is not among the children of its parent", id)
			}
			if at, ok := p.index[b.hash]; !ok || at != int32(id) {
				return fmt.Errorf("kv: block %d has a name that the index does not give to it", id)
			}
		}
	}
	s := p.Stats()
	if used != s.Used || leased != s.Leased || cached != s.Cached || s.Free+s.Used+s.Leased+s.Cached != s.Max {
		return fmt.Errorf("kv: counted %d used, %d leased, %d cached blocks; the books say %+v", used, leased, cached, s)
	}
	if held := s.Allocated - s.Freed; held != int64(s.Max-s.Free) {
		return fmt.Errorf("kv: %d blocks allocated and %d freed; %d of %d are free", s.Allocated, s.Freed, s.Free, s.Max)
	}
	if indexed != len(p.index) {
		return fmt.Errorf("kv: %d blocks have names, the index holds %d", indexed, len(p.index))
	}
	if err := p.checkLists(); err != nil {
		return err
	}
	if p.group > 0 && p.promised != shared {
		return fmt.Errorf("kv: %d blocks promised, %d holders are not the first of their block", p.promised, shared)
	}
	for _, w := range p.windows {
		if err := w.Check(); err != nil {
			return fmt.Errorf("window of %d tokens: %w", w.tokens, err)
		}
	}
	return p.checkBelow()
}

func (p *Pool) checkLists() error {
	seen := make(map[int32]bool, len(p.free))
	for _, id := range p.free {
		if b := &p.blocks[id]; seen[id] || b.refs != 0 || b.leases != 0 || b.indexed {
			return fmt.Errorf("kv: block %d is in the free list but not free, or twice", id)
		}
		seen[id] = true
	}
	return p.cached.check(func(id int32) bool {
		b := &p.blocks[id]
		return !seen[id] && b.refs == 0 && b.leases == 0 && b.indexed
	})
}

// Unowned counts the held and leased blocks that are not marked as owned, by block number: blocks that leaked.
func (p *Pool) Unowned(owned []bool) int {
	n := 0
	for id := range p.blocks {
		if b := &p.blocks[id]; (b.refs > 0 || b.leases > 0) && !owned[id] {
			n++
		}
	}
	return n
}
