package cpu

import (
	"math"

	"meridian.internal/gpu/model"
)

// rope holds the rotations of all positions so far. The angle is the product of position and frequency in float32, as
// the models were trained; sine and cosine of it are exact to float32.
type rope struct {
	freq     []float32 // (head size / 2)
	scale    float64
	cos, sin []float32 // (positions, head size / 2)
}

func newRope(c *model.Config) *rope {
	r := &rope{scale: c.RoPE.Scale}
	for _, f := range c.RoPE.InvFreq(c.HeadSize) {
		r.freq = append(r.freq, float32(f))
	}
	return r
}

// grow makes positions [0, n) ready.
func (r *rope) grow(n int) {
	for pos := len(r.cos) / len(r.freq); pos < n; pos++ {
		for _, f := range r.freq {
			sin, cos := math.Sincos(float64(float32(pos) * f))
			r.cos = append(r.cos, float32(cos*r.scale))
			r.sin = append(r.sin, float32(sin*r.scale))
		}
	}
}

// turn rotates the pairs (i, i + half) of one head.
func (r *rope) turn(head []float32, pos int) {
	half := len(r.freq)
	cos, sin := r.cos[pos*half:(pos+1)*half], r.sin[pos*half:(pos+1)*half]
	lo, hi := head[:half], head[half:2*half]
	for i, c := range cos {
		s, a, b := sin[i], lo[i], hi[i]
		lo[i] = float32(a*c) - float32(b*s)
		hi[i] = float32(b*c) + float32(a*s)
	}
}
