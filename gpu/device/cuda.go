//go:build cuda

package device

import (
	"os"
	"path/filepath"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cuda"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/clock"
)

// cudaBuilt tells whether this program has the back end for NVIDIA cards. It is a build tag's matter because its binding
// makes the program depend on the system's C library.
const cudaBuilt = true

func openCUDA(o Options, m *model.Model, p part, room room, now func() int64) (backend.Backend, cardClock, error) {
	cache := o.KernelCache
	if cache == "" {
		if dir, err := os.UserCacheDir(); err == nil { // without a home folder nothing is kept
			cache = filepath.Join(dir, "meridian", "kernels")
		}
	}
	b, err := cuda.New(m, cuda.Options{
		GPU: p.card, Stage: p.stage, TokensPerBlock: o.TokensPerBlock, KVBlocks: room.blocks, WindowBlocks: room.windows, MaxSlots: o.MaxBatchSize, MaxTokens: o.MaxNumTokens,
		MemoryFraction: p.share, Deterministic: o.Deterministic, NarrowWeights: o.WeightType == fp8, NarrowKV: o.KVType == fp8, CacheDir: cache, Now: now,
	})
	if err != nil {
		return nil, nil, err
	}
	return b, func() (clock.Estimate, bool) {
		s, ok := b.Clock()
		return s.Estimate, ok
	}, nil
}
