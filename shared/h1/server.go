package h1

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/shared/poll"
	"meridian.internal/shared/sock"
)

// Options of a server. Handler, Other and the times are required.
type Options struct {
	Handler http.Handler
	// Other takes over a connection for good. It begins with what was read of its request already.
	Other      func(net.Conn)
	Closed     func()        // a connection was closed here; nil: nobody asks
	HeaderTime time.Duration // from the connection's or the head's first byte to the head's last
	IdleTime   time.Duration // between two requests, at most; half of it at least. Also of a write, where the handler sets no deadline
	MaxHead    int           // bytes
	Logger     *slog.Logger  // of handlers that panic; nil: slog.Default()
}

// Server serves connections that it is given. Safe for concurrent use. A nil one has none to drain or to close.
type Server struct {
	o      Options
	leaves poll.Loop       // sees which clients have left, while nobody reads from their connections
	base   context.Context // of all requests, so that the end of the grace time reaches them
	cut    context.CancelFunc
	gone   sync.WaitGroup // connections that are served

	mu       sync.Mutex // guards what follows
	conns    map[*conn]struct{}
	draining bool
}

// New makes a server whose requests end with ctx.
func New(ctx context.Context, o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s := &Server{o: o, conns: map[*conn]struct{}{}}
	s.base, s.cut = context.WithCancel(ctx)
	return s
}

// Serve serves c until it ends or is handed over.
func (s *Server) Serve(nc net.Conn) {
	c := &conn{s: s, Conn: sock.New(nc), remote: nc.RemoteAddr().String()}
	if !s.add(c) {
		_ = nc.Close()
		s.closed()
		return
	}
	defer s.gone.Done()
	c.ctx, c.leave = context.WithCancel(context.WithValue(s.base, http.LocalAddrContextKey, nc.LocalAddr()))
	c.restFn = c.rest
	c.blank = (&http.Request{Method: http.MethodPost, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, RemoteAddr: c.remote}).WithContext(c.ctx)
	var rest []byte
	handOver := true
	if err := c.watch(); err != nil { // nobody would tell it that its client has left
		s.o.Logger.Debug("left to net/http", "client", c.remote, "error", err)
	} else {
		rest, handOver = c.serve()
	}
	c.watched.Stop()
	c.leave()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	if handOver {
		_ = nc.SetDeadline(time.Time{})
		s.o.Other(&prefixed{Conn: nc, rest: rest})
		return
	}
	_ = nc.Close()
	s.closed()
}

func (s *Server) closed() {
	if s.o.Closed != nil {
		s.o.Closed()
	}
}

func (s *Server) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.conns[c] = struct{}{}
	s.gone.Add(1)
	return true
}

