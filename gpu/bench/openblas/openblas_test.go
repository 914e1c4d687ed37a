//go:build cgo && openblas

package openblas

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"meridian.internal/gpu/cpu"
)

func random(rng *rand.Rand, n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(rng.NormFloat64())
	}
	return out
}

func newGEMM(tb testing.TB) *cpu.GEMM {
	tb.Helper()
	g, err := cpu.NewGEMM("", 1)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(g.Close)
	return g
}

func TestBothComputeTheSame(t *testing.T) {
	const m, n, k = 37, 53, 208
	rng := rand.New(rand.NewPCG(1, 1))
	x, w, ours, theirs := random(rng, m*k), random(rng, n*k), make([]float32, m*n), make([]float32, m*n)
	if err := newGEMM(t).Multiply(ours, x, w, m, n, k); err != nil {
		t.Fatal(err)
	}
	multiply(theirs, x, w, m, n, k)
	for i := range ours {
		if math.Abs(float64(ours[i]-theirs[i])) > 1e-3 {
			t.Fatalf("element %d: %g, OpenBLAS %g", i, ours[i], theirs[i])
		}
	}
}

// BenchmarkGEMM runs both in turns on one thread, so that what else the machine does hits both, and reports the ratio of
// the best times.
func BenchmarkGEMM(b *testing.B) {
	for _, name := range []string{"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} {
		if v, ok := os.LookupEnv(name); ok {
			b.Skipf("%s=%s keeps OpenBLAS from choosing its best kernel", name, v)
		}
	}
	b.Logf("OpenBLAS kernels: %s", core())
	for _, n := range []int{512, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(1, 1))
			x, w, out := random(rng, n*n), random(rng, n*n), make([]float32, n*n)
			g := newGEMM(b)
			ours, theirs := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
			for b.Loop() {
				t0 := time.Now()
				if err := g.Multiply(out, x, w, n, n, n); err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				multiply(out, x, w, n, n, n)
				ours, theirs = min(ours, t1.Sub(t0)), min(theirs, time.Since(t1))
			}
			flops := 2 * float64(n) * float64(n) * float64(n)
			b.ReportMetric(flops/float64(ours.Nanoseconds()), "GFLOP/s")
			b.ReportMetric(flops/float64(theirs.Nanoseconds()), "openblas-GFLOP/s")
			b.ReportMetric(float64(theirs)/float64(ours), "ratio")
		})
	}
}
