//go:build !linux

// Package shuttle carries packets between two TUN devices; it is for Linux.
package shuttle

import (
	"errors"
	"os"
	"time"
)

// Path is one direction.
type Path struct {
	Delay, Jitter time.Duration
	Loss          float64
}

// Open fails: there are no TUN devices of this kind.
func Open(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// Start does nothing.
func Start(_, _ *os.File, _, _ Path) (stop func()) { return func() {} }