// Drain closes the connections that wait for a request, and lets those that serve one end with it. It returns ctx's error when
// some still serve at its end.
func (s *Server) Drain(ctx context.Context) error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	s.draining = true
	for c := range s.conns {
		if c.state.Swap(stopping) == waiting {
			_ = c.Close()
		}
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { s.gone.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close closes all connections, and what the server holds.
func (s *Server) Close() error {
	if s == nil {
		return nil
	}
	s.cut()
	s.mu.Lock()
	s.draining = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	return s.leaves.Close()
}

// States of a connection.
const (
	waiting  int32 = iota // for the first byte of a request
	serving               // a request
	stopping              // it serves its last one
)

// conn is one connection; its goroutine alone uses it, but for state, Close and leave.
type conn struct {
	*sock.Conn
	s       *Server
	remote  string
	ctx     context.Context    // of the connection: ends when the client has left
	leave   context.CancelFunc // its end
	watched *poll.Watch        // nil: it has no socket
	state   atomic.Int32
	idleBy  time.Time // read deadline of the wait for a request
	served  bool      // a request came before
	rests   bool      // it waits for the next, or may
	restFn  func() bool
	head    head
	body    body
	blank   *http.Request // what requests are made of: it has the connection's context
	req     http.Request
	url     url.URL
	res     response
}

// watch has the connection told that its client has left. One without a socket, as tests have, is not watched.
func (c *conn) watch() (err error) {
	if c.Raw() != nil {
		c.watched, err = c.s.leaves.Watch(c.Raw(), poll.Left, func() bool { c.leave(); return false })
	}
	return err
}

// serve serves requests. handOver: what follows, beginning with rest, is for another server.
func (c *conn) serve() (rest []byte, handOver bool) {
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the value itself is the signal, as in net/http
			c.s.o.Logger.Error("handler panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
	}()
	for {
		if !c.await() {
			return nil, false
		}
		switch err := c.readHead(); {
		case errors.Is(err, errOther):
			return append([]byte(nil), c.Buffered()...), true
		case errors.Is(err, errHead):
			c.refuse("400 Bad Request")
			return nil, false
		case errors.Is(err, errTooLarge):
			c.refuse("431 Request Header Fields Too Large")
			return nil, false
		case err != nil:
			return nil, false
		}
		if !c.request() {
			return nil, false
		}
	}
}

// await waits for the first bytes of a request.
func (c *conn) await() bool {
	if len(c.Buffered()) == 0 {
		if !c.served {
			c.ReadBy(time.Now().Add(c.s.o.HeaderTime))
		}
		if c.Fill() != nil {
			return false
		}
	}
	return c.state.CompareAndSwap(waiting, serving)
}

// idle bounds the wait for the next request.
func (c *conn) idle() {
	if now := time.Now(); c.idleBy.Sub(now) < c.s.o.IdleTime/2 { // setting it costs more than the rest of the wait
		c.idleBy = now.Add(c.s.o.IdleTime)
	}
	c.ReadBy(c.idleBy)
}

// rest is called when an answer that another request may follow is written.
func (c *conn) rest() bool {
	c.res.drop() // it may be long until then
	c.rests = c.state.CompareAndSwap(serving, waiting)
	return c.rests
}

var errTooLarge = errors.New("h1: head too large")

func (c *conn) readHead() error {
	for first := true; ; first = false {
		n, err := parseHead(c.Buffered(), &c.head)
		if err != nil {
			return err
		}
		if size := cmp.Or(n, len(c.Buffered())); size > c.s.o.MaxHead {
			return errTooLarge
		}
		if n > 0 {
			c.Discard(n)
			return nil
		}
		if first && c.served {
			c.ReadBy(time.Now().Add(c.s.o.HeaderTime))
		}
		if err := c.Fill(); err != nil {
			return err
		}
	}
}

func (c *conn) refuse(status string) {
	c.WriteBy(time.Now().Add(c.s.o.HeaderTime))
	if _, err := fmt.Fprintf(c.Conn, "HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n%s", status, status); err == nil {
		c.linger()
	}
}

// request runs the handler; false: no further request is served.
func (c *conn) request() bool {
	c.served = true
	c.ReadBy(time.Time{})
	c.body = body{c: c, left: c.head.length}
	c.s.o.Handler.ServeHTTP(&c.res, c.res.begin(c))
	keep := c.res.end()
	c.body.c = nil // a handler that still reads gets nothing of the next request
	if !keep {
		_ = c.res.flush(c.Write)
		if c.body.left > 0 {
			c.linger()
		}
		return false
	}
	c.idle()
	c.rests = false
	err := c.res.flush(c.last)
	c.WriteBy(time.Time{})
	return err == nil && (c.rests || c.rest()) // nothing may have been left to write
}

// last writes the end of an answer and waits for the next request.
func (c *conn) last(p []byte) (int, error) {
	if err := c.WriteLast(p, c.restFn); err != nil {
		return 0, err
	}
	return len(p), nil
}

const (
	lingerTime = 500 * time.Millisecond
	lingerMax  = 1 << 20 // bytes
)

// linger lets a client that still sends read the answer: closing at once could take it away from it.
func (c *conn) linger() {
	if t, ok := c.Conn.Conn.(*net.TCPConn); !ok || t.CloseWrite() != nil {
		return
	}
	c.ReadBy(time.Now().Add(lingerTime))
	for n := 0; n < lingerMax; n += len(c.Buffered()) {
		c.Discard(len(c.Buffered()))
		if c.Fill() != nil {
			return
		}
	}
}

// prefixed is a connection some of whose bytes were read already.
type prefixed struct {
	net.Conn
	rest []byte
}

// Read is net.Conn's.
func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		return p.Conn.Read(b)
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}
