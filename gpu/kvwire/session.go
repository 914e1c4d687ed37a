package kvwire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// session is one connection on the sending side. Its goroutine reads; deliver runs beside it while a request is pending.
type session struct {
	s    *Server
	l    *link
	peer Hello
	name string // of the peer, for records
	host string // where it is: it can say any name

	// Owned by the reading goroutine.
	offer  *Offer                  // claimed or fetched by the pending request; nil: deliver takes one, and gives it back by sent
	cancel context.CancelCauseFunc // of the pending request; nil when there is none
	ended  chan struct{}           // closed when deliver and the pings have ended
	sent   chan *Offer             // deliver: the trailer is out, an acknowledgement is due
	over   chan struct{}           // closed when the reading goroutine is done with the request
}

func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	n := &session{s: s, l: newLink(c, s.o.Epoch, s.o.Timing.Handshake), name: c.RemoteAddr().String(), host: hostOf(c)}
	late := time.AfterFunc(s.o.Timing.Handshake, func() { _ = c.Close() }) // in all: who sends byte by byte holds a slot no longer
	err := n.handshake()
	late.Stop()
	if err != nil {
		if ctx.Err() == nil {
			s.o.Logger.Warn("kv connection refused", "peer", n.host, "node", n.peer.Node, "error", err)
		}
		return
	}
	err = n.loop(ctx)
	unused := n.cancel == nil && errors.Is(err, os.ErrDeadlineExceeded)
	n.drop(fmt.Errorf("%w: %w", ErrReceiverLost, err))
	if ctx.Err() == nil && !unused && !errors.Is(err, io.EOF) {
		s.o.Logger.Info("kv connection ended", "peer", n.host, "node", n.peer.Node, "error", err)
	}
}

// hostOf is the host of the other side.
func hostOf(c net.Conn) string {
	addr := c.RemoteAddr().String()
	if host, _, err := net.SplitHostPort(addr); err == nil {
		return host
	}
	return addr
}

func (n *session) handshake() error {
	h, payload, err := readFrame(n.l.r, nil, only(TypeHello))
	if err != nil {
		return fmt.Errorf("read hello: %w", err)
	}
	if n.peer, err = parseJSON[Hello](h.Type, payload); err != nil {
		return err
	}
	n.name = n.peer.Node
	if n.s.o.Key != nil && len(n.peer.Nonce) != 2*nonceBytes {
		return errors.Join(ErrStranger, n.l.sendJSON(TypeRefuse, 0, Fault{Message: ErrStranger.Error()}))
	}
	if err := n.s.o.Hello.Compatible(n.peer); err != nil {
		return errors.Join(err, n.l.sendJSON(TypeRefuse, 0, Fault{Message: err.Error()}))
	}
	ack := n.s.answerHello(n.peer)
	if err := n.l.sendJSON(TypeHelloAck, 0, ack); err != nil || n.s.o.Key == nil {
		return err
	}
	return n.takeProof(ack)
}

// only accepts one type of frame.
func only(want Type) func(Header) error {
	return func(h Header) error {
		if h.Type != want {
			return fmt.Errorf("%w: type %d, want %d", ErrFrame, h.Type, want)
		}
		return nil
	}
}

// loop serves until the connection ends; it always says why.
func (n *session) loop(ctx context.Context) error {
	var buf []byte
	for {
		n.l.lost = n.s.o.Timing.Idle
		if n.cancel != nil {
			n.l.lost = n.s.o.Timing.Lost
		}
		h, payload, err := readFrame(n.l.r, buf, fromReceiver)
		if err != nil {
			return err
		}
		buf = payload
		switch h.Type {
		case TypeClaim, TypeRequest:
			err = n.begin(ctx, h, payload)
		case TypeFetch:
			err = n.fetch(ctx, h, payload)
		case TypeAck:
			err = n.acknowledge(h.Request)
		case TypeAttach:
			err = n.lend()
		case TypeCancel:
			n.drop(fmt.Errorf("%w: cancelled", ErrReceiverLost))
		}
		if err != nil {
			return err
		}
	}
}

func fromReceiver(h Header) error {
	switch h.Type {
	case TypeClaim, TypeRequest, TypeAck, TypeCancel, TypePing, TypeAttach, TypeFetch:
		return nil
	}
	return fmt.Errorf("%w: type %d is not a receiver's", ErrFrame, h.Type)
}

