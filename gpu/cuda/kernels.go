//go:build cuda

package cuda

import (
	_ "embed" // the kernels' source
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

var (
	//go:embed kernels/common.cuh
	commonSource string
	//go:embed kernels/layer.cu
	layerSource string
	//go:embed kernels/attention.cu
	attentionSource string
	//go:embed kernels/eight.cuh
	eightHeader string
	//go:embed kernels/eight.cu
	eightSource string
	//go:embed kernels/tensor.cuh
	tensorSource string
	//go:embed kernels/prefill.cu
	prefillSource string
	//go:embed kernels/hopper.cuh
	hopperHeader string
	//go:embed kernels/feed.cuh
	feedHeader string
	//go:embed kernels/hopper.cu
	hopperSource string
	//go:embed kernels/decode.cu
	decodeSource string
	//go:embed kernels/thin.cu
	thinSource string
	//go:embed kernels/products.cu
	productsSource string
	//go:embed kernels/sample.cu
	sampleSource string
)

// maxTop is how many log probabilities a token may carry.
const maxTop = 32

// features are the kernels that a card has for a model.
type features struct {
	hopper  bool // attention of many query tokens by sm_90a's matrix instructions
	tiled   bool // attention of many query tokens on tensor cores, by these or those of sm_80
	grouped bool // attention of one query token on tensor cores
	thin    bool // fused products of few rows
	split   bool // fused products of up to 64 rows, for sm_90
	turned  bool // rope handles eight pairs a thread
	kv8     bool // KV has eight bits
	narrow  bool // matrices of layers have eight bits a weight
	eight   bool // products with them of 9 to 256 rows, for sm_90
}

// featuresOf must say the same as the conditions in the kernels' source. narrow asks for weights of eight bits.
func featuresOf(arch int, c *model.Config, kvType string, narrow bool) features {
	bf16 := kvType != "f32"
	wide := bf16 && !narrow // all weights have sixteen bits
	tensor := bf16 && (c.HeadSize == 64 || c.HeadSize == 128)
	return features{
		hopper: tensor && arch == 90, tiled: tensor, grouped: tensor && c.Heads/c.KVHeads <= 16,
		narrow: narrow, eight: narrow && tensor && arch == 90, kv8: kvType == narrowType, thin: wide && c.HeadSize%16 == 0 && c.Hidden%16 == 0 && c.Intermediate%8 == 0,
		split:  tensor && arch == 90 && wide && c.Hidden%64 == 0 && c.Heads*c.HeadSize%64 == 0 && c.Intermediate%64 == 0,
		turned: bf16 && (c.HeadSize == 32 || c.HeadSize == 64 || c.HeadSize == 128 || c.HeadSize == 256),
	}
}

// consumers is the number of groups of 64 query tokens in a tile of Hopper's prefill kernel.
func consumers(headSize int) int {
	if headSize == 64 {
		return 3
	}
	return 2
}

// tileRows is how many query tokens a tile of the prefill kernel holds; 0: there is no such kernel.
func (f features) tileRows(headSize int) int {
	switch {
	case f.hopper:
		return 64 * consumers(headSize)
	case f.tiled:
		return 128
	}
	return 0
}

// Bytes of dynamic shared memory, as in the kernels' source.

const thinShared = 8 * 5 * 2048 // RING of kernels/thin.cu

// groupShared is four rings of kernels/decode.cu, of so many tiles.
func groupShared(headSize, depth int) int { return 4 * depth * 4 * 16 * headSize }

const groupDepth, fewDepth = 3, 6

// hopperShared is what Hopper's prefill kernel needs: a tile of Q, stages of K and V, and room to align them.
func hopperShared(headSize int) int {
	stages := 2
	if headSize == 64 {
		stages = 4
	}
	return 2*headSize*(64*consumers(headSize)+stages*2*128) + 1024
}

// productShape is a kernel of kernels/products.cu: for up to so many rows, with rings of so many stages.
type productShape struct{ rows, split, pair int }

var productShapes = []productShape{{16, 10, 10}, {32, 8, 6}, {64, 5, 5}}

// productShapeOf is the one for a number of rows.
func productShapeOf(rows int) productShape {
	i := slices.IndexFunc(productShapes, func(s productShape) bool { return rows <= s.rows })
	return productShapes[i]
}

// splitShared is a ring of 64 outputs and of the rows, 64 of k each, and room to align it; pairShared likewise, of twice 64 outputs.
func (s productShape) splitShared() int { return s.split*128*(64+s.rows) + 1024 }
func (s productShape) pairShared() int  { return s.pair*128*(2*64+s.rows) + 1024 }

// eightShape is a product8Split of kernels/eight.cu: of so many rows, with a ring of so many stages, of which a multiprocessor has so many blocks
// at a time.
type eightShape struct{ rows, slots, blocks int }

var eightShapes = []eightShape{{16, 5, 2}, {32, 4, 2}, {64, 3, 2}, {128, 4, 1}}

// eightShapeOf is the one for a number of rows: the last one takes them a part at a time.
func eightShapeOf(rows int) eightShape {
	i := slices.IndexFunc(eightShapes, func(s eightShape) bool { return rows <= s.rows })
	if i < 0 {
		i = len(eightShapes) - 1
	}
	return eightShapes[i]
}

// shared is a ring of twice 64 outputs in eight bits and of the rows, 128 of k each, and room to align it.
func (s eightShape) shared() int { return s.slots*128*(2*64+2*s.rows) + 1024 }

// box is how many tokens of a KV block the copy engine brings at a time to the prefill kernel; 0: threads copy.
func (f features) box(perBlock int) int {
	if !f.hopper || f.kv8 { // what has eight bits is widened on its way
		return 0
	}
	return boxTokens(perBlock)
}

// boxTokens is how many tokens of a KV block the copy engine brings at a time; 0: blocks are not made for it.
func boxTokens(perBlock int) int {
	const keys = 128 // of a step
	if perBlock%8 == 0 && (keys%perBlock == 0 || perBlock%keys == 0) {
		return min(perBlock, keys)
	}
	return 0
}

// names are the kernels, with the bytes of dynamic shared memory that each may use.
func (f features) names(headSize int) map[string]int {
	out := map[string]int{}
	for _, name := range []string{
		"stamp", "mailbox", "embed", "rmsNorm", "rope", "gated", "product", "moveKV", "pullKV", "copyBlocks", "attend", "combine", "peaks", "choose", "assign", "vector",
	} {
		out[name] = 0
	}
	switch {
	case f.hopper:
		out["prefill"] = hopperShared(headSize)
	case f.tiled:
		out["prefill"] = 0
	}
	if f.grouped {
		out["attendGroup"], out["attendFew"] = groupShared(headSize, groupDepth), groupShared(headSize, fewDepth)
	}
	if f.kv8 {
		out["kvScales"] = 0
	}
	if f.narrow {
		out["narrowWeights"], out["widenWeights"], out["product8x8"], out["product8x16"] = 0, 0, eightShared, eightShared
		out["product8x32"], out["product8x64"] = manyShared, manyShared
	}
	if f.eight {
		for _, s := range eightShapes {
			out[fmt.Sprint("product8Split", s.rows)] = s.shared()
		}
	}
	if f.split {
		for _, s := range productShapes {
			out[fmt.Sprint("splitAdd", s.rows)], out[fmt.Sprint("splitPlain", s.rows)] = s.splitShared(), s.splitShared()
			out[fmt.Sprint("pair", s.rows)] = s.pairShared()
		}
	}
	if f.thin {
		out["embedThin"] = 0
		kinds := []string{"thinGate", "thinAdd", "thinPlain"}
		if !f.kv8 {
			kinds = append(kinds, "thinRotate")
		}
		for _, kind := range kinds {
			out[kind+"8"], out[kind+"16"] = thinShared, thinShared
		}
	}
	return out
}

// source is all kernels for one model, its shape as macros.
func source(c *model.Config, info backend.Info, f features) string {
	number := func(b bool) int {
		if b {
			return 1
		}
		return 0
	}
	var b strings.Builder
	for _, m := range []struct {
		name  string
		value any
	}{
		{"BF16", number(info.KVType != "f32")}, {"KV8", number(f.kv8)}, {"HOPPER", number(f.hopper)}, {"HIDDEN", c.Hidden}, {"HEADS", c.Heads},
		{"KVHEADS", c.KVHeads}, {"HS", c.HeadSize}, {"INTER", c.Intermediate}, {"VOCAB", c.Vocab}, {"BLOCK_TOKENS", info.TokensPerBlock},
		{"BOX", f.box(info.TokensPerBlock)}, {"EPS", c.NormEps}, {"MAXTOP", maxTop},
	} {
		fmt.Fprintf(&b, "#define %s %v\n", m.name, m.value)
	}
	for _, s := range []string{
		commonSource, eightHeader, layerSource, attentionSource, tensorSource, prefillSource, hopperHeader, feedHeader, hopperSource, decodeSource, thinSource, productsSource, eightSource, sampleSource,
	} {
		b.WriteString(s)
	}
	return b.String()
}

// kernels is the loaded module.
type kernels struct {
	module uintptr
	calls  map[string]uintptr
	has    features
}

// load makes the kernels for the card and the model: from the cache where they are there, otherwise by compiling them.
func (c *context) load(m *model.Config, info backend.Info, o Options) (*kernels, error) {
	f := featuresOf(c.arch, m, info.KVType, o.NarrowWeights)
	option := fmt.Sprintf("--gpu-architecture=sm_%d", c.arch)
	if f.hopper {
		option += "a" // wgmma and setmaxnreg are not in plain sm_90
	}
	binary, err := c.cached(o.CacheDir, source(m, info, f), option)
	if err != nil {
		return nil, err
	}
	k := &kernels{calls: map[string]uintptr{}, has: f}
	if err := c.do("cuModuleLoadData", uintptr(unsafe.Pointer(&k.module)), uintptr(unsafe.Pointer(&binary[0]))); err != nil {
		return nil, err
	}
	for name, shared := range f.names(m.HeadSize) {
		var call uintptr
		z := append([]byte(name), 0)
		if err := c.do("cuModuleGetFunction", uintptr(unsafe.Pointer(&call)), k.module, uintptr(unsafe.Pointer(&z[0]))); err != nil {
			return nil, fmt.Errorf("kernel %s: %w", name, err)
		}
		k.calls[name] = call
		const maxDynamicShared = 8    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
		const carveout, most = 9, 100 // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, %
		// All kernels want the same split between cache and shared memory: a multiprocessor that changes it must be idle, and
		// blocks of two kernels could not be on it together.
		if err := c.do("cuFuncSetAttribute", call, carveout, most); err != nil {
			return nil, fmt.Errorf("kernel %s: split of shared memory: %w", name, err)
		}
		if shared > 0 {
			if err := c.do("cuFuncSetAttribute", call, maxDynamicShared, uintptr(shared)); err != nil {
				return nil, fmt.Errorf("kernel %s: %d bytes of shared memory: %w", name, shared, err)
			}
		}
	}
	return k, nil
}
