//go:build cuda

package cuda

import "fmt"

const (
	maxThin  = 16 // up to how many rows kernels/thin.cu has fused products for
	maxFused = 64 // and kernels/products.cu, which is slower for fewer than leastSplit

	leastSplit = 9
)

// fuses tells whether a decode step of so many rows runs by fused products.
func (d *device) fuses(rows int) bool {
	return d.splitsProducts(rows) || d.kernels.has.thin && rows <= maxThin
}

// splitsProducts tells whether it does so by kernels/products.cu: where all blocks of a product find room on the card at once.
func (d *device) splitsProducts(rows int) bool {
	c, room := d.config, 2*d.cores
	outputs := max(c.Hidden, (c.Heads+2*c.KVHeads)*c.HeadSize)
	return d.kernels.has.split && rows >= leastSplit && rows <= maxFused && outputs/productOutputs*splitBlocks <= room && c.Intermediate/productOutputs <= room
}

// thin queues the stage's layers, and the head behind the last one, for a decode step of few rows: five kernels a layer. The stream, its copy
// times the norm's weight, and the sums of its squares go from product to product. Where launches overlap, each kernel has its
// first weights in shared memory when the one before it ends.
func (d *device) thin(p pass) {
	meta, layers := uint64(d.meta.at), d.weights.layers
	d.overlap = d.arch >= 90
	defer func() { d.overlap = false }()
	d.launch("embedThin", grid{x: p.rows, threads: 128}, meta, uint64(d.weights.embed), uint64(d.last), uint64(layers[0].attnNorm),
		uint64(d.hidden.at), uint64(d.normed.at), uint64(d.squares.at))
	add, gate := d.thinAdd, d.thinGate
	splits := d.splitsProducts(p.rows)
	if splits {
		add, gate = d.splitAdd, d.pair
	}
	for i := range layers {
		l := &layers[i]
		qkv := fused{x: d.normed.at, out: d.qkv.at, squares: d.squares.at}
		rotated := false
		switch {
		case splits:
			d.split("splitPlain", p, l.qkv, qkv)
		case l.qNorm != 0 || d.kernels.has.kv8:
			d.thinProduct("thinPlain", p, l.qkv, qkv)
		default:
			qkv.a, qkv.b, qkv.layer = l.qkvBias, d.kvOf(i), d.place(i)
			d.thinProduct("thinRotate", p, l.qkv, qkv)
			rotated = true
		}
		if !rotated && !d.rotatesLate(p) {
			d.rope(i, p)
			rotated = true
		}
		d.attention(i, l.window, p, !rotated)
		next := d.weights.norm
		switch {
		case i+1 < len(layers):
			next = layers[i+1].attnNorm
		case !d.samples():
			next = l.mlpNorm // any one: the next stage begins with the stream
		}
		add(p, l.o, fused{x: d.mixed.at, a: l.mlpNorm, b: d.normed.at, out: d.hidden.at, squares: d.squares.at})
		gate(p, l.gateUp, fused{x: d.normed.at, out: d.gated.at, squares: d.squares.at})
		add(p, l.down, fused{x: d.gated.at, a: next, b: d.normed.at, out: d.hidden.at, squares: d.squares.at})
	}
	switch {
	case !d.samples():
	case p.rows > maxThin:
		d.head(p)
	default:
		const float = 1
		d.thinProduct("thinPlain", p, d.weights.head, fused{x: d.normed.at, out: d.logits.at, squares: d.squares.at, layer: float})
	}
}

// fused are the arguments of a fused product, by the names of kernels/thin.cu.
type fused struct {
	x, a, b, out, squares address
	layer                 int
}

func (d *device) thinAdd(p pass, w matrix, f fused)  { d.thinProduct("thinAdd", p, w, f) }
func (d *device) thinGate(p pass, w matrix, f fused) { d.thinProduct("thinGate", p, w, f) }

func (d *device) thinProduct(kind string, p pass, w matrix, f fused) {
	name := kind + "16"
	if p.rows <= 8 {
		name = kind + "8"
	}
	blocks := min((w.n+15)/16, 2*d.cores)
	d.launch(name, grid{x: blocks, threads: 256, shared: thinShared}, uint64(d.meta.at), uint64(f.x), uint64(w.at), number(w.n), number(w.k),
		number(p.rows), uint64(f.squares), uint64(f.a), uint64(f.b), uint64(f.out), uint64(d.weights.turns), number(f.layer))
}

const (
	productOutputs = 64 // that four warps of kernels/products.cu make
	splitBlocks    = 4  // that share k
)

func (d *device) splitAdd(p pass, w matrix, f fused) { d.split("splitAdd", p, w, f) }

// split queues a product whose k four blocks share.
func (d *device) split(kind string, p pass, w matrix, f fused) {
	d.hopperProduct(kind, p, w, f, grid{x: w.n / productOutputs * splitBlocks, threads: 160, shared: productShapeOf(p.rows).splitShared(), cluster: splitBlocks})
}

// pair queues the product with gates and ups.
func (d *device) pair(p pass, w matrix, f fused) {
	d.hopperProduct("pair", p, w, f, grid{x: w.n / 2 / productOutputs, threads: 288, shared: productShapeOf(p.rows).pairShared()})
}

func (d *device) hopperProduct(kind string, p pass, w matrix, f fused, g grid) {
	rows := productShapeOf(p.rows).rows
	d.describeRows(0, w.at, w.n, w.k, productOutputs)
	d.describeRows(1, f.x, p.rows, w.k, rows)
	g.maps = 2
	d.launch(fmt.Sprint(kind, rows), g, uint64(d.meta.at), number(w.n), number(w.k), number(p.rows), uint64(f.squares), uint64(f.a), uint64(f.b), uint64(f.out))
}
