//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"unsafe"
)

var blasCalls = []string{
	"cublasLtCreate", "cublasLtDestroy", "cublasLtMatmul", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute",
	"cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceSetAttribute",
	"cublasLtMatmulAlgoGetHeuristic",
}

// blas multiplies bfloat16 matrices with cuBLASLt. The launcher owns it.
type blas struct {
	*library
	handle, preference uintptr
	workspace          address
	plans              map[planKey]*plan
	tuned              map[tunedKind]bool
	times              [2]event
}

// planKey is the shape of out (m, n) = x (m, k) wᵀ; add: on top of what out holds, which is then float32.
type planKey struct {
	m, n, k    int
	float, add bool
}

// plan is the way in which cuBLASLt does a shape. Its descriptors live as long as the process.
type plan struct {
	op, a, b, c uintptr
	result      algorithm
}

// algorithm is cublasLtMatmulHeuristicResult_t: 64 bytes that multiply takes, then what is known of them.
type algorithm [96]byte

// Values of cuBLASLt's headers.
const (
	blasWorkspace   = 32 << 20
	realF32         = 0  // CUDA_R_32F
	realBF16        = 14 // CUDA_R_16BF
	computeF32      = 68 // CUBLAS_COMPUTE_32F
	descTransA      = 3  // CUBLASLT_MATMUL_DESC_TRANSA
	prefMaxWorkroom = 1  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
)

func openBLAS(c *context) (*blas, error) {
	l, err := openLibrary([]string{"libcublasLt.so.13", "libcublasLt.so.12"}, blasCalls)
	if err != nil {
		return nil, err
	}
	b := &blas{library: l, plans: map[planKey]*plan{}, tuned: map[tunedKind]bool{}}
	if err := b.open(c); err != nil {
		return nil, errors.Join(err, b.close(c))
	}
	return b, nil
}

func (b *blas) open(c *context) (err error) {
	if b.workspace, err = c.alloc(blasWorkspace); err != nil {
		return err
	}
	for i := range b.times {
		if b.times[i], err = c.newTimer(); err != nil {
			return err
		}
	}
	room := uint64(blasWorkspace)
	return firstOf(
		status("cublasLtCreate", b.call("cublasLtCreate", uintptr(unsafe.Pointer(&b.handle)))),
		status("cublasLtMatmulPreferenceCreate", b.call("cublasLtMatmulPreferenceCreate", uintptr(unsafe.Pointer(&b.preference)))),
		func() error {
			return status("cublasLtMatmulPreferenceSetAttribute", b.call("cublasLtMatmulPreferenceSetAttribute", b.preference,
				prefMaxWorkroom, uintptr(unsafe.Pointer(&room)), 8))
		}(),
	)
}

// close frees what was opened; its plans stay.
func (b *blas) close(c *context) error {
	err := c.free(b.workspace)
	for _, e := range b.times {
		if e != 0 {
			err = firstOf(err, c.do("cuEventDestroy_v2", uintptr(e)))
		}
	}
	if b.handle != 0 {
		err = firstOf(err, status("cublasLtDestroy", b.call("cublasLtDestroy", b.handle)))
	}
	return err
}

func status(call string, s int32) error {
	if s == 0 {
		return nil
	}
	return fmt.Errorf("cuda: %s: status %d", call, s)
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// plan finds how to do a shape, once.
func (b *blas) plan(key planKey) (*plan, error) {
	if p := b.plans[key]; p != nil {
		return p, nil
	}
	p := &plan{}
	out := uintptr(realBF16)
	if key.float {
		out = realF32
	}
	transpose := int32(1)
	// Column-major: outᵀ (n, m) = w (n, k) · xᵀ (k, m), where w and x lie as (k, n) and (k, m).
	m, n, k := uintptr(key.m), uintptr(key.n), uintptr(key.k)
	if err := firstOf(
		status("cublasLtMatmulDescCreate", b.call("cublasLtMatmulDescCreate", uintptr(unsafe.Pointer(&p.op)), computeF32, realF32)),
		status("cublasLtMatrixLayoutCreate", b.call("cublasLtMatrixLayoutCreate", uintptr(unsafe.Pointer(&p.a)), realBF16, k, n, k)),
		status("cublasLtMatrixLayoutCreate", b.call("cublasLtMatrixLayoutCreate", uintptr(unsafe.Pointer(&p.b)), realBF16, k, m, k)),
		status("cublasLtMatrixLayoutCreate", b.call("cublasLtMatrixLayoutCreate", uintptr(unsafe.Pointer(&p.c)), out, n, m, n)),
	); err != nil {
		return nil, err
	}
	if err := status("cublasLtMatmulDescSetAttribute", b.call("cublasLtMatmulDescSetAttribute", p.op, descTransA, uintptr(unsafe.Pointer(&transpose)), 4)); err != nil {
		return nil, err
	}
	ways, err := b.ways(p, 1)
	if err != nil {
		return nil, fmt.Errorf("%w to do %+v", err, key)
	}
	p.result = ways[0]
	b.plans[key] = p
	return p, nil
}

// ways are up to n algorithms for a plan, the one that cuBLASLt thinks best first.
func (b *blas) ways(p *plan, n int) ([]algorithm, error) {
	out, found := make([]algorithm, n), int32(0)
	s := b.call("cublasLtMatmulAlgoGetHeuristic", b.handle, p.op, p.a, p.b, p.c, p.c, b.preference, uintptr(n),
		uintptr(unsafe.Pointer(&out[0])), uintptr(unsafe.Pointer(&found)))
	if s != 0 || found < 1 {
		return nil, fmt.Errorf("cuda: cuBLASLt has no way (status %d)", s)
	}
	return out[:found], nil
}

// multiply queues a product on s.
func (b *blas) multiply(s *stream, key planKey, x, w, out address) error {
	p, err := b.plan(key)
	if err != nil {
		return err
	}
	one, beta := float32(1), float32(0)
	if key.add {
		beta = 1
	}
	return b.queue(s, p, &p.result, x, w, out, one, beta)
}

func (b *blas) queue(s *stream, p *plan, way *algorithm, x, w, out address, one, beta float32) error { //nolint:revive // the arguments of cublasLtMatmul
	return status("cublasLtMatmul", b.call("cublasLtMatmul", b.handle, p.op, uintptr(unsafe.Pointer(&one)), uintptr(w), p.a,
		uintptr(x), p.b, uintptr(unsafe.Pointer(&beta)), uintptr(out), p.c, uintptr(out), p.c, uintptr(unsafe.Pointer(way)),
		uintptr(b.workspace), blasWorkspace, s.handle))
}
