package cpu

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"unsafe"

	"meridian.internal/gpu/model"
)

func random(rng *rand.Rand, n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(rng.NormFloat64())
		if rng.IntN(50) == 0 { // far apart, so that sums lose bits, and near the ends of the range
			out[i] *= float32(math.Exp2(float64(rng.IntN(60) - 30)))
		}
	}
	return out
}

// randomWeight is a (rows, cols) weight of a type.
func randomWeight(rng *rand.Rand, rows, cols int, dtype model.DType) weight {
	values := random(rng, rows*cols)
	w := weight{dtype: dtype, rows: rows, cols: cols, stride: cols * dtype.Size()}
	if dtype == model.F32 {
		w.data = unsafe.Pointer(&values[0])
		return w
	}
	narrow := make([]uint16, len(values))
	for i, v := range values {
		if dtype == model.BF16 {
			narrow[i] = model.Float32ToBF16(v)
		} else {
			narrow[i] = model.Float32ToF16(max(min(v, 60000), -60000))
		}
	}
	w.data = unsafe.Pointer(&narrow[0])
	return w
}

func sameBits(t *testing.T, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: element %d is %g (%#x), scalar gives %g (%#x)", what, i,
				got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

// others are the kernels but for the scalar ones.
func others(t *testing.T) []*kernels {
	all := available()
	if len(all) == 1 {
		t.Skip("this processor has no kernels but the scalar ones")
	}
	return all[:len(all)-1]
}

func TestProductsAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ks := range others(t) {
		for range 40 {
			m, n, k := 1+rng.IntN(14), 1+rng.IntN(30), lanes*(1+rng.IntN(20))
			for _, dtype := range []model.DType{model.F32, model.BF16, model.F16} {
				x := matrix{random(rng, m*k), k}
				w := randomWeight(rng, n, k, dtype)
				got, want := matrix{make([]float32, m*n), n}, matrix{make([]float32, m*n), n}
				ks.part(product{&x, &w, &got}, 0, m, 0, n)
				scalarKernels().part(product{&x, &w, &want}, 0, m, 0, n)
				sameBits(t, fmt.Sprintf("%s %s %dx%dx%d", ks.name, dtype, m, n, k), got.data, want.data)
			}
		}
	}
}

func TestWeighedSumsAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, ks := range others(t) {
		for range 100 {
			n, group, cols := 1+rng.IntN(40), 1+rng.IntN(9), lanes*(1+rng.IntN(9))
			weights, values, acc := matrix{random(rng, group*n), n}, random(rng, n*cols), random(rng, group*cols)
			weighWith := func(ks *kernels) []float32 {
				a := attender{device: &device{ks: ks, kv: &kvMemory{headStride: cols}}, group: group,
					scratch: &scratch{scores: weights, acc: matrix{append([]float32(nil), acc...), cols}}}
				a.weigh(n, &weights.data[0], &values[0])
				return a.scratch.acc.data
			}
			sameBits(t, ks.name, weighWith(ks), weighWith(scalarKernels()))
		}
	}
}

func TestSoftmaxAndSiLUAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, ks := range others(t) {
		for range 200 {
			n := lanes * (1 + rng.IntN(20))
			x, up := random(rng, n), random(rng, n)
			for i := range x {
				x[i] *= 30
				if i > 0 && rng.IntN(20) == 0 {
					x[i] = float32(math.Inf(-1))
				}
			}
			got, want := append([]float32(nil), x...), append([]float32(nil), x...)
			s, ws := ks.softmax(&got[0], n), scalarSoftmax(&want[0], n)
			sameBits(t, ks.name+" softmax", append(got, s), append(want, ws))
			got, want = append([]float32(nil), x...), append([]float32(nil), x...)
			ks.silu(&got[0], &up[0], n)
			scalarSiLU(&want[0], &up[0], n)
			sameBits(t, ks.name+" silu", got, want)
		}
	}
}

func TestExpIsCloseToExp(t *testing.T) {
	for x := float32(-86); x <= 88; x += 0.0173 {
		want := math.Exp(float64(x))
		if got := float64(exp32(x)); math.Abs(got/want-1) > 2e-7 {
			t.Fatalf("exp(%g) = %g, want %g", x, got, want)
		}
	}
	if exp32(0) != 1 || exp32(-87) != 0 || exp32(float32(math.Inf(-1))) != 0 {
		t.Error("exp is not 1 at 0 or not 0 far below")
	}
}

// TestFMAIsRoundedOnce compares with exact arithmetic, on numbers chosen so that a sum rounded twice goes wrong.
func TestFMAIsRoundedOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	check := func(a, b, c float32) {
		t.Helper()
		exact := new(big.Float).SetPrec(2000).Mul(big.NewFloat(float64(a)).SetPrec(2000), big.NewFloat(float64(b)).SetPrec(2000))
		exact.Add(exact, big.NewFloat(float64(c)))
		if want, _ := exact.Float32(); want != fma32(a, b, c) {
			t.Fatalf("%g*%g+%g = %g, want %g", a, b, c, fma32(a, b, c), want)
		}
	}
	check(1+0x1p-23, 1+0x1p-23, 0x1p-70)         // a tie in float64, settled by what float64 drops
	check(1+0x1p-12, 1+0x1p-12, 0x1p-60)         // 1 + 2^-11 + 2^-24 + dust: just above a tie
	check(1+0x1p-12, 1+0x1p-12, -0x1p-60)        // just below it
	check(-(1 + 0x1p-12), 1+0x1p-12, 0x1p-60)    // the same below zero
	check(-(1 + 0x1p-12), 1+0x1p-12, -0x1p-60)   //
	check(0x1p-75, 0x1p-74, 0x1p-126)            // subnormal neighbours
	check(0x1.000002p-75, 0x1.8p-75, 0x1p-149)   //
	check(0x1.000002p-100, 0x1.8p-49, -0x1p-149) //
	for range 200_000 {
		scale := func() float32 { return float32(math.Ldexp(rng.Float64()-0.5, rng.IntN(80)-40)) }
		a, b := scale(), scale()
		check(a, b, -a*b*(1+float32(rng.IntN(3))*0x1p-22))
		check(a, b, scale())
		check(1+float32(rng.IntN(1<<12))*0x1p-12, 1+float32(rng.IntN(1<<12))*0x1p-12, float32(math.Ldexp(rng.Float64()-0.5, -rng.IntN(70))))
	}
}

func TestUnknownKernelIsRefused(t *testing.T) {
	if _, err := chooseKernels("neon9"); err == nil {
		t.Error("an unknown kernel was accepted")
	}
}

func TestWeightsWithoutWholeLanesArePadded(t *testing.T) {
	data := make([]byte, 3*20*2)
	for i := range data {
		data[i] = byte(i)
	}
	w := newWeight(&model.Tensor{Type: model.BF16, Shape: []int{3, 20}, Data: data})
	rows := unsafe.Slice((*byte)(w.data), 3*w.stride)
	if w.cols != 32 || w.stride != 64 || rows[64] != 40 || rows[64+39] != 79 || rows[64+40] != 0 || rows[191] != 0 {
		t.Errorf("cols %d, stride %d, row 1 % x", w.cols, w.stride, rows[64:128])
	}
}
