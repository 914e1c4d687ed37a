//go:build cuda

package cuda

import "unsafe"

// pass is one forward over rows; in a graph rows are the bucket's, and the kernels leave out those that the step lacks.
type pass struct {
	rows, wanted, entries int
	untiled, tiles        int
	graph                 bool // one row an entry, in a graph: KV of earlier positions is there before the step
	splits                int
	marks                 *[3]event
	layerDone             func(layer int) error // nil: nobody waits for single layers
}

// forward queues the stage's layers and, at the end of the model, logits and tokens.
func (d *device) forward(p pass) {
	meta := uint64(d.meta.at)
	if p.graph && d.fuses(p.rows) {
		d.thin(p)
		d.choose(p)
		return
	}
	if d.info.Stage.First == 0 {
		d.launch("embed", grid{x: p.rows, threads: 256}, meta, uint64(d.weights.embed), uint64(d.last), uint64(d.hidden.at))
	}
	d.overlap = d.arch >= 90
	defer func() { d.overlap = false }()
	for i := range d.weights.layers {
		d.layer(i, p)
	}
	d.head(p)
	d.choose(p)
}

func (d *device) head(p pass) {
	if d.samples() && p.wanted > 0 {
		d.norm(p.wanted, d.weights.norm, true)
		d.product(p.wanted, d.weights.head, product{x: d.normed.at, out: d.logits.at, float: true})
	}
}

// choose samples.
func (d *device) choose(p pass) {
	d.mark(p.marks, 1)
	if d.samples() && p.wanted > 0 {
		meta := uint64(d.meta.at)
		d.launch("peaks", grid{x: p.wanted, y: peakSlices, threads: 256}, meta, uint64(d.logits.at), uint64(d.peaks.at))
		d.launch("choose", grid{x: p.entries, threads: 1024}, meta, uint64(d.logits.at), uint64(d.peaks.at), uint64(d.work.at), uint64(d.counts),
			uint64(d.last), uint64(d.logprobs.at))
	}
	d.stamp(2)
}

// mark notes a time of the step twice: by the card's clock, and by an event.
func (d *device) mark(marks *[3]event, i int) {
	d.stamp(i)
	if d.err == nil {
		d.keep(d.recordOutside(marks[i]))
	}
}

func (d *device) stamp(i int) {
	d.launch("stamp", grid{threads: 1}, uint64(d.meta.at), number(i))
}

func (d *device) norm(rows int, weight address, picked bool) {
	d.launch("rmsNorm", grid{x: rows, threads: 256}, uint64(d.meta.at), uint64(d.hidden.at), uint64(weight), uint64(d.normed.at), flag(picked))
}

func (d *device) layer(i int, p pass) {
	l, c, meta := &d.weights.layers[i], d.config, uint64(d.meta.at)
	d.norm(p.rows, l.attnNorm, false)
	d.product(p.rows, l.qkv, product{x: d.normed.at, out: d.qkv.at})
	if !d.rotatesLate(p) {
		d.rope(i, p)
	}
	if p.layerDone != nil {
		d.keep(p.layerDone(i))
	}
	d.attention(i, l.window, p, d.rotatesLate(p))
	d.product(p.rows, l.o, product{x: d.mixed.at, out: d.hidden.at, float: true, add: true})
	d.norm(p.rows, l.mlpNorm, false)
	d.product(p.rows, l.gateUp, product{x: d.normed.at, out: d.gateUp.at})
	d.launch("gated", grid{x: p.rows, y: (c.Intermediate + 2047) / 2048, threads: 256}, meta, uint64(d.gateUp.at), uint64(d.gated.at))
	d.product(p.rows, l.down, product{x: d.gated.at, out: d.hidden.at, float: true, add: true})
}

// rope rotates Q and K and puts K and V into their blocks.
func (d *device) rope(i int, p pass) {
	l, c := &d.weights.layers[i], d.config
	perHead := 32 // threads
	if d.kernels.has.turned {
		perHead = c.HeadSize / 16
	}
	threads := (c.Heads + 2*c.KVHeads) * perHead
	d.launch("rope", grid{x: p.rows, y: (threads + 127) / 128, threads: 128}, uint64(d.meta.at), uint64(d.qkv.at),
		uint64(l.qkvBias), uint64(l.qNorm), uint64(l.kNorm), uint64(d.weights.turns), uint64(d.kvOf(i)), d.scalesOf(i), number(d.place(i)))
}

// queriesTogether is GQ of kernels/attention.cu: query heads that share a reading of KV.
func queriesTogether(group int) int {
	if group < 4 {
		return group
	}
	for _, n := range []int{4, 3, 2} {
		if group%n == 0 {
			return n
		}
	}
	return 1
}

// rotatesLate tells whether attention does the work of rope.
func (d *device) rotatesLate(p pass) bool { return p.graph && d.kernels.has.grouped }

