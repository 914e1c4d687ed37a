//go:build cuda

package cuda

import (
	"fmt"

	"meridian.internal/gpu/model"
)

// narrowType is KV of eight bits.
const narrowType = "f8e4m3"

const (
	maxNarrow   = 64           // rows of the products of kernels/eight.cu
	maxSplit8   = 256          // where they are Hopper's
	eightShared = 8 * 6 * 2048 // bytes of their rings, up to 16 rows
	manyShared  = 8 * 4 * 2048 // and for more
)

// mostNarrow is up to how many rows weights of eight bits are multiplied as they are.
func (d *device) mostNarrow() int {
	if d.kernels.has.eight {
		return maxSplit8
	}
	return maxNarrow
}

// narrowProduct is a product with weights of eight bits. Few rows are bound by reading them; for many they are widened first, and cuBLASLt
// multiplies.
func (d *device) narrowProduct(rows int, w matrix, p product) {
	if rows > d.mostNarrow() {
		d.launch("widenWeights", grid{x: w.n, threads: 256}, uint64(w.at), uint64(w.scales), uint64(d.wide.at), number(w.k))
		d.keep(d.blas.multiply(d.stream, planKey{m: rows, n: w.n, k: w.k, float: p.float, add: p.add}, p.x, d.wide.at, p.out))
		return
	}
	if d.kernels.has.eight && rows >= leastSplit {
		d.splitNarrow(rows, w, p)
		return
	}
	name, shared := "product8x64", manyShared
	switch {
	case rows <= 8:
		name, shared = "product8x8", eightShared
	case rows <= 16:
		name, shared = "product8x16", eightShared
	case rows <= 32:
		name = "product8x32"
	}
	d.launch(name, grid{x: min((w.n+15)/16, 2*d.cores), threads: 256, shared: shared}, uint64(p.x), uint64(w.at), uint64(w.scales),
		uint64(p.out), number(w.n), number(w.k), number(rows), p.kind())
}

// splitNarrow is one of Hopper's products. As many blocks share k as find room on the card and have two chunks of it.
func (d *device) splitNarrow(rows int, w matrix, p product) {
	const outputs, chunk, most = 128, 128, 8 // of a block; of k; blocks of a cluster
	shape := eightShapeOf(rows)
	parts, split := (rows+shape.rows-1)/shape.rows, 1
	tiles := (w.n + outputs - 1) / outputs
	for split < most && 2*split*tiles*parts <= shape.blocks*d.cores && w.k/chunk >= 4*split {
		split *= 2
	}
	d.describeRows(0, w.at, w.n, w.k/2, productOutputs)
	d.describeRows(1, p.x, rows, w.k, shape.rows)
	d.launch(fmt.Sprint("product8Split", shape.rows), grid{x: tiles * split, y: parts, threads: 288, shared: shape.shared(), cluster: split, maps: 2},
		uint64(w.scales), uint64(p.out), number(w.n), number(w.k), number(rows), number(split), p.kind())
}

// kind is how kernels/eight.cu names what is done with a product.
func (p product) kind() uint64 { return flag(p.add) | flag(p.float)<<1 }

// scaleKV finds the scales of KV of eight bits from the weights: equal models have equal ones, so that their KV can be handed over.
func (d *device) scaleKV() error {
	var err error
	if d.scales, err = d.alloc(4 * 2 * d.config.KVHeads * len(d.weights.layers)); err != nil {
		return err
	}
	d.fixed = append(d.fixed, d.scales)
	for i := range d.weights.layers {
		l := &d.weights.layers[i]
		d.launch("kvScales", grid{x: 2 * d.config.KVHeads, threads: 256}, uint64(l.qkv.at), uint64(l.qkv.scales), uint64(l.attnNorm),
			uint64(l.qkvBias), uint64(l.kNorm), d.scalesOf(i))
	}
	return d.taken()
}

// scalesOf are those of a layer of the stage.
func (d *device) scalesOf(i int) uint64 {
	if d.scales == 0 {
		return 0
	}
	return uint64(d.scales) + uint64(4*2*d.config.KVHeads*i)
}

// narrow puts matrices one below the other as numbers of eight bits with a scale for each output. The card rounds them.
func (l *loader) narrow(tensors ...*model.Tensor) matrix {
	m := matrix{k: tensors[0].Shape[1]}
	for _, t := range tensors {
		m.n += t.Shape[0]
	}
	m.at, m.scales = l.room(m.n*m.k), l.room(4*m.n)
	part := m
	for _, t := range tensors {
		l.narrowTensor(t, part)
		part.at, part.scales = part.at+address(t.Elements()), part.scales+address(4*t.Shape[0])
	}
	return m
}

// narrowTensor sends the rows of one tensor to the place and the scales of m.
func (l *loader) narrowTensor(t *model.Tensor, m matrix) {
	size := t.Type.Size() * m.k // bytes of a row
	for _, data := range cut(t.Data, pieceBytes/2/m.k*size) {
		part, rows := m, len(data)/size
		l.bring(func(c *carrier) error {
			if _, err := c.grow(&c.wide, pieceBytes); err != nil { // once
				return err
			}
			err := c.send(c.wide.at, 2*rows*part.k, func(buf []byte) { convert(buf, data, t.Type, true) })
			c.launch("narrowWeights", grid{x: rows, threads: 256}, uint64(c.wide.at), uint64(part.at), uint64(part.scales), number(part.k))
			return firstOf(err, c.taken())
		})
		m.at, m.scales = m.at+address(rows*m.k), m.scales+address(4*rows)
	}
}
