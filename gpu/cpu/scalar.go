package cpu

import (
	"math"
	"unsafe"

	"meridian.internal/gpu/model"
)

// lanes is the number of partial sums of every dot product.
const lanes = 16

// pad rounds n up to a whole number of lanes.
func pad(n int) int { return (n + lanes - 1) &^ (lanes - 1) }

// fma32 is a*b+c, rounded once to float32. The product is exact in float64; the sum is rounded to float64 and then to
// float32, and the second rounding goes wrong only if the first one made or hid a tie. Then the sum is made odd in its
// last bit towards the lost part, which settles the tie (Boldo and Melquiond, "Emulation of FMA and correctly rounded
// sums", 2008).
func fma32(a, b, c float32) float32 {
	p, c64 := float64(a)*float64(b), float64(c)
	s := p + c64
	bits := math.Float64bits(s)
	const belowFloat32, tie = 1<<29 - 1, 1 << 28
	if bits&belowFloat32 == tie || math.Abs(s) < 0x1p-126 {
		return fmaTie(p, c64, s)
	}
	return float32(s)
}

func fmaTie(p, c, s float64) float32 {
	// Knuth's two-sum: p + c = s + lost, exactly.
	t := s - p
	lost := (p - (s - t)) + (c - t)
	if bits := math.Float64bits(s); lost != 0 && bits&1 == 0 {
		if (lost > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

// tree adds 16 lanes in the order of the package comment.
func tree(l *[lanes]float32) float32 {
	for half := lanes / 2; half > 0; half /= 2 {
		for i := range half {
			l[i] += l[i+half]
		}
	}
	return l[0]
}

// dotStep adds one product to each lane.
func dotStep(acc *[lanes]float32, x []float32, w *[lanes]float32) {
	for l, v := range x[:lanes] {
		acc[l] = fma32(v, w[l], acc[l])
	}
}

// The scalar kernels compute one output a call.

func scalarF32(k int, x *float32, _ int, w unsafe.Pointer, _ int, out *float32, _ int) {
	var acc [lanes]float32
	xs, ws := unsafe.Slice(x, k), unsafe.Slice((*float32)(w), k)
	for i := 0; i < k; i += lanes {
		dotStep(&acc, xs[i:], (*[lanes]float32)(ws[i:]))
	}
	*out = tree(&acc)
}

func scalarBF16(k int, x *float32, _ int, w unsafe.Pointer, _ int, out *float32, _ int) {
	scalarNarrow(unsafe.Slice(x, k), unsafe.Slice((*uint16)(w), k), out, model.BF16ToFloat32)
}

func scalarF16(k int, x *float32, _ int, w unsafe.Pointer, _ int, out *float32, _ int) {
	scalarNarrow(unsafe.Slice(x, k), unsafe.Slice((*uint16)(w), k), out, model.F16ToFloat32)
}

func scalarNarrow(x []float32, w []uint16, out *float32, widen func(uint16) float32) {
	var acc, wide [lanes]float32
	for i := 0; i < len(x); i += lanes {
		for l := range wide {
			wide[l] = widen(w[i+l])
		}
		dotStep(&acc, x[i:], &wide)
	}
	*out = tree(&acc)
}

// The exponential: x = n ln2 + r with n whole and |r| <= ln2/2, and e^r by a polynomial (coefficients of Cephes' expf,
// S. Moshier). Its relative error is below 2e-7. Arguments below expLow give 0, those above expHigh count as expHigh, so
// that 2^n is always a normal number.
const (
	expLow   = -86
	expHigh  = 88
	expLog2E = 1.44269504088896341
	expMagic = 3 << 22 // adding it leaves the nearest whole number in the low bits
	expLn2Hi = -0.693359375
	expLn2Lo = 2.12194440e-4
	exp0     = 1.9875691500e-4
	exp1     = 1.3981999507e-3
	exp2     = 8.3334519073e-3
	exp3     = 4.1665795894e-2
	exp4     = 1.6666665459e-1
	exp5     = 5.0000001201e-1
)

func exp32(x float32) float32 {
	if x < expLow {
		return 0
	}
	if x > expHigh {
		x = expHigh
	}
	t := fma32(x, expLog2E, expMagic)
	n := t - expMagic
	r := fma32(n, expLn2Lo, fma32(n, expLn2Hi, x))
	p := fma32(exp0, r, exp1)
	p = fma32(p, r, exp2)
	p = fma32(p, r, exp3)
	p = fma32(p, r, exp4)
	p = fma32(p, r, exp5)
	y := fma32(p, float32(r*r), r) + 1
	return math.Float32frombits(math.Float32bits(y) + math.Float32bits(t)<<23)
}

// scalarSoftmax replaces n numbers by the exponentials of their distance to the largest and returns the sum; n is a
// multiple of lanes.
func scalarSoftmax(x *float32, n int) float32 {
	xs := unsafe.Slice(x, n)
	top := xs[0]
	for _, v := range xs {
		top = max(top, v)
	}
	var acc [lanes]float32
	for i := range xs {
		xs[i] = exp32(xs[i] - top)
		acc[i%lanes] += xs[i]
	}
	return tree(&acc)
}

// scalarSiLU computes gate[i] = gate[i] / (1 + e^-gate[i]) * up[i]; n is a multiple of lanes.
func scalarSiLU(gate, up *float32, n int) {
	gs, us := unsafe.Slice(gate, n), unsafe.Slice(up, n)
	for i, g := range gs {
		gs[i] = float32(g/(1+exp32(-g))) * us[i]
	}
}

// scalarWeigh adds weights[i] * values[i*stride:] to acc for i = 0..n-1, in this order; one row of lanes elements.
func scalarWeigh(n int, weights *float32, _ int, values *float32, stride int, acc *float32, _ int) {
	out := unsafe.Slice(acc, lanes)
	for i, p := range unsafe.Slice(weights, n) {
		v := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(values), i*stride)), lanes)
		for l := range out {
			out[l] = fma32(p, v[l], out[l])
		}
	}
}
