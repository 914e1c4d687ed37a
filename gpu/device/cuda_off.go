//go:build !cuda

package device

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

const cudaBuilt = false

// openCUDA is never reached: Validate refuses the device first.
func openCUDA(Options, *model.Model, part, room, func() int64) (backend.Backend, cardClock, error) {
	return nil, nil, ErrUnavailable
}