// begin starts what a claim or a request asks for. A request may follow the claim of its own id, nothing else may overlap.
func (n *session) begin(ctx context.Context, h Header, payload []byte) error {
	n.reap()
	if h.Type == TypeClaim {
		if n.cancel != nil {
			return fmt.Errorf("%w: request %d while another is pending", ErrFrame, h.Request)
		}
		return n.claim(ctx, h.Request)
	}
	want, err := parseJSON[Want](h.Type, payload)
	if err != nil {
		return err
	}
	if want.TokenFrom < 0 || want.DeadlineMS <= 0 {
		return fmt.Errorf("%w: request %d from token %d within %d ms", ErrFrame, h.Request, want.TokenFrom, want.DeadlineMS)
	}
	if want.InPlace && n.s.o.Shared == nil {
		return fmt.Errorf("%w: request %d wants to read KV that is not shared", ErrFrame, h.Request)
	}
	limit := min(time.Duration(min(want.DeadlineMS, int64(time.Hour/time.Millisecond)))*time.Millisecond, maxPending)
	sub, cancel := context.WithCancelCause(ctx)
	if n.cancel != nil {
		if n.offer == nil || n.sent != nil || n.offer.id != h.Request {
			cancel(nil)
			return fmt.Errorf("%w: request %d while another is pending", ErrFrame, h.Request)
		}
		n.offer.rebind(cancel) // before the claim ends, so that a withdrawal reaches one of the two
		n.cancel(nil)          // only the wait of the claim runs
		<-n.ended
	}
	n.start(sub, delivery{id: h.Request, want: want, limit: limit, offer: n.offer, stop: cancel})
	return nil
}

// fetch answers with the KV that is cached of the beginning of a prompt: an offer that is ready and has its receiver.
func (n *session) fetch(ctx context.Context, h Header, payload []byte) error {
	n.reap()
	if n.cancel != nil || len(payload)%4 != 0 {
		return fmt.Errorf("%w: fetch %d of %d bytes, while another request is pending: %t", ErrFrame, h.Request, len(payload), n.cancel != nil)
	}
	var x Export
	have := 0
	if n.s.o.Lend != nil {
		x, have = n.s.o.Lend(parseIDs(payload))
	}
	if have <= int(h.TokenFrom) {
		if x != nil {
			x.Release()
		}
		return n.l.sendJSON(TypeError, h.Request, Fault{Message: fmt.Sprintf("of the prompt %d tokens are cached here, %d are there", have, h.TokenFrom)})
	}
	o := &Offer{id: h.Request, server: n.s, export: x, ready: make(chan struct{}), done: make(chan struct{})}
	sub, cancel := context.WithCancelCause(ctx)
	o.claim(cancel)
	o.Ready(Trailer{PromptTokens: have, CachedTokens: have})
	n.offer = o
	n.start(sub, delivery{id: h.Request, want: Want{TokenFrom: int(h.TokenFrom)}, limit: fetchLimit, offer: o, stop: cancel})
	return nil
}

// start makes a request the pending one, and answers it on a goroutine of its own.
func (n *session) start(ctx context.Context, d delivery) {
	ended, sent, over := make(chan struct{}), make(chan *Offer, 1), make(chan struct{})
	n.cancel, n.ended, n.sent, n.over = d.stop, ended, sent, over
	d.sent, d.over = sent, over
	n.s.wg.Go(func() {
		defer close(ended)
		n.deliver(ctx, d)
	})
}

// fetchLimit is how long a peer may take to fetch: longer, and computing would have been faster.
const fetchLimit = 10 * time.Second

func parseIDs(b []byte) []int32 {
	ids := make([]int32, 0, len(b)/4)
	for ; len(b) >= 4; b = b[4:] {
		ids = append(ids, int32(binary.LittleEndian.Uint32(b)))
	}
	return ids
}

// maxPending bounds how long a receiver can hold a lease, whatever it says.
const maxPending = 10 * time.Minute

// claim holds the lease of an id for as long as the connection is heard. One of most of the blocks it holds for the lease time only:
// the place that its receiver waits for may be held by a request whose prefill waits for these blocks.
func (n *session) claim(ctx context.Context, id int64) error {
	n.s.mu.Lock()
	o := n.s.offers[id]
	n.s.mu.Unlock()
	sub, cancel := context.WithCancelCause(ctx)
	if o == nil || !o.claim(cancel) {
		cancel(nil)
		return n.l.sendJSON(TypeError, id, Fault{Message: fmt.Sprintf("request %d: no lease is waiting here", id)})
	}
	n.offer, n.cancel, n.ended, n.sent = o, cancel, make(chan struct{}), nil
	ended, limit := n.ended, maxPending
	if x, ok := o.export.(*leased); ok && x.most {
		limit = n.s.lease
	}
	n.s.wg.Go(func() {
		defer close(ended)
		limited, done := context.WithTimeout(sub, limit)
		defer done()
		<-limited.Done() // no pings: the receiver reads nothing before it has asked
		switch {
		case errors.Is(context.Cause(sub), ErrWithdrawn):
			n.report(sub, id, ErrWithdrawn)
			o.finish(ErrWithdrawn)
		case sub.Err() == nil:
			_ = n.l.conn.Close() // claimed for too long: the reading goroutine frees it
		}
	})
	return nil
}

