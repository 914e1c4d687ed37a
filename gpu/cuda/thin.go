//go:build cuda

package cuda

import "fmt"

// maxThin is up to how many rows a decode step runs by the fused products of kernels/thin.cu.
const maxThin = 16

// thin queues the stage's layers, and the head behind the last one, for a decode step of few rows: five kernels a layer. The stream, its copy
// times the norm's weight, and the sums of its squares go from product to product. Where launches overlap, each kernel has its
// first weights in shared memory when the one before it ends.
func (d *device) thin(p pass) {
	meta, layers := uint64(d.meta.at), d.weights.layers
	d.overlap = d.arch >= 90
	defer func() { d.overlap = false }()
	d.launch("embedThin", grid{x: p.rows, threads: 128}, meta, uint64(d.weights.embed), uint64(d.last), uint64(layers[0].attnNorm),
		uint64(d.hidden.at), uint64(d.normed.at), uint64(d.squares.at))
	for i := range layers {
		l := &layers[i]
		late := l.qNorm != 0 && d.rotatesLate(p)
		switch {
		case l.qNorm != 0:
			d.thinProduct("thinPlain", p, l.qkv, fused{x: d.normed.at, out: d.qkv.at, squares: d.squares.at})
			if !late {
				d.rope(i, p)
			}
		default:
			d.thinProduct("thinRotate", p, l.qkv, fused{x: d.normed.at, a: l.qkvBias, b: d.kvOf(i), out: d.qkv.at, squares: d.squares.at, layer: d.place(i)})
		}
		d.attention(i, l.window, p, late)
		next := d.weights.norm
		switch {
		case i+1 < len(layers):
			next = layers[i+1].attnNorm
		case !d.samples():
			next = l.mlpNorm // any one: the next stage begins with the stream
		}
		d.thinAdd(p, l.o, fused{x: d.mixed.at, a: l.mlpNorm, b: d.normed.at, out: d.hidden.at, squares: d.squares.at})
		d.thinProduct("thinGate", p, l.gateUp, fused{x: d.normed.at, out: d.gated.at, squares: d.squares.at})
		d.thinAdd(p, l.down, fused{x: d.gated.at, a: next, b: d.normed.at, out: d.hidden.at, squares: d.squares.at})
	}
	if !d.samples() {
		return
	}
	const float = 1
	d.thinProduct("thinPlain", p, d.weights.head, fused{x: d.normed.at, out: d.logits.at, squares: d.squares.at, layer: float})
}

// fused are the arguments of a fused product, by the names of kernels/thin.cu.
type fused struct {
	x, a, b, out, squares address
	layer                 int
}

// thinAdd adds a product to the stream, and leaves what the next fused product wants.
func (d *device) thinAdd(p pass, w matrix, f fused) {
	if p.rows > 8 && d.splitsProducts(p.rows) {
		d.splitAdd(p, w, f)
		return
	}
	d.thinProduct("thinAdd", p, w, f)
}

// splitsProducts tells whether kernels/split.cu has a kernel for O and down of so many rows.
func (d *device) splitsProducts(rows int) bool {
	return d.kernels.has.split && rows <= splitRows[len(splitRows)-1]
}

func (d *device) splitAdd(p pass, w matrix, f fused) {
	const outputs, split = 64, 4 // of a cluster; its blocks
	i := 0
	for splitRows[i] < p.rows {
		i++
	}
	rows := splitRows[i]
	d.describeRows(0, w.at, w.n, w.k, outputs)
	d.describeRows(1, f.x, p.rows, w.k, rows)
	g := grid{x: w.n / outputs * split, threads: 160, shared: splitShared(rows), cluster: split, maps: 2}
	d.launch(fmt.Sprint("splitAdd", rows), g, uint64(d.meta.at), number(w.n), number(w.k), number(p.rows), uint64(f.squares), uint64(f.a), uint64(f.b), uint64(f.out))
}

func (d *device) thinProduct(kind string, p pass, w matrix, f fused) {
	name := kind + "16"
	if p.rows <= 8 {
		name = kind + "8"
	}
	blocks := min((w.n+15)/16, 2*d.cores)
	d.launch(name, grid{x: blocks, threads: 256, shared: thinShared}, uint64(d.meta.at), uint64(f.x), uint64(w.at), number(w.n), number(w.k),
		number(p.rows), uint64(f.squares), uint64(f.a), uint64(f.b), uint64(f.out), uint64(d.weights.turns), number(f.layer))
}
