package pool

import (
	"meridian.internal/router/place"
	"meridian.internal/router/prefix"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/node"
)

// Prefix names the blocks of a prompt for one checkpoint and block size.
type Prefix struct {
	Hash     string // of the model
	PerBlock int    // tokens
	Blocks   []blockhash.Hash
}

// Hash names the blocks of a prompt for all nodes that serve the model; nil when no policy asks for it. Conversations are
// kept together by the first block.
func (p *Pool) Hash(model string, ids []int32) []Prefix {
	matches := p.o.CtxPolicy.Matches() || p.o.GenPolicy.Matches()
	sticks := p.o.CtxPolicy == place.Conversation || p.o.GenPolicy == place.Conversation
	if p.o.Index == nil || !(matches || sticks) {
		return nil
	}
	out := p.blockSizes(model)
	if !matches && len(out) > 0 {
		out = out[:1]
		ids = ids[:min(len(ids), out[0].PerBlock)]
	}
	for i := range out {
		n := len(ids) / out[i].PerBlock
		out[i].Blocks = blockhash.Blocks(make([]blockhash.Hash, 0, n), blockhash.Root(out[i].Hash, ""), ids, out[i].PerBlock)
	}
	return out
}

// blockSizes lists the block sizes that nodes of the model have, for each checkpoint.
func (p *Pool) blockSizes(model string) []Prefix {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Prefix
	for _, c := range p.models[model] {
		for i := range c.sides {
			for _, per := range c.sides[i].perBlock {
				f := Prefix{Hash: c.hash, PerBlock: per}
				known := false
				for _, o := range out {
					known = known || (o.Hash == f.Hash && o.PerBlock == per)
				}
				if !known {
					out = append(out, f)
				}
			}
		}
	}
	return out
}

// Slot is where the index keeps the blocks of a node of the registry.
func (p *Pool) Slot(role node.Role, name string) (slot prefix.Slot, url string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[key(role, name)]
	if m == nil || m.slot == prefix.None {
		return prefix.None, "", false
	}
	return m.slot, m.info.URL, true
}

// URLOf is where the node of a slot answers.
func (p *Pool) URLOf(s prefix.Slot) (string, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s < 0 || int(s) >= len(p.slots) || p.slots[s] == nil {
		return "", false
	}
	return p.slots[s].info.URL, true
}
