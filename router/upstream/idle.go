package upstream

import (
	"crypto/tls"
	"errors"
	"net"
	"syscall"
)

// alive tells whether an idle connection can carry a request: the other side has neither closed it nor said anything.
// Without the look a request could be lost on a connection that the node closed long ago, and sending it again is no
// way out: the node may have taken it, and the hand-over of its KV is for one consumer.
func (cn *conn) alive() bool {
	if cn.socket == nil {
		return true
	}
	cn.quiet = false
	return cn.socket.Read(cn.look) == nil && cn.quiet
}

// look is for RawConn.Read; it never waits.
func (cn *conn) look(fd uintptr) bool {
	var one [1]byte
	_, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	cn.quiet = errors.Is(err, syscall.EAGAIN)
	return true
}

// socketOf is the socket under a connection; nil: none.
func socketOf(nc net.Conn) syscall.RawConn {
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	if tcp, ok := nc.(*net.TCPConn); ok {
		if raw, err := tcp.SyscallConn(); err == nil {
			return raw
		}
	}
	return nil
}
