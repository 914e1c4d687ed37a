//go:build cuda

package cuda

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"testing"

	"meridian.internal/gpu/model"
)

// TestStagesAreFilledByAllProcessorsAsByOne: parts of a tensor lie where one goroutine would have put them.
func TestStagesAreFilledByAllProcessorsAsByOne(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(5))
	r := rand.New(rand.NewPCG(9, 9))
	src := make([]byte, 5*leastFilled+12)
	for i := range src {
		src[i] = byte(r.Uint32()) & 0xbf // no infinities and other numbers that are none
	}
	for _, bf16 := range []bool{false, true} {
		for _, kind := range []model.DType{model.F32, model.F16, model.BF16} {
			for _, n := range []int{0, kind.Size(), 1000 * kind.Size(), len(src)} {
				l := &loader{bf16: bf16}
				size := n / kind.Size() * l.elementSize()
				got, want := make([]byte, size), make([]byte, size)
				l.fill(got, src[:n], kind)
				l.convert(want, src[:n], kind)
				if !bytes.Equal(got, want) {
					t.Errorf("%v to bf16 %t, %d bytes: parts lie elsewhere", kind, bf16, n)
				}
			}
		}
	}
}

// BenchmarkFill is how fast a stage is filled with weights that need no conversion.
func BenchmarkFill(b *testing.B) {
	src, dst := make([]byte, 256<<20), make([]byte, stageBytes/2)
	for i := range src {
		src[i] = byte(i)
	}
	l := &loader{bf16: true}
	b.SetBytes(int64(len(dst)))
	for at := 0; b.Loop(); at = (at + len(dst)) % len(src) {
		l.fill(dst, src[at:at+len(dst)], model.BF16)
	}
}
