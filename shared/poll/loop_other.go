//go:build !linux

package poll

import "syscall"

// Loop cannot wait for sockets here.
type Loop struct{}

// Watch is a socket that is watched: there is none.
type Watch struct{}

// Watch returns ErrUnsupported.
func (*Loop) Watch(syscall.RawConn, Event, func() bool) (*Watch, error) { return nil, ErrUnsupported }

// Stop does nothing.
func (*Watch) Stop() {}

// Close does nothing.
func (*Loop) Close() error { return nil }
