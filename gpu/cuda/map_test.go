//go:build cuda

package cuda

import (
	"strings"
	"testing"
	"unsafe"

	"meridian.internal/gpu/model"
)

func TestMapsOfALaunchAreAlignedAndApart(t *testing.T) {
	launchers := make([]struct {
		shift byte
		maps  tensorMaps
	}, 9) // at different distances from a multiple of 64
	for i := range launchers {
		m := &launchers[i].maps
		for j := range mostMaps {
			at := m.at(j)
			if p := uintptr(unsafe.Pointer(at)); p%64 != 0 {
				t.Errorf("map %d at %#x", j, p)
			}
			for k := range at {
				at[k] = uint64(j + 1)
			}
		}
		for j := range mostMaps {
			if at := m.at(j); at[0] != uint64(j+1) || at[15] != uint64(j+1) {
				t.Errorf("map %d holds %d and %d after the others were written", j, at[0], at[15])
			}
		}
	}
}

func TestBoxesAreWholePartsOfKVBlocksAndOfSteps(t *testing.T) {
	for perBlock, want := range map[int]int{8: 8, 16: 16, 32: 32, 64: 64, 128: 128, 256: 128, 1: 0, 4: 0, 12: 0, 24: 0, 192: 0} {
		if got := boxTokens(perBlock); got != want {
			t.Errorf("KV blocks of %d tokens: boxes of %d, want %d", perBlock, got, want)
		}
	}
}

func TestKernelsAskForNoMoreSharedMemoryThanABlockMayHave(t *testing.T) {
	const most = 227 << 10 // sm_90
	for name, shape := range map[string]string{"heads of 64": bench1B, "heads of 128": bench8B, "groups of 16": strings.Replace(bench1B, `"num_key_value_heads": 8`, `"num_key_value_heads": 2`, 1)} {
		m, err := model.ParseConfig([]byte(shape))
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range []string{"bf16", narrowType, "f32"} {
			for kernel, bytes := range featuresOf(90, m, kv, kv == narrowType).names(m.HeadSize) {
				const static = 20 << 10 // what a kernel may have besides
				if bytes+static > most && kernel != "attendFew" && kernel != "prefill" || bytes > most {
					t.Errorf("%s, %s: kernel %s asks for %d bytes", name, kv, kernel, bytes)
				}
			}
		}
	}
	for rows, want := range map[int]int{9: 16, 16: 16, 17: 32, 33: 64, 64: 64} {
		if got := productShapeOf(rows).rows; got != want {
			t.Errorf("%d rows are done by the kernel for %d, want %d", rows, got, want)
		}
	}
}
