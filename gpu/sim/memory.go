package sim

import (
	"encoding/binary"
	"fmt"

	"meridian.internal/gpu/backend"
)

// memory is the KV of the stage. Words are pairs of float32 elements of the canonical layout; inside a block and layer
// the order is canonical too: K then V, token, head, word.
type memory struct {
	groups              []group
	places              []backend.Place // of each layer of the stage
	first               int             // layer of the model
	perBlock            int
	heads, wordsPerHead int
}

// group is the KV of layers that share their blocks.
type group struct {
	words          []uint64 // (block, layer of the group, K or V, token, head, word)
	blocks, layers int
}

func newMemory(info backend.Info) memory {
	m := memory{
		groups: make([]group, 1+len(info.Windows)), places: info.Places(), first: info.Stage.First, perBlock: info.TokensPerBlock,
		heads: info.KVHeads, wordsPerHead: info.HeadSize / 2,
	}
	for i := range m.groups {
		g := &m.groups[i]
		g.blocks, g.layers = info.GroupBlocks(i), info.GroupLayers(i)
		g.words = make([]uint64, g.blocks*m.blockWords(i))
	}
	return m
}

func (m *memory) blockWords(group int) int {
	return m.groups[group].layers * 2 * m.perBlock * m.perToken()
}

// perToken is the number of words of one token in one layer, K or V.
func (m *memory) perToken() int { return m.heads * m.wordsPerHead }

// at returns the words of one token: kv is 0 for K, 1 for V; the layer is counted in the model.
func (m *memory) at(block int32, layer, kv, token int) []uint64 {
	p := m.places[layer-m.first]
	g := &m.groups[p.Group]
	n := m.perToken()
	i := (((int(block)*g.layers+p.Layer)*2+kv)*m.perBlock + token) * n
	return g.words[i : i+n]
}

// table is the block table of an entry for a layer of the model.
func (m *memory) table(e *backend.Entry, layer int) []int32 {
	if g := m.places[layer-m.first].Group; g > 0 {
		return e.Windows[g-1]
	}
	return e.Blocks
}

func (m *memory) copyBlock(c backend.BlockCopy) {
	n, words := m.blockWords(c.Group), m.groups[c.Group].words
	copy(words[int(c.To)*n:int(c.To+1)*n], words[int(c.From)*n:int(c.From+1)*n])
}

func (m *memory) check(regions []backend.Region, size int) error {
	want := 0
	for _, r := range regions {
		if !within(r.LayerFrom, r.LayerTo, m.first, m.first+len(m.places)) || !within(r.HeadFrom, r.HeadTo, 0, m.heads) ||
			!within(r.TokenFrom, r.TokenTo, 0, m.perBlock) {
			return fmt.Errorf("sim: region %+v is outside of layers [%d, %d), %d heads, %d tokens", r, m.first, m.first+len(m.places), m.heads, m.perBlock)
		}
		group := m.places[r.LayerFrom-m.first].Group
		for _, p := range m.places[r.LayerFrom-m.first : r.LayerTo-m.first] {
			if p.Group != group {
				return fmt.Errorf("sim: the layers of region %+v are not all of one group", r)
			}
		}
		if blocks := m.groups[group].blocks; !within(int(r.Block), int(r.Block)+1, 0, blocks) {
			return fmt.Errorf("sim: region %+v is outside of %d blocks", r, blocks)
		}
		want += (r.LayerTo - r.LayerFrom) * 2 * (r.TokenTo - r.TokenFrom) * (r.HeadTo - r.HeadFrom) * m.wordsPerHead * 8
	}
	if size != want {
		return fmt.Errorf("sim: the regions hold %d bytes, the buffer %d", want, size)
	}
	return nil
}

// within tells whether [from, to) is a part of [low, high) with at least one element.
func within(from, to, low, high int) bool { return low <= from && from < to && to <= high }

// each calls f with the words of a region in canonical order.
func (m *memory) each(r backend.Region, f func(words []uint64)) {
	for layer := r.LayerFrom; layer < r.LayerTo; layer++ {
		for kv := range 2 {
			for token := r.TokenFrom; token < r.TokenTo; token++ {
				f(m.at(r.Block, layer, kv, token)[r.HeadFrom*m.wordsPerHead : r.HeadTo*m.wordsPerHead])
			}
		}
	}
}

// read copies a region to the front of dst and returns the rest of it.
func (m *memory) read(r backend.Region, dst []byte) []byte {
	m.each(r, func(words []uint64) {
		for _, w := range words {
			binary.LittleEndian.PutUint64(dst, w)
			dst = dst[8:]
		}
	})
	return dst
}

// write is the opposite of read.
func (m *memory) write(r backend.Region, src []byte) []byte {
	m.each(r, func(words []uint64) {
		for i := range words {
			words[i] = binary.LittleEndian.Uint64(src)
			src = src[8:]
		}
	})
	return src
}
