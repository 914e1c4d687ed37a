// Package upstream is the router's HTTP/1.1 client towards nodes. It owns connections: it keeps them open between requests,
// and closes one the moment its request is cancelled, so that the node hears of it within one round trip. It exists
// because net/http's client costs three goroutine switches and a header map a request; it does not follow redirects,
// keep cookies, speak HTTP/2 or use proxies.
package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"meridian.internal/shared/sock"
)

var (
	// ErrProtocol is returned when an answer is no HTTP/1.1 that this client understands.
	ErrProtocol = errors.New("upstream: malformed answer")
	// ErrNotSent is returned when no byte of the request has left: the node could not be reached.
	ErrNotSent = errors.New("upstream: not sent")
	// ErrTarget is returned when a URL cannot be spoken to.
	ErrTarget = errors.New("upstream: bad target")
)

// Options of a client. The zero value has the defaults.
type Options struct {
	DialTimeout time.Duration // default 1 s
	IdleTimeout time.Duration // idle connections are closed after this; default 5 s, far below the nodes' own limit
	MaxIdle     int           // idle connections kept for each host; default 512
	TLS         *tls.Config

	Authorization string // header for nodes of the cluster, without line ends; "": none
}

// Client keeps connections for each host. Safe for concurrent use.
type Client struct {
	o Options

	mu      sync.Mutex       // guards all of these
	hosts   map[string]*host // by URL; those with idle connections stay
	sweeper *time.Timer      // runs while there are idle connections
	shut    bool

	buffers sync.Pool // of *[]byte: requests before they are written
}

// host is where a URL leads.
type host struct {
	*url.URL
	target string
	// Guarded by the client's mutex:
	idle   []*conn // the most recently used last
	unused bool    // no connection was idle at the last sweep
}

const keepBuffer = 1 << 20 // larger ones are left to the collector

func (c *Client) getBuffer() *[]byte {
	if b, ok := c.buffers.Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, 0, 4<<10)
	return &b
}

func (c *Client) putBuffer(b *[]byte) {
	if cap(*b) <= keepBuffer {
		c.buffers.Put(b)
	}
}

// New makes a client.
func New(o Options) *Client {
	if o.DialTimeout == 0 {
		o.DialTimeout = time.Second
	}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 5 * time.Second
	}
	if o.MaxIdle == 0 {
		o.MaxIdle = 512
	}
	return &Client{o: o, hosts: map[string]*host{}}
}

// Request is one request with a body of known length.
type Request struct {
	Method  string // default POST
	URL     string // http://host:port without a path
	Path    string
	Header  []byte   // further lines, each with its line end; the caller vouches for them
	Body    [][]byte // pieces, in their order
	Tail    []byte   // sent after Body; together they are the body
	Foreign bool     // the node is none of the cluster: it does not get Options.Authorization
}

// copyBelow is the size up to which a body is copied behind its head: one write of one piece is cheaper then.
const copyBelow = 16 << 10

func (r *Request) length() int {
	n := len(r.Tail)
	for _, piece := range r.Body {
		n += len(piece)
	}
	return n
}

type conn struct {
	*sock.Conn
	host  *host
	cut   func() // closes it: what the end of a request's context does
	used  bool
	since time.Time // idle since
}

// Do sends a request and reads the head of the answer. ctx bounds the whole exchange, the body included: when it ends, the
// connection is closed at once. The caller closes the response.
func (c *Client) Do(ctx context.Context, req *Request) (*Response, error) {
	h, err := c.host(req.URL)
	if err != nil {
		return nil, err
	}
	buf := c.getBuffer()
	defer c.putBuffer(buf)
	*buf = c.appendHead((*buf)[:0], h.Host, req)
	small := req.length() <= copyBelow
	if small {
		for _, piece := range req.Body {
			*buf = append(*buf, piece...)
		}
		*buf = append(*buf, req.Tail...)
	}
	send := func(cn *conn) error { // again on another connection, if need be
		if small {
			return cn.Ask(*buf)
		}
		return cn.WriteAll(append(append([][]byte{*buf}, req.Body...), req.Tail))
	}
	for {
		cn := c.take(h)
		if cn == nil {
			if cn, err = c.dialApart(ctx, h); err != nil {
				return nil, fmt.Errorf("%w: dial %s: %w", ErrNotSent, h.Host, withCause(ctx, err))
			}
		}
		res, err := c.exchange(ctx, cn, send)
		if err == nil {
			return res, nil
		}
		// A kept connection that was closed by the other side meanwhile refuses the write: the request was not taken.
		if cn.used && errors.Is(err, errNotWritten) && ctx.Err() == nil {
			continue
		}
		return nil, fmt.Errorf("%s %s%s: %w", req.method(), req.URL, req.Path, withCause(ctx, err))
	}
}

// host finds or makes what is known of a URL.
func (c *Client) host(target string) (*host, error) {
	c.mu.Lock()
	h := c.hosts[target]
	c.mu.Unlock()
	if h != nil {
		return h, nil
	}
	u, err := url.Parse(target)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("%w %q: want http://host:port", ErrTarget, target)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hosts[target] == nil {
		c.hosts[target] = &host{URL: u, target: target}
	}
	return c.hosts[target], nil
}

func (r *Request) method() string {
	if r.Method == "" {
		return "POST"
	}
	return r.Method
}

