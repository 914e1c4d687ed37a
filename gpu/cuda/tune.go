//go:build cuda

package cuda

import "fmt"

const (
	tunedWays = 8 // algorithms that are tried for a shape
	tunedRuns = 6 // timed products of each
)

// tunedKind is a kind of step.
type tunedKind struct {
	rows   int
	decode bool
}

// tune finds the fastest algorithm for each product of a step of rows, once: of a decode step, or of one that is full of prompts. It runs before anything of the step is
// on the card, when all the activations are scratch; the weights are those of layer after layer, as in a step, so that they come from memory.
func (d *device) tune(rows int) error {
	decode := d.desc.decode
	fuses := decode && d.fuses(rows)
	kind := tunedKind{rows, decode}
	if !d.bf16 || d.blas.tuned[kind] || fuses && rows <= maxThin {
		return nil
	}
	d.blas.tuned[kind] = true
	each := func(pick func(*layer) matrix) func(i int) matrix {
		return func(i int) matrix { return pick(&d.weights.layers[i%len(d.weights.layers)]) }
	}
	type shape struct {
		weights func(int) matrix
		product
	}
	shapes := []shape{
		{each(func(l *layer) matrix { return l.qkv }), product{x: d.normed.at, out: d.qkv.at}},
		{each(func(l *layer) matrix { return l.o }), product{x: d.mixed.at, out: d.hidden.at, float: true, add: true}},
		{each(func(l *layer) matrix { return l.gateUp }), product{x: d.normed.at, out: d.gateUp.at}},
		{each(func(l *layer) matrix { return l.down }), product{x: d.gated.at, out: d.hidden.at, float: true, add: true}},
	}
	if fuses || d.kernels.has.narrow && rows <= d.mostNarrow() {
		shapes = nil // products of layers are our own then
	}
	if decode && d.samples() {
		shapes = append(shapes, shape{func(int) matrix { return d.weights.head }, product{x: d.normed.at, out: d.logits.at, float: true}})
	}
	for _, s := range shapes {
		if err := d.tuneShape(rows, s.weights, s.product); err != nil {
			return fmt.Errorf("tune products of %d rows: %w", rows, err)
		}
	}
	return nil
}

func (d *device) tuneShape(rows int, weights func(int) matrix, s product) error {
	w := weights(0)
	p, err := d.blas.plan(planKey{m: rows, n: w.n, k: w.k, float: s.float, add: s.add})
	if err != nil {
		return err
	}
	ways, err := d.blas.ways(p, tunedWays)
	if err != nil {
		return err
	}
	beta := float32(0)
	if s.add {
		beta = 1
	}
	best := float32(0)
	for _, way := range ways {
		run := func(i int) error {
			w := weights(i)
			if w.scales != 0 {
				w.at = d.wide.at // what it is widened to
			}
			return d.blas.queue(d.stream, p, &way, s.x, w.at, s.out, 1, beta)
		}
		if run(0) != nil {
			continue // an algorithm that this card or shape refuses after all
		}
		if err := d.record(d.blas.times[0]); err != nil {
			return err
		}
		for i := range tunedRuns {
			if err := run(i + 1); err != nil {
				return err
			}
		}
		if err := firstOf(d.record(d.blas.times[1]), d.waitEvent(d.blas.times[1])); err != nil {
			return err
		}
		ms, err := d.between(d.blas.times[0], d.blas.times[1])
		if err != nil {
			return err
		}
		if best == 0 || ms < best {
			best, p.result = ms, way
		}
	}
	return nil
}
