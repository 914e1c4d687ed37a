//go:build !linux

package h1

import "errors"

type watch struct{}

type leaves struct{}

// errUnsupported sends every connection on to net/http.
var errUnsupported = errors.New("h1: no way to see clients leave on this system")

func (*leaves) add(*conn) error { return errUnsupported }
func (*leaves) remove(*conn)    {}
func (*leaves) close() error    { return nil }
