//go:build !linux

package sim

import (
	"errors"
	"time"
)

type timer struct{}

func newTimer() (*timer, error) { return nil, errors.ErrUnsupported }

func (*timer) sleep(time.Duration) {}

func (*timer) close() error { return nil }
