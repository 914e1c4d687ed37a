//go:build cuda

package device

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cuda"
	"meridian.internal/gpu/model"
)

// cudaBuilt tells whether this program has the back end for NVIDIA cards. It is a build tag's matter because its binding
// makes the program depend on the system's C library.
const cudaBuilt = true

func openCUDA(o Options, m *model.Model, blocks int, now func() int64) (backend.Backend, error) {
	return cuda.New(m, cuda.Options{
		GPU: o.GPU, TokensPerBlock: o.TokensPerBlock, KVBlocks: blocks, MaxSlots: o.MaxBatchSize, Deterministic: o.Deterministic, Now: now,
	})
}