// withCause prefers the reason for which ctx ended over the error that this produced.
func withCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (c *Client) appendHead(b []byte, host string, req *Request) []byte {
	b = append(b, req.method()...)
	b = append(b, ' ')
	b = append(b, req.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, host...)
	if req.length() > 0 || req.method() == "POST" {
		b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
		b = strconv.AppendInt(b, int64(req.length()), 10)
	}
	if c.o.Authorization != "" && !req.Foreign {
		b = append(append(b, "\r\nAuthorization: "...), c.o.Authorization...)
	}
	return append(append(append(b, "\r\n"...), req.Header...), "\r\n"...)
}

// dialApart dials on a goroutine of its own, whose stack goes with it: the request's would stay twice as large as it needs to
// be for as long as it streams.
func (c *Client) dialApart(ctx context.Context, h *host) (cn *conn, err error) {
	var wait sync.WaitGroup
	wait.Go(func() { cn, err = c.dial(ctx, h) })
	wait.Wait()
	return cn, err
}

func (c *Client) dial(ctx context.Context, u *host) (*conn, error) {
	d := net.Dialer{Timeout: c.o.DialTimeout}
	addr := u.Host
	if u.Port() == "" {
		addr = net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	}
	var nc net.Conn
	var err error
	if u.Scheme == "https" {
		td := tls.Dialer{NetDialer: &d, Config: c.o.TLS}
		nc, err = td.DialContext(ctx, "tcp", addr)
	} else {
		nc, err = d.DialContext(ctx, "tcp", addr)
	}
	if err != nil {
		return nil, err
	}
	cn := &conn{Conn: sock.New(nc), host: u}
	cn.cut = func() { _ = cn.Close() }
	return cn, nil
}

var (
	errNotWritten = errors.New("connection closed before the request was written")
	errNoAnswer   = errors.New("connection closed before an answer")
)

func (c *Client) exchange(ctx context.Context, cn *conn, send func(*conn) error) (*Response, error) {
	stop := context.AfterFunc(ctx, cn.cut)
	fail := func(err error) (*Response, error) {
		stop()
		_ = cn.Close()
		return nil, err
	}
	if err := send(cn); err != nil {
		return fail(fmt.Errorf("%w: %w", errNotWritten, err))
	}
	if err := cn.Fill(); err != nil {
		return fail(fmt.Errorf("%w: %w", errNoAnswer, err))
	}
	res := &Response{client: c, conn: cn, ctx: ctx, stop: stop}
	if err := res.readHead(); err != nil {
		return fail(err)
	}
	return res, nil
}

// take returns an idle connection, the most recently used first, so that surplus ones age. It looks whether the node has
// closed it: a request could be lost on one that is closed, and sending it again is no way out, since the node may have taken
// it and the hand-over of its KV is for one consumer. The mutex is not held for these calls into the system.
func (c *Client) take(h *host) *conn {
	for {
		cn := c.newest(h)
		if cn == nil {
			return nil
		}
		if idle := time.Since(cn.since); idle < fresh || idle < c.o.IdleTimeout && cn.Quiet() {
			return cn
		}
		_ = cn.Close()
	}
}

// newest takes out the idle connection that was used last; nil: there is none.
func (c *Client) newest(h *host) *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(h.idle)
	if n == 0 {
		return nil
	}
	cn := h.idle[n-1]
	h.idle[n-1] = nil
	h.idle = h.idle[:n-1]
	return cn
}

// fresh is a connection that ended a request so lately: what the other side could have done meanwhile it could as well do after a
// look.
const fresh = time.Millisecond

func (c *Client) put(cn *conn) {
	cn.Release()
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.hosts[cn.host.target]
	if h == nil { // swept while the request ran
		h = cn.host
		c.hosts[h.target] = h
	}
	if c.shut || len(h.idle) >= c.o.MaxIdle {
		_ = cn.Close()
		return
	}
	cn.host, cn.used, cn.since = h, true, time.Now()
	h.idle = append(h.idle, cn)
	if c.sweeper == nil {
		c.sweeper = time.AfterFunc(c.o.IdleTimeout, c.sweep)
	}
}

// sweep closes what is idle for too long, so that a burst does not keep its connections, here and on the nodes. The oldest
// of a host is at the front of its list.
func (c *Client) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := false
	for target, h := range c.hosts {
		n := 0
		for n < len(h.idle) && time.Since(h.idle[n].since) >= c.o.IdleTimeout {
			_ = h.idle[n].Close()
			n++
		}
		h.idle = slices.Delete(h.idle, 0, n)
		if len(h.idle) > 0 {
			left = true
		} else if h.unused {
			delete(c.hosts, target) // nodes come and go
		}
		h.unused = len(h.idle) == 0
	}
	if c.sweeper = nil; left && !c.shut {
		c.sweeper = time.AfterFunc(c.o.IdleTimeout, c.sweep)
	}
}

// Idle counts the idle connections.
func (c *Client) Idle() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, h := range c.hosts {
		n += len(h.idle)
	}
	return n
}

// Close closes the idle connections; those in use are closed when their responses are.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = true
	if c.sweeper != nil {
		c.sweeper.Stop()
	}
	for _, h := range c.hosts {
		for _, cn := range h.idle {
			_ = cn.Close()
		}
	}
	clear(c.hosts)
}

var _ io.ReadCloser = (*Response)(nil)
