package cpu

import (
	"encoding/binary"
	"fmt"
	"math"

	"meridian.internal/gpu/backend"
)

// kvMemory holds the KV of all blocks of the stage in float32, one array a group of layers (backend.Info.Group):
//
//	data // (block, layer of the group, K then V, KV head, token of the block, pad(head size))
//
// so a block is one piece, and the keys of one head in one block lie one behind the other as a matrix for the kernels.
type kvMemory struct {
	groups               []kvGroup
	places               []backend.Place // of each layer of the stage
	heads                int
	firstLayer           int // number of the stage's first layer in the model
	tokens               int // per block
	headSize, headStride int // elements
}

type kvGroup struct {
	data           []float32
	blocks, layers int
}

func newKVMemory(info backend.Info) *kvMemory {
	m := &kvMemory{
		groups: make([]kvGroup, 1+len(info.Windows)), places: info.Places(), heads: info.KVHeads,
		firstLayer: info.Stage.First, tokens: info.TokensPerBlock, headSize: info.HeadSize, headStride: pad(info.HeadSize),
	}
	for i := range m.groups {
		g := &m.groups[i]
		g.blocks, g.layers = info.GroupBlocks(i), info.GroupLayers(i)
		g.data = make([]float32, g.blocks*m.blockElements(i))
	}
	return m
}

func (m *kvMemory) blockElements(group int) int {
	return m.groups[group].layers * 2 * m.headElements() * m.heads
}

// headElements is the size of K (or V) of one head in one block.
func (m *kvMemory) headElements() int { return m.tokens * m.headStride }

// head gives K (kv = 0) or V (kv = 1) of one head in one block: (token, headStride). layer counts inside the stage.
func (m *kvMemory) head(block int32, layer, kv, head int) []float32 {
	p := m.places[layer]
	g := &m.groups[p.Group]
	n := m.headElements()
	at := (((int(block)*g.layers+p.Layer)*2+kv)*m.heads + head) * n
	return g.data[at : at+n : at+n]
}

// table is the block table of an entry for a layer of the stage.
func (m *kvMemory) table(e *backend.Entry, layer int) []int32 {
	if g := m.places[layer].Group; g > 0 {
		return e.Windows[g-1]
	}
	return e.Blocks
}

func (m *kvMemory) copyBlock(c backend.BlockCopy) {
	n, data := m.blockElements(c.Group), m.groups[c.Group].data
	copy(data[int(c.To)*n:(int(c.To)+1)*n], data[int(c.From)*n:(int(c.From)+1)*n])
}

// check refuses regions outside the memory and a buffer that does not have their size.
func (m *kvMemory) check(regions []backend.Region, bytes int) error {
	want := 0
	for _, r := range regions {
		lo, hi := m.firstLayer, m.firstLayer+len(m.places)
		if r.LayerFrom < lo || r.LayerFrom > r.LayerTo || r.LayerTo > hi {
			return fmt.Errorf("cpu: copy of KV layers [%d, %d), the stage has [%d, %d)", r.LayerFrom, r.LayerTo, lo, hi)
		}
		group := m.groupOf(r)
		switch {
		case group < 0:
			return fmt.Errorf("cpu: copy of KV layers [%d, %d), which are not all of one group", r.LayerFrom, r.LayerTo)
		case r.Block < 0 || int(r.Block) >= m.groups[group].blocks:
			return fmt.Errorf("cpu: copy of KV block %d, there are %d", r.Block, m.groups[group].blocks)
		case r.HeadFrom < 0 || r.HeadFrom > r.HeadTo || r.HeadTo > m.heads:
			return fmt.Errorf("cpu: copy of KV heads [%d, %d), there are %d", r.HeadFrom, r.HeadTo, m.heads)
		case r.TokenFrom < 0 || r.TokenFrom > r.TokenTo || r.TokenTo > m.tokens:
			return fmt.Errorf("cpu: copy of tokens [%d, %d) of a KV block of %d", r.TokenFrom, r.TokenTo, m.tokens)
		}
		want += (r.LayerTo - r.LayerFrom) * 2 * (r.HeadTo - r.HeadFrom) * (r.TokenTo - r.TokenFrom) * 4 * m.headSize
	}
	if want != bytes {
		return fmt.Errorf("cpu: copy of KV regions of %d bytes with a buffer of %d", want, bytes)
	}
	return nil
}

// groupOf is the group of a region's layers, -1 if they have several.
func (m *kvMemory) groupOf(r backend.Region) int {
	group := 0
	for i, p := range m.places[r.LayerFrom-m.firstLayer : r.LayerTo-m.firstLayer] {
		if i > 0 && p.Group != group {
			return -1
		}
		group = p.Group
	}
	return group
}

// each calls f with every row of headSize elements of the regions, in canonical order.
func (m *kvMemory) each(regions []backend.Region, f func(row []float32)) {
	for _, r := range regions {
		for layer := r.LayerFrom; layer < r.LayerTo; layer++ {
			for kv := range 2 {
				for token := r.TokenFrom; token < r.TokenTo; token++ {
					for head := r.HeadFrom; head < r.HeadTo; head++ {
						at := token * m.headStride
						f(m.head(r.Block, layer-m.firstLayer, kv, head)[at : at+m.headSize])
					}
				}
			}
		}
	}
}

func (m *kvMemory) copyOut(regions []backend.Region, dst []byte) error {
	if err := m.check(regions, len(dst)); err != nil {
		return err
	}
	m.each(regions, func(row []float32) {
		for i, v := range row {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
		dst = dst[4*len(row):]
	})
	return nil
}

func (m *kvMemory) copyIn(regions []backend.Region, src []byte) error {
	if err := m.check(regions, len(src)); err != nil {
		return err
	}
	m.each(regions, func(row []float32) {
		for i := range row {
			row[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
		src = src[4*len(row):]
	})
	return nil
}
