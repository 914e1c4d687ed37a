package cpu

import (
	"errors"
	"fmt"
	"unsafe"

	"meridian.internal/gpu/model"
)

// GEMM is the matrix product alone, for benchmarks against other implementations. It is not safe for concurrent use.
type GEMM struct{ device device }

// NewGEMM takes a kernel and a number of threads as Options does.
func NewGEMM(kernel string, threads int) (*GEMM, error) {
	if threads < 1 {
		return nil, fmt.Errorf("cpu: GEMM on %d threads; must be at least 1", threads)
	}
	ks, err := chooseKernels(kernel)
	if err != nil {
		return nil, err
	}
	return &GEMM{device{ks: ks, pool: newPool(threads)}}, nil
}

// Multiply computes out = x wᵀ, all row-major: out (m, n), x (m, k), w (n, k).
func (g *GEMM) Multiply(out, x, w []float32, m, n, k int) error {
	if min(m, n, k) < 1 || k%lanes != 0 || len(out) < m*n || len(x) < m*k || len(w) < n*k {
		return errors.New("cpu: GEMM needs positive sizes, k a multiple of 16, and slices that hold the matrices")
	}
	weights := weight{data: unsafe.Pointer(&w[0]), dtype: model.F32, rows: n, cols: k, stride: 4 * k}
	g.device.multiply(m, product{&matrix{x, k}, &weights, &matrix{out, n}})
	return nil
}

// Close ends the threads.
func (g *GEMM) Close() { g.device.pool.close() }