// reap ends a request that is pending no more.
func (n *session) reap() {
	if n.cancel == nil {
		return
	}
	select {
	case <-n.ended: // its offer may still be claimed by it, or sent and not acknowledged: nobody else would end it
		n.drop(fmt.Errorf("%w: it asked again before it acknowledged", ErrReceiverLost))
	default:
	}
}

// acknowledge ends the pending transfer as a success.
func (n *session) acknowledge(id int64) error {
	if n.sent == nil {
		return fmt.Errorf("%w: acknowledgement of %d, nothing was sent", ErrFrame, id)
	}
	var o *Offer
	select {
	case o = <-n.sent:
	case <-n.ended: // the trailer may be out while sent is still to be written, so this waits for one of both
		select {
		case o = <-n.sent: // withdrawn after all was sent: the receiver has it
		default:
			return fmt.Errorf("%w: acknowledgement of %d, which has failed", ErrFrame, id)
		}
	}
	if o.id != id {
		n.offer = o // drop ends it
		return fmt.Errorf("%w: acknowledgement of %d, sent was %d", ErrFrame, id, o.id)
	}
	n.cancel(nil)
	n.done()
	<-n.ended
	o.note(func(r *Report) { r.InstalledNS = n.s.o.Now() })
	o.finish(nil)
	n.offer, n.cancel, n.ended, n.sent = nil, nil, nil, nil
	return nil
}

// done lets deliver go.
func (n *session) done() {
	if n.over != nil {
		close(n.over)
		n.over = nil
	}
}

// drop ends what is pending: mark, let the frame in flight end, then free.
func (n *session) drop(cause error) {
	if n.cancel == nil {
		return
	}
	n.cancel(cause)
	n.done()
	<-n.ended
	if n.sent != nil {
		select {
		case o := <-n.sent:
			o.finish(cause)
		default:
		}
	}
	if n.offer != nil {
		n.offer.finish(cause)
	}
	n.offer, n.cancel, n.ended, n.sent = nil, nil, nil, nil
}

// delivery is one request of a receiver.
type delivery struct {
	id    int64
	want  Want
	limit time.Duration
	offer *Offer // claimed before; nil: to be taken
	stop  context.CancelCauseFunc
	sent  chan<- *Offer
	over  <-chan struct{}
}

// deliver answers one request, and pings until the reading goroutine has seen its end.
func (n *session) deliver(ctx context.Context, d delivery) {
	var pings sync.WaitGroup
	pings.Go(func() { n.l.ping(ctx, n.s.o.Timing.Ping) })
	defer pings.Wait()
	requested := n.s.o.Now()
	limited, done := context.WithTimeoutCause(ctx, d.limit, fmt.Errorf("request %d: not there within %s", d.id, d.limit))
	defer done()
	o := d.offer
	if o == nil {
		var err error
		if o, err = n.s.take(limited, d.id); err == nil && !o.claim(d.stop) {
			err = fmt.Errorf("%w: %d", ErrDuplicate, d.id)
		}
		if err != nil {
			n.report(ctx, d.id, err)
			d.stop(nil)
			return
		}
	}
	o.note(func(r *Report) { r.Peer, r.RequestedNS = n.name, requested })
	if err := n.stream(limited, o, d.want); err != nil {
		if limited.Err() != nil {
			err = context.Cause(limited)
		}
		n.report(ctx, d.id, err)
		o.finish(err)
		d.stop(nil)
		return
	}
	d.sent <- o // holds one
	<-limited.Done()
	if ctx.Err() == nil {
		_ = n.l.conn.Close() // not acknowledged in time: the reading goroutine frees it
		return
	}
	if !errors.Is(context.Cause(ctx), ErrWithdrawn) {
		return
	}
	t := time.NewTimer(n.s.o.Timing.Lost)
	defer t.Stop()
	select { // all is out: the acknowledgement is on its way, or the receiver is given up though it is heard
	case <-d.over:
	case <-t.C:
		_ = n.l.conn.Close()
	}
}

// report tells the receiver of a fault of its request. A connection that is gone hears nothing.
func (n *session) report(ctx context.Context, id int64, err error) {
	if ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrWithdrawn) {
		return
	}
	if serr := n.l.sendJSON(TypeError, id, Fault{Message: err.Error()}); serr != nil {
		_ = n.l.conn.Close() // the reading goroutine ends with it
	}
}
