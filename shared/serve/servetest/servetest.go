// Package servetest has what tests of servers share.
package servetest

import (
	"net"
	"sync"
	"testing"

	"meridian.internal/shared/ports"
)

// Addr is an address of loopback that is the test's until it ends: a server can start there later, and again.
func Addr(t testing.TB) string {
	t.Helper()
	const host = "127.0.0.1"
	kept, release, err := ports.Keep(host, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return net.JoinHostPort(host, kept[0])
}

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
