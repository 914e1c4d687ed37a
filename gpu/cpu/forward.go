package cpu

import (
	"math"

	"meridian.internal/gpu/backend"
)

// forward runs the stage's layers over d.rows. If the stage samples, d.rows are afterwards the rows whose logits are
// wanted, and d.logits are theirs.
func (d *device) forward(b *backend.Batch) {
	for _, r := range d.rows {
		d.rope.grow(r.pos + 1)
	}
	for i := range d.layers {
		last := d.samples() && i == len(d.layers)-1
		d.attend(b, i, last)
		if len(d.rows) == 0 {
			return // only KV was wanted, and it is written
		}
		d.mlp(&d.layers[i])
	}
	if !d.samples() {
		return
	}
	d.normalize(d.norm)
	d.logits.resize(len(d.rows))
	d.multiply(len(d.rows), product{&d.normed, &d.head, &d.logits})
}

// attend is the first half of a layer: norm, Q, K, V, attention and the output projection, added to the stream. In the
// last layer only the rows whose logits are wanted go on once K and V are written.
func (d *device) attend(b *backend.Batch, i int, last bool) {
	l := &d.layers[i]
	d.normalize(l.attnNorm)
	n := len(d.rows)
	d.key.resize(n)
	d.value.resize(n)
	k, v, q := product{&d.normed, &l.k, &d.key}, product{&d.normed, &l.v, &d.value}, product{&d.normed, &l.q, &d.query}
	if last {
		d.multiply(n, k, v)
	} else {
		d.query.resize(n)
		d.multiply(n, q, k, v)
	}
	d.eachRow(d.key.cols, func(worker, r int) { d.storeKV(b, i, r, worker) })
	if b.LayerDone != nil {
		b.LayerDone(d.info.Stage.First + i + 1)
	}
	if last {
		if d.keepWanted(); len(d.rows) == 0 {
			return
		}
		d.query.resize(len(d.rows))
		d.multiply(len(d.rows), q)
	}
	d.eachRow(d.query.cols, func(worker, r int) {
		d.finishHeads(d.query.row(r), d.config.Heads, headParams{l.qBias, l.qNorm, d.rows[r].pos}, worker)
	})
	d.attention(b, i)
	d.sum.resize(len(d.rows))
	d.multiply(len(d.rows), product{&d.query, &l.o, &d.sum})
	d.addSum()
}

// mlp is the second half of a layer: norm, gate and up projections, SiLU, down projection, added to the stream.
func (d *device) mlp(l *layer) {
	n := len(d.rows)
	d.normalize(l.mlpNorm)
	d.gate.resize(n)
	d.up.resize(n)
	d.multiply(n, product{&d.normed, &l.gate, &d.gate}, product{&d.normed, &l.up, &d.up})
	d.eachRow(d.gate.cols*8, func(_, r int) {
		d.ks.silu(&d.gate.row(r)[0], &d.up.row(r)[0], d.gate.cols)
	})
	d.sum.resize(n)
	d.multiply(n, product{&d.gate, &l.down, &d.sum})
	d.addSum()
}

// eachRow calls f for every row of the step; cost is that of one row in multiply-adds.
func (d *device) eachRow(cost int, f func(worker, row int)) {
	d.pool.run(len(d.rows), len(d.rows)*cost, f)
}

// keepWanted drops the rows whose logits are not wanted.
func (d *device) keepWanted() {
	n := 0
	for i, r := range d.rows {
		if r.wanted {
			d.rows[n] = r
			copy(d.hidden.row(n), d.hidden.row(i))
			copy(d.normed.row(n), d.normed.row(i))
			n++
		}
	}
	d.rows = d.rows[:n]
}

// normalize fills d.normed with the RMS norm of the stream: x / sqrt(mean(x²) + eps) * weight.
func (d *device) normalize(weight []float32) {
	d.normed.resize(len(d.rows))
	d.eachRow(4*d.hidden.cols, func(_, r int) {
		d.rmsNorm(d.normed.row(r), d.hidden.row(r), weight)
	})
}

// rmsNorm needs x padded with zeros to whole lanes; the mean is over len(weight) elements.
func (d *device) rmsNorm(out, x, weight []float32) {
	mean := float64(d.ks.dot(x, x)) / float64(len(weight))
	scale := float32(1 / math.Sqrt(mean+d.config.NormEps))
	for i, w := range weight {
		out[i] = float32(x[i]*scale) * w
	}
}

func (d *device) addSum() {
	d.eachRow(d.hidden.cols, func(_, r int) {
		sum, h := d.sum.row(r), d.hidden.row(r)
		for i, v := range sum {
			h[i] += v
		}
	})
}

// storeKV finishes the keys of one row and writes keys and values into the KV memory.
func (d *device) storeKV(b *backend.Batch, layer, r, worker int) {
	l, pos := &d.layers[layer], d.rows[r].pos
	keys, values := d.key.row(r), d.value.row(r)
	d.finishHeads(keys, d.config.KVHeads, headParams{l.kBias, l.kNorm, pos}, worker)
	addBias(values, l.vBias)
	block := d.kv.table(&b.Entries[d.rows[r].entry], layer)[pos/d.kv.tokens]
	at := pos % d.kv.tokens * d.kv.headStride
	size := d.kv.headSize
	for h := range d.config.KVHeads {
		copy(d.kv.head(block, layer, 0, h)[at:], keys[h*size:(h+1)*size])
		copy(d.kv.head(block, layer, 1, h)[at:], values[h*size:(h+1)*size])
	}
}

// headParams is what turns a projection into queries or keys.
type headParams struct {
	bias, norm []float32 // nil: none
	pos        int
}

// finishHeads applies bias, the norm of each head and RoPE to one row of queries or keys.
func (d *device) finishHeads(x []float32, heads int, p headParams, worker int) {
	addBias(x, p.bias)
	size := d.config.HeadSize
	for h := range heads {
		head := x[h*size : (h+1)*size]
		if p.norm != nil {
			padded := d.scratch[worker].head
			copy(padded, head)
			d.rmsNorm(head, padded, p.norm)
		}
		d.rope.turn(head, p.pos)
	}
}

func addBias(x, bias []float32) {
	for i, b := range bias {
		x[i] += b
	}
}
