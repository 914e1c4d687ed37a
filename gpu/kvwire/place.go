package kvwire

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// KV that stays in place: sender and receiver are processes of one host, and the receiver copies out of the sender's blocks
// by itself. The sender says which blocks are written; leases, trailer and acknowledgement are those of every transfer.

// mapping is the KV of a sender, opened here. It lives as long as the connection by which it was asked for: the end of the
// sender's process ends both. Client.mu guards its fields, but for attached, which does not change once it is set.
type mapping struct {
	addr     string
	epoch    uint64 // of the sender
	attached backend.Attached
	l        *peerLink
	users    int // transfers
	gone     bool
	since    time.Time // without users
}

// oneHost tells by the ids of their clocks whether two processes run on one kernel.
func oneHost(a, b string) bool {
	a, _, ok := strings.Cut(a, ".")
	b, _, _ = strings.Cut(b, ".")
	return ok && a == b
}

// hold gives the KV of the sender behind l for one transfer, or nil if that goes by TCP: they are not of one kind or host, it could
// not be opened, or another transfer is opening it just now.
func (c *Client) hold(ctx context.Context, addr string, l *peerLink) *mapping {
	if c.o.Attach == nil || l.peer.Shares == "" || l.peer.Shares != c.o.Hello.Shares || !oneHost(l.peer.Clock, c.o.Hello.Clock) {
		return nil
	}
	c.mu.Lock()
	m := c.mappings[addr]
	if c.closed || m != nil && m.epoch == l.peerEpoch {
		defer c.mu.Unlock()
		if c.closed || m.attached == nil || m.gone {
			return nil
		}
		m.users++
		return m
	}
	m = &mapping{addr: addr, epoch: l.peerEpoch}
	c.mappings[addr] = m
	c.mu.Unlock()
	link, attached, err := c.attach(ctx, m)
	switch {
	case err == nil && c.begin(m, link, attached):
		return m
	case err == nil: // closed meanwhile
		_ = link.conn.Close()
		c.detach(addr, attached)
		return nil
	case ctx.Err() != nil:
		c.forget(m) // the next one may try again
	}
	c.o.Logger.Warn("KV of a node on this host cannot be read in place; it comes by TCP", "peer", l.peer.Node, "error", err)
	return nil
}

// begin makes a mapping of what was attached, with one user; false: the client was closed, which would not wait for it.
func (c *Client) begin(m *mapping, l *peerLink, a backend.Attached) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	m.l, m.attached, m.users = l, a, 1
	c.watches.Go(func() { c.watch(m) })
	return true
}

// forget has the next transfer from the address attach anew.
func (c *Client) forget(m *mapping) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mappings[m.addr] == m {
		delete(c.mappings, m.addr)
	}
}

// attach asks a sender where its KV lies and opens it.
func (c *Client) attach(ctx context.Context, m *mapping) (_ *peerLink, _ backend.Attached, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timing.Handshake)
	defer cancel()
	l, err := c.dial(ctx, m.addr)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = l.conn.Close()
		}
	}()
	if l.peerEpoch != m.epoch {
		return nil, nil, fmt.Errorf("%w: epoch %016x, it was %016x", ErrFrame, l.peerEpoch, m.epoch)
	}
	if err := l.send(Header{Type: TypeAttach}, nil); err != nil {
		return nil, nil, err
	}
	h, payload, err := readFrame(l.r, nil, only(TypeShared))
	if err != nil {
		return nil, nil, fmt.Errorf("read where KV lies: %w", err)
	}
	s, err := parseJSON[backend.Shared](h.Type, payload)
	if err != nil {
		return nil, nil, err
	}
	if s.TokensPerBlock != l.peer.TokensPerBlock {
		return nil, nil, fmt.Errorf("%w: shared blocks of %d tokens, hello says %d", ErrFrame, s.TokensPerBlock, l.peer.TokensPerBlock)
	}
	l.lost = 0 // from now on it waits for the end
	if err := l.conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, nil, err
	}
	a, err := c.o.Attach(s)
	return l, a, err
}