func (d *device) attention(i, window int, p pass, rotate bool) {
	c, meta := d.config, uint64(d.meta.at)
	if p.untiled > 0 && d.kernels.has.grouped {
		l := &d.weights.layers[i]
		name, depth := "attendGroup", groupDepth
		if p.splits == 1 && c.KVHeads*p.rows <= d.cores {
			name, depth = "attendFew", fewDepth
		}
		d.launch(name, grid{x: c.KVHeads, y: p.rows, z: p.splits, threads: 128, shared: groupShared(c.HeadSize, depth)}, meta, uint64(d.qkv.at),
			uint64(d.kvOf(i)), d.scalesOf(i), uint64(d.mixed.at), uint64(d.partial.at), uint64(d.merged), number(d.place(i)), number(window), flag(p.graph),
			flag(rotate), uint64(l.qkvBias), uint64(l.qNorm), uint64(l.kNorm), uint64(d.weights.turns))
	} else if p.untiled > 0 {
		group := c.Heads / c.KVHeads
		d.launch("attend", grid{x: p.rows, y: c.KVHeads * group / queriesTogether(group), z: p.splits, threads: 128}, meta,
			uint64(d.qkv.at), uint64(d.kvOf(i)), d.scalesOf(i), uint64(d.mixed.at), uint64(d.partial.at), number(d.place(i)), number(window))
	}
	if p.untiled > 0 && p.splits > 1 && !d.kernels.has.grouped {
		d.launch("combine", grid{x: p.rows, y: c.Heads, threads: (c.HeadSize + 31) / 32 * 32}, meta, uint64(d.partial.at),
			uint64(d.mixed.at), number(p.splits))
	}
	if p.tiles > 0 {
		g := grid{x: c.Heads, y: p.tiles, threads: 256}
		if d.kernels.has.hopper {
			g.threads, g.shared, g.maps = 128*(consumers(c.HeadSize)+1), hopperShared(c.HeadSize), 1
			if box := d.kernels.has.box(d.info.TokensPerBlock); box > 0 {
				group := d.places[i].Group
				tokens := d.info.GroupBlocks(group) * d.info.GroupLayers(group) * 2 * d.info.TokensPerBlock
				d.describe(0, d.kvOf(i), extent{size: c.HeadSize, box: 64}, extent{size: c.KVHeads, box: 1, stride: c.HeadSize},
					extent{size: tokens, box: box, stride: c.KVHeads * c.HeadSize})
			}
		}
		d.launch("prefill", g, meta, uint64(d.qkv.at), uint64(d.kvOf(i)), d.scalesOf(i), uint64(d.mixed.at), number(d.place(i)), number(window))
	}
}

// product is out = x wᵀ, added to what out holds if add is set; float says that out is float32 in every mode.
type product struct {
	x, out     address
	float, add bool
}

func (d *device) product(rows int, w matrix, p product) {
	kind := 0
	if p.add {
		kind = 1
	}
	switch {
	case d.err != nil:
	case w.scales != 0:
		d.narrowProduct(rows, w, p)
	case !d.bf16:
		d.launch("product", grid{x: (w.n + 63) / 64, y: (rows + 63) / 64, threads: 256}, uint64(p.x), uint64(w.at), uint64(p.out),
			number(rows), number(w.n), number(w.k), number(kind))
	case rows == 1 && w.k%8 == 0:
		if p.float {
			kind |= 2
		}
		d.launch("vector", grid{x: (w.n + 15) / 16, threads: 256}, uint64(p.x), uint64(w.at), uint64(p.out), number(w.n), number(w.k), number(kind))
	default:
		d.keep(d.blas.multiply(d.stream, planKey{m: rows, n: w.n, k: w.k, float: p.float, add: p.add}, p.x, w.at, p.out))
	}
}

// maxGraphRows is the largest batch that decodes by a graph.
const maxGraphRows = 512

// graphKey names a captured decode step.
// The events of its step are part of it.
type graphKey struct {
	rows, splits int
	forwardEnd   event
}

// bucket is the number of rows of the graph that runs a batch: powers of two up to 8, then multiples of 8, 16 and 32.
func bucket(rows int) int {
	for n := 1; n <= 8; n *= 2 {
		if rows <= n {
			return n
		}
	}
	step := 8
	for rows > 8*step && step < 64 {
		step *= 2
	}
	return (rows + step - 1) / step * step
}

// splits is into how many parts attention cuts the KV of each row, so that the card has enough to do.
func (d *device) splits(rows, longest int) int {
	if !d.bf16 || rows > maxGraphRows {
		return 1 // one order of sums, whatever the batch
	}
	blocks, least := 1024, 64 // blocks that fill the card, and tokens that are worth one
	if d.kernels.has.grouped {
		blocks, least = 3*d.cores/2, 128
		if n := rows * d.config.KVHeads; n <= d.cores && n > d.cores*7/8 {
			return 1 // rings of many tiles do better
		}
	}
	n := 1
	for n < maxSplits && rows*d.config.KVHeads*n < blocks && longest > least*n {
		n *= 2
	}
	return n
}

// decode runs a step of one row an entry through a graph, which is captured when it is first needed.
func (d *device) decode(p pass) error {
	key := graphKey{p.rows, p.splits, p.marks[1]}
	g, ok := d.graphs[key]
	if !ok {
		var err error
		g, err = d.capture(func() error {
			d.forward(p)
			return d.taken()
		})
		if err != nil {
			return err
		}
		d.graphs[key] = g
	}
	return d.do("cuGraphLaunch", g, d.handle)
}

// capture makes a graph of what f queues.
func (s *stream) capture(f func() error) (graph uintptr, err error) {
	const relaxed = 2
	var captured uintptr
	if err := s.do("cuStreamBeginCapture_v2", s.handle, relaxed); err != nil {
		return 0, err
	}
	s.capturing = true
	err = f()
	s.capturing = false
	err = firstOf(err, s.do("cuStreamEndCapture", s.handle, uintptr(unsafe.Pointer(&captured))))
	if err == nil {
		err = s.do("cuGraphInstantiateWithFlags", uintptr(unsafe.Pointer(&graph)), captured, 0)
	}
	if captured != 0 {
		err = firstOf(err, s.do("cuGraphDestroy", captured))
	}
	return graph, err
}
