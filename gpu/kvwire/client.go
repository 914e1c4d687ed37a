package kvwire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"meridian.internal/gpu/backend"
)

// ClientOptions configure the receiving side.
type ClientOptions struct {
	Hello   Hello
	Epoch   uint64 // incarnation of this process, in every frame
	MaxIdle int    // kept connections of one peer; default 64
	Timing  Timing
	Attach  func(backend.Shared) (backend.Attached, error) // opens the KV of a sender on this host; nil: all KV comes by TCP
	Buffers Buffers                                        // memory of KV frames; nil: Go's
	Key     []byte                                         // of the cluster: a sender must prove that it knows it; nil: everybody is believed
	Now     func() int64                                   // steady clock, ns
	Logger  *slog.Logger
	Dial    func(ctx context.Context, addr string) (net.Conn, error) // nil: TCP
}

// Client pulls KV from senders. It keeps connections; each serves one transfer at a time, so that a slow or broken
// transfer stops no other.
type Client struct {
	o ClientOptions

	mu       sync.Mutex             // guards what follows
	idle     map[string][]*peerLink // of each address, those used last at the end
	old      *time.Timer            // closes what was idle for long; nil: nothing is idle
	mappings map[string]*mapping    // by address
	closed   bool
	watches  sync.WaitGroup
}

// peerLink is a connection after its handshake.
type peerLink struct {
	*link
	peer      Hello
	peerEpoch uint64
	since     time.Time // idle since
}

// NewClient makes a client; it dials when something is pulled.
func NewClient(o ClientOptions) *Client {
	if o.MaxIdle <= 0 {
		o.MaxIdle = 64
	}
	o.Timing = o.Timing.withDefaults()
	if o.Dial == nil {
		o.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	return &Client{o: o, idle: map[string][]*peerLink{}, mappings: map[string]*mapping{}}
}

// Close closes the kept connections; transfers that run end by their contexts.
func (c *Client) Close() {
	defer c.watches.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, links := range c.idle {
		for _, l := range links {
			_ = l.conn.Close()
		}
	}
	c.idle = map[string][]*peerLink{}
	if c.old != nil {
		c.old.Stop()
	}
	for _, m := range c.mappings {
		if m.l != nil {
			_ = m.l.conn.Close()
		}
	}
}

// Open takes a connection to the KV listener at addr for one request. The caller must Close the transfer.
func (c *Client) Open(ctx context.Context, addr string, id int64) (*Transfer, error) {
	l := c.kept(addr)
	if l == nil {
		var err error
		if l, err = c.dial(ctx, addr); err != nil {
			return nil, fmt.Errorf("open kv stream to %s: %w", addr, err)
		}
	}
	t := &Transfer{c: c, l: l, addr: addr, id: id, from: c.hold(ctx, addr, l)}
	t.ping()
	return t, nil
}

// kept gives a living idle connection, newest first, and closes those that are dead. The mutex is not held for these calls into
// the system.
func (c *Client) kept(addr string) *peerLink {
	for {
		l := c.newest(addr)
		if l == nil || c.usable(l) && l.r.Buffered() == 0 && silent(l.conn) {
			return l
		}
		_ = l.conn.Close()
	}
}

// newest takes out the idle connection that was used last; nil: there is none.
func (c *Client) newest(addr string) *peerLink {
	c.mu.Lock()
	defer c.mu.Unlock()
	links := c.idle[addr]
	if len(links) == 0 {
		delete(c.idle, addr)
		return nil
	}
	l := links[len(links)-1]
	c.idle[addr] = links[:len(links)-1]
	return l
}

// keep takes back a connection after a clean transfer.
func (c *Client) keep(addr string, l *peerLink) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle[addr]) >= c.o.MaxIdle {
		_ = l.conn.Close()
		return
	}
	l.since = time.Now()
	c.idle[addr] = append(c.idle[addr], l)
	if c.old == nil {
		c.old = time.AfterFunc(c.o.Timing.Idle/2, c.closeOld)
	}
}

// usable tells whether the sender still keeps an idle connection. Half of its limit is ours: it must not close the connection
// just when we begin.
func (c *Client) usable(l *peerLink) bool { return time.Since(l.since) < c.o.Timing.Idle/2 }

// closeOld closes the connections that are usable no more, so that those to a peer of which nothing is pulled again, as one
// that is gone, end too.
func (c *Client) closeOld() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr, links := range c.idle {
		n := 0
		for ; n < len(links) && !c.usable(links[n]); n++ {
			_ = links[n].conn.Close()
		}
		if links = slices.Delete(links, 0, n); len(links) == 0 {
			delete(c.idle, addr)
		} else {
			c.idle[addr] = links
		}
	}
	c.old = nil
	if len(c.idle) > 0 {
		c.old = time.AfterFunc(c.o.Timing.Idle/2, c.closeOld)
	}
}

func (c *Client) dial(ctx context.Context, addr string) (*peerLink, error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timing.Handshake)
	defer cancel()
	conn, err := c.o.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	l, err := c.handshake(conn)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, err
	}
	return l, nil
}

func (c *Client) handshake(conn net.Conn) (*peerLink, error) {
	l := newLink(conn, c.o.Epoch, c.o.Timing.Lost)
	hello := c.o.Hello
	hello.Nonce = newNonce(c.o.Key)
	if err := l.sendJSON(TypeHello, 0, hello); err != nil {
		return nil, err
	}
	h, payload, err := readFrame(l.r, nil, func(h Header) error {
		if h.Type == TypeRefuse {
			return nil
		}
		return only(TypeHelloAck)(h)
	})
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	if h.Type == TypeRefuse {
		f, err := parseJSON[Fault](h.Type, payload)
		return nil, errors.Join(fmt.Errorf("%w: %s", ErrIncompatible, f.Message), err)
	}
	peer, err := parseJSON[Hello](h.Type, payload)
	if err != nil {
		return nil, err
	}
	if c.o.Key != nil {
		if err := c.exchangeProofs(l, hello.Nonce, peer); err != nil {
			return nil, err
		}
	}
	if err := c.o.Hello.Compatible(peer); err != nil {
		return nil, err
	}
	return &peerLink{link: l, peer: peer, peerEpoch: h.Epoch}, nil
}