// watch keeps the connection of a mapping until the sender ends it or nobody has used it for as long as any idle
// connection is kept; then the mapping is closed, once its last user has gone.
func (c *Client) watch(m *mapping) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, m.l.r) // a sender says nothing here; every end of it is the end of the mapping
	}()
	tick := time.NewTicker(c.o.Timing.Idle / 4)
	defer tick.Stop()
	for open := true; open; {
		select {
		case <-ended:
			open = false
		case <-tick.C:
			c.mu.Lock()
			idle := m.users == 0 && time.Since(m.since) > c.o.Timing.Idle
			m.gone = m.gone || idle // nobody begins to use it
			c.mu.Unlock()
			if err := m.l.send(Header{Type: TypePing}, nil); idle || err != nil {
				_ = m.l.conn.Close()
			}
		}
	}
	_ = m.l.conn.Close()
	c.mu.Lock()
	m.gone = true
	if c.mappings[m.addr] == m {
		delete(c.mappings, m.addr)
	}
	unused := m.users == 0
	c.mu.Unlock()
	if unused {
		c.detach(m.addr, m.attached)
	}
}

// release ends one transfer's use.
func (c *Client) release(m *mapping) {
	c.mu.Lock()
	m.users--
	m.since = time.Now()
	last := m.users == 0 && m.gone && c.mappings[m.addr] != m // watch has ended, or will find no user
	c.mu.Unlock()
	if last {
		c.detach(m.addr, m.attached)
	}
}

func (c *Client) detach(addr string, a backend.Attached) {
	if err := a.Close(); err != nil {
		c.o.Logger.Warn("close the KV of a node on this host", "addr", addr, "error", err)
	}
}

// lend tells a receiver where the KV lies.
func (n *session) lend() error {
	if n.s.o.Shared == nil {
		return fmt.Errorf("%w: KV is not shared", ErrFrame)
	}
	return n.l.sendJSON(TypeShared, 0, n.s.o.Shared)
}

// maxBlocks is how many blocks one notice names.
const maxBlocks = maxControl / 4

// notify tells the receiver that a span is written, and where.
func (n *session) notify(ctx context.Context, o *Offer, span infer.Span) error {
	per := n.s.o.Hello.TokensPerBlock
	for to := 0; span.TokenFrom < span.TokenTo; span.TokenFrom = to {
		to = min((span.TokenFrom/per+maxBlocks)*per, span.TokenTo)
		part := span
		part.TokenTo = to
		if err := n.notifyPart(ctx, o, part); err != nil {
			return err
		}
	}
	return nil
}

func (n *session) notifyPart(ctx context.Context, o *Offer, part infer.Span) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	blocks, err := o.export.Blocks(part)
	if err != nil {
		return fmt.Errorf("blocks of request %d: %w", o.id, err)
	}
	payload := make([]byte, 0, 4*len(blocks))
	for _, b := range blocks {
		payload = binary.LittleEndian.AppendUint32(payload, uint32(b))
	}
	return n.sendSpan(o, part, n.l.head(nil, headerOf(TypeWritten, o.id, part, n.s.o.Hello), payload), payload)
}

// spanBlocks is the number of blocks that hold a span's tokens.
func spanBlocks(h Hello, s infer.Span) int {
	return (s.TokenTo-1)/h.TokensPerBlock - s.TokenFrom/h.TokensPerBlock + 1
}

// pull copies what a notice names.
func (r *receiver) pull(ctx context.Context, span infer.Span, names []byte) error {
	blocks := parseIDs(names)
	// Not cancelled in the middle: the copy in flight ends before the blocks are freed.
	took, err := r.sink.Pull(context.WithoutCancel(ctx), span, r.t.from.attached, blocks)
	if err != nil {
		return fmt.Errorf("copy kv %+v: %w", span, err)
	}
	p := &r.t.report
	p.WireNS += took
	p.LastByteNS = r.t.c.o.Now()
	p.InstalledNS = p.LastByteNS
	return nil
}
