package sim

import (
	"encoding/binary"
	"fmt"

	"meridian.internal/gpu/backend"
)

// memory is the KV of the stage. Words are pairs of float32 elements of the canonical layout; inside a block and layer
// the order is canonical too: K then V, token, head, word.
type memory struct {
	words               []uint64 // (block, layer of the stage, K or V, token, head, word)
	blocks              int
	first, layers       int
	perBlock            int
	heads, wordsPerHead int
}

func newMemory(c *Config) memory {
	m := memory{
		blocks: c.KVBlocks, first: c.Stage.First, layers: c.Stage.End - c.Stage.First, perBlock: c.TokensPerBlock,
		heads: c.KVHeads, wordsPerHead: c.HeadSize / 2,
	}
	m.words = make([]uint64, m.blocks*m.layers*2*m.perBlock*m.perToken())
	return m
}

// perToken is the number of words of one token in one layer, K or V.
func (m *memory) perToken() int { return m.heads * m.wordsPerHead }

// at returns the words of one token: kv is 0 for K, 1 for V; the layer is counted in the model.
func (m *memory) at(block int32, layer, kv, token int) []uint64 {
	n := m.perToken()
	i := (((int(block)*m.layers+layer-m.first)*2+kv)*m.perBlock + token) * n
	return m.words[i : i+n]
}

func (m *memory) copyBlock(c backend.BlockCopy) {
	n := m.layers * 2 * m.perBlock * m.perToken()
	copy(m.words[int(c.To)*n:int(c.To+1)*n], m.words[int(c.From)*n:int(c.From+1)*n])
}

func (m *memory) check(regions []backend.Region, size int) error {
	want := 0
	for _, r := range regions {
		if !within(int(r.Block), int(r.Block)+1, 0, m.blocks) || !within(r.LayerFrom, r.LayerTo, m.first, m.first+m.layers) ||
			!within(r.HeadFrom, r.HeadTo, 0, m.heads) || !within(r.TokenFrom, r.TokenTo, 0, m.perBlock) {
			return fmt.Errorf("sim: region %+v is outside of %d blocks, layers [%d, %d), %d heads, %d tokens",
				r, m.blocks, m.first, m.first+m.layers, m.heads, m.perBlock)
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
