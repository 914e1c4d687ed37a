//go:build !cuda

package device

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/clock"
)

const cudaBuilt = false

// openCUDA is never reached: Validate refuses the device first.
func openCUDA(Options, *model.Model, int, func() int64) (backend.Backend, func() (clock.Estimate, bool), error) {
	return nil, nil, ErrUnavailable
}
