//go:build unix

package kvwire

import (
	"crypto/tls"
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// silent tells whether a connection is open with nothing to read: an idle one that has bytes or an end is not usable.
func silent(c net.Conn) bool {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn() // its sender writes nothing by itself: no session tickets
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return true // no descriptor to ask, as in tests over pipes
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = errors.Is(err, unix.EAGAIN)
		return true
	})
	return err == nil && quiet
}
