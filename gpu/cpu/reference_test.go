package cpu

import (
	"math"

	"meridian.internal/gpu/model"
)

// The reference is the models' definition as plain loops in float64 over the whole sequence, with no cache and no
// batching. It shares nothing with the back end but the loader and RoPE's frequencies, which have tests of their own.

type vec = []float64

func widen(t *model.Tensor) vec {
	out := make(vec, 0, t.Elements())
	for _, v := range t.Float32() {
		out = append(out, float64(v))
	}
	return out
}

// apply is W x + b.
func apply(w, b *model.Tensor, x vec) vec {
	weights, out := widen(w), make(vec, w.Shape[0])
	for i := range out {
		for j, v := range x {
			out[i] += weights[i*len(x)+j] * v
		}
	}
	if b != nil {
		for i, v := range widen(b) {
			out[i] += v
		}
	}
	return out
}

func rms(x vec, w *model.Tensor, eps float64) vec {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	out := make(vec, len(x))
	for i, v := range widen(w) {
		out[i] = x[i] / math.Sqrt(sum/float64(len(x))+eps) * v
	}
	return out
}

func add(x, y vec) {
	for i, v := range y {
		x[i] += v
	}
}

type reference struct{ m *model.Model }

// logits gives the logits after each token.
func (r reference) logits(tokens []int32) []vec {
	m := r.m
	stream := make([]vec, len(tokens))
	embed := widen(m.Embed)
	for i, t := range tokens {
		stream[i] = append(vec(nil), embed[int(t)*m.Config.Hidden:(int(t)+1)*m.Config.Hidden]...)
	}
	for l := range m.Layers {
		layer := &m.Layers[l]
		normed := make([]vec, len(stream))
		for i, x := range stream {
			normed[i] = rms(x, layer.AttnNorm, m.Config.NormEps)
		}
		for i, a := range r.attention(layer, m.Config.Windows[l], normed) {
			add(stream[i], apply(layer.O, nil, a))
		}
		for _, x := range stream {
			h := rms(x, layer.MLPNorm, m.Config.NormEps)
			gate, up := apply(layer.Gate, nil, h), apply(layer.Up, nil, h)
			for i, g := range gate {
				gate[i] = g / (1 + math.Exp(-g)) * up[i]
			}
			add(x, apply(layer.Down, nil, gate))
		}
	}
	out := make([]vec, len(stream))
	for i, x := range stream {
		out[i] = apply(m.Head, nil, rms(x, m.Norm, m.Config.NormEps))
	}
	return out
}

func (r reference) attention(l *model.Layer, window int, x []vec) []vec {
	c := &r.m.Config
	q, k, v := make([]vec, len(x)), make([]vec, len(x)), make([]vec, len(x))
	for i := range x {
		q[i] = r.heads(apply(l.Q, l.QBias, x[i]), l.QNorm, i)
		k[i] = r.heads(apply(l.K, l.KBias, x[i]), l.KNorm, i)
		v[i] = apply(l.V, l.VBias, x[i])
	}
	out := make([]vec, len(x))
	for i := range x {
		out[i] = make(vec, c.Heads*c.HeadSize)
		for h := range c.Heads {
			at, kvAt := h*c.HeadSize, h/(c.Heads/c.KVHeads)*c.HeadSize
			weights, total := make(vec, len(x)), 0.0
			for j := 0; j <= i; j++ {
				if window > 0 && i-j >= window {
					continue
				}
				dot := 0.0
				for d := range c.HeadSize {
					dot += q[i][at+d] * k[j][kvAt+d]
				}
				weights[j] = math.Exp(dot / math.Sqrt(float64(c.HeadSize)))
				total += weights[j]
			}
			for j, w := range weights {
				for d := range c.HeadSize {
					out[i][at+d] += w / total * v[j][kvAt+d]
				}
			}
		}
	}
	return out
}

// heads applies the norm of each head and the rotation, as complex numbers.
func (r reference) heads(x vec, norm *model.Tensor, pos int) vec {
	c := &r.m.Config
	size, freq := c.HeadSize, c.RoPE.InvFreq(c.HeadSize)
	for at := 0; at < len(x); at += size {
		head := x[at : at+size]
		if norm != nil {
			copy(head, rms(head, norm, c.NormEps))
		}
		for i, f := range freq {
			turned := complex(head[i], head[i+size/2]) * complex(c.RoPE.Scale*math.Cos(float64(pos)*f), c.RoPE.Scale*math.Sin(float64(pos)*f))
			head[i], head[i+size/2] = real(turned), imag(turned)
		}
	}
	return x
}
