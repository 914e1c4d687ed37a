//go:build cgo && openblas

package openblas

// #cgo LDFLAGS: -lopenblas
// #include <cblas.h>
// extern void openblas_set_num_threads(int);
// extern char *openblas_get_corename(void);
import "C"

// multiply computes out = x wᵀ on one thread, all row-major: out (m, n), x (m, k), w (n, k).
func multiply(out, x, w []float32, m, n, k int) {
	C.openblas_set_num_threads(1)
	C.cblas_sgemm(C.CblasRowMajor, C.CblasNoTrans, C.CblasTrans, C.int(m), C.int(n), C.int(k), 1,
		(*C.float)(&x[0]), C.int(k), (*C.float)(&w[0]), C.int(k), 0, (*C.float)(&out[0]), C.int(n))
}

// core names the kernels that OpenBLAS chose.
func core() string { return C.GoString(C.openblas_get_corename()) }
