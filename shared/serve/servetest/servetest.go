// Package servetest has what tests of servers share.
package servetest

import (
	"net"
	"sync"
)

// Pipes is a listener of connections in memory, whose deadlines are those of a test's bubble.
type Pipes struct {
	Conns chan net.Conn
	once  sync.Once
}

// Accept is net.Listener's.
func (p *Pipes) Accept() (net.Conn, error) {
	c, ok := <-p.Conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}

// Close is net.Listener's.
func (p *Pipes) Close() error { p.once.Do(func() { close(p.Conns) }); return nil }

// Addr is net.Listener's.
func (p *Pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }
