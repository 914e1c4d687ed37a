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
	nc := cn.Conn
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return true
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Read(func(fd uintptr) bool {
		var one [1]byte
		_, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = errors.Is(err, syscall.EAGAIN)
		return true // never wait
	})
	return err == nil && quiet
}
