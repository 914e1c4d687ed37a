package ranks

import (
	"math/bits"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
)

// Max is the most ranks that a group can have: one bit for each.
const Max = infer.MaxRanks

// cache knows which ranks hold which KV blocks, by what their pools tell. To the outside it makes one cache of them, in which a
// block is where the rank that has it fastest has it.
type cache struct {
	root     blockhash.Hash
	perBlock int
	tell     func(kvevent.Event) // nil: nobody

	mu     sync.Mutex // guards the fields below, and the order of what is told
	blocks map[blockhash.Hash]holders
	seq    int64
	epoch  int64
}

// holders of a block, by tier: bit i says that rank i has it there.
type holders [kvevent.Tiers]uint64

func (h holders) ranks() (all uint64) {
	for _, mask := range h {
		all |= mask
	}
	return all
}

// fastest is the tier in which any rank has it; false: none does.
func (h holders) fastest() (kvevent.Tier, bool) {
	for tier, mask := range h {
		if mask != 0 {
			return kvevent.Tier(tier), true
		}
	}
	return 0, false
}

func newCache(tell func(kvevent.Event), epoch int64, info backend.Info) *cache {
	return &cache{
		root: blockhash.Root(info.ModelHash, ""), perBlock: info.TokensPerBlock, tell: tell, epoch: epoch,
		blocks: map[blockhash.Hash]holders{},
	}
}

// of takes the events of a rank, on its engine's goroutine.
func (c *cache) of(rank int) func(kvevent.Event) {
	return func(ev kvevent.Event) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i := range ev.Blocks {
			c.put(rank, ev.Blocks[i].Hash, &ev.Blocks[i].Tier, ev)
		}
		if m := ev.Moved; m != nil {
			c.put(rank, m.Hash, &m.To, ev)
		}
		for _, h := range ev.Removed {
			c.put(rank, h, nil, ev)
		}
	}
}

// put notes where a rank has a block now, nil for nowhere, and tells what has changed for all of them by that.
func (c *cache) put(rank int, hash blockhash.Hash, tier *kvevent.Tier, ev kvevent.Event) {
	h := c.blocks[hash]
	from, was := h.fastest()
	for i := range h {
		h[i] &^= 1 << rank
	}
	if tier != nil {
		h[*tier] |= 1 << rank
	}
	to, is := h.fastest()
	if is {
		c.blocks[hash] = h
	} else {
		delete(c.blocks, hash)
	}
	out := kvevent.Event{Epoch: c.epoch}
	switch {
	case c.tell == nil || was == is && from == to:
		return
	case !was: // only the event that stored it can have done that
		out.Type, out.Parent, out.Blocks = kvevent.Stored, ev.Parent, ev.Blocks
	case is:
		out.Type, out.Moved = kvevent.Moved, &kvevent.Move{Hash: hash, From: from, To: to}
	default:
		out.Type, out.Removed = kvevent.Removed, []blockhash.Hash{hash}
	}
	c.seq++
	out.Seq = c.seq
	c.tell(out)
}

// match fills in how many tokens of a prompt each rank holds from its beginning.
func (c *cache) match(r *infer.Request, list []choice) {
	tokens := r.Prompt
	if len(r.Output) > 0 {
		tokens = append(append(make([]int32, 0, len(r.Prompt)+len(r.Output)), r.Prompt...), r.Output...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	hash, all := c.root, ^uint64(0)
	for n := c.perBlock; n <= len(tokens) && all != 0; n += c.perBlock {
		hash = blockhash.Chain(hash, tokens[n-c.perBlock:n])
		all &= c.blocks[hash].ranks()
		for left := all; left != 0; left &= left - 1 {
			if rank := bits.TrailingZeros64(left); rank < len(list) {
				list[rank].matched = n
			}
		}
	}
}
