package serve

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultMaxConns bounds the connections of a server: each costs a goroutine and what its requests hold.
const DefaultMaxConns = 16384

// limit closes connections beyond its maximum at once: a client that is told so can go elsewhere, one that waits in the
// kernel's queue cannot.
type limit struct {
	max  int64
	open atomic.Int64
}

// take counts a connection; false: it is one too many, and was closed.
func (l *limit) take(c net.Conn) bool {
	if l.open.Add(1) > l.max {
		l.open.Add(-1)
		_ = c.Close()
		return false
	}
	return true
}

func (l *limit) closed() { l.open.Add(-1) }

// state is a http.Server's ConnState.
func (l *limit) state(c net.Conn, s http.ConnState) {
	switch s {
	case http.StateClosed, http.StateHijacked:
		l.closed()
	case http.StateIdle:
		_ = c.SetWriteDeadline(time.Time{}) // that a handler set is not the next one's
	}
}

// bounded is a connection whose writes end after idleTimeout where the handler sets no deadline: a client that reads nothing
// holds it no longer than one that says nothing.
type bounded struct {
	net.Conn
	set atomic.Bool // by the handler
}

// SetWriteDeadline is net.Conn's.
func (b *bounded) SetWriteDeadline(t time.Time) error {
	b.set.Store(!t.IsZero())
	return b.Conn.SetWriteDeadline(t)
}

// Write is net.Conn's.
func (b *bounded) Write(p []byte) (int, error) {
	if !b.set.Load() {
		if err := b.Conn.SetWriteDeadline(time.Now().Add(idleTimeout)); err != nil {
			return 0, err
		}
	}
	return b.Conn.Write(p)
}

// boundedListener is one below TLS.
type boundedListener struct{ net.Listener }

// Accept is net.Listener's.
func (l boundedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &bounded{Conn: c}, nil
}

const (
	acceptPause    = 5 * time.Millisecond // after an error that may pass, as too many open files
	acceptPauseMax = time.Second
)

// accept gives each connection to a goroutine of its own, until ctx ends or the listener fails.
func (s *Server) accept(ctx context.Context, l *limit, serve func(net.Conn)) error {
	for wait := acceptPause; ; {
		c, err := s.listener.Accept()
		var passing net.Error
		switch {
		case err == nil:
			wait = acceptPause
			if l.take(c) {
				go serve(c)
			}
			continue
		case ctx.Err() != nil:
			return nil
		case !errors.As(err, &passing) || !passing.Timeout() && !temporary(err):
			return err
		}
		s.o.Logger.Warn("connections are not accepted for a moment", "error", err, "pause", wait)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(2*wait, acceptPauseMax)
	}
}

// temporary is what net/http asks too.
func temporary(err error) bool {
	var t interface{ Temporary() bool }
	return errors.As(err, &t) && t.Temporary()
}

// fed is a listener of connections that were accepted elsewhere.
type fed struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newFed(addr net.Addr) *fed {
	return &fed{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// give hands a connection over.
func (f *fed) give(c net.Conn) {
	select {
	case f.conns <- c:
	case <-f.closed:
		_ = c.Close()
	}
}

// Accept is net.Listener's.
func (f *fed) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

// Close is net.Listener's.
func (f *fed) Close() error { f.once.Do(func() { close(f.closed) }); return nil }

// Addr is net.Listener's.
func (f *fed) Addr() net.Addr { return f.addr }
