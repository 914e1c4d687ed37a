package cpu

import (
	"fmt"
	"strings"
	"unsafe"

	"meridian.internal/gpu/model"
)

// tileFunc computes an mr x nr tile of dot products: out[i][j] = x[i] . w[j] over k elements, a multiple of lanes. Strides
// are in bytes.
type tileFunc func(k int, x *float32, xStride int, w unsafe.Pointer, wStride int, out *float32, outStride int)

// weighFunc adds n weighted rows to mr accumulators of nr elements: acc[i][:] += weights[i][t] * values[t][:], t rising.
// Strides are in bytes.
type weighFunc func(n int, weights *float32, weightStride int, values *float32, valueStride int, acc *float32, accStride int)

// kernels is one implementation of the arithmetic. All implementations give the same bits.
type kernels struct {
	name    string
	mr, nr  []int                        // tile sizes that exist, falling, down to 1
	tiles   map[model.DType][][]tileFunc // [index in mr][index in nr]
	wr, wc  []int                        // sizes of weigh, falling: rows down to 1, elements down to lanes
	weigh   [][]weighFunc                // [index in wr][index in wc]
	softmax func(x *float32, n int) float32
	silu    func(gate, up *float32, n int)
}

func scalarKernels() *kernels {
	return &kernels{
		name: "scalar", mr: []int{1}, nr: []int{1},
		tiles: map[model.DType][][]tileFunc{
			model.F32: {{scalarF32}}, model.BF16: {{scalarBF16}}, model.F16: {{scalarF16}},
		},
		wr: []int{1}, wc: []int{lanes}, weigh: [][]weighFunc{{scalarWeigh}},
		softmax: scalarSoftmax, silu: scalarSiLU,
	}
}

// Kernels lists the kernels that this processor can run, best first.
func Kernels() []string {
	var names []string
	for _, k := range available() {
		names = append(names, k.name)
	}
	return names
}

func chooseKernels(name string) (*kernels, error) {
	all := available()
	for _, k := range all {
		if name == "" || k.name == name {
			return k, nil
		}
	}
	return nil, fmt.Errorf("cpu: kernel %q; this processor has %s", name, strings.Join(Kernels(), ", "))
}
