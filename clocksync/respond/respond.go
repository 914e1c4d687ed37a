// Package respond owns the UDP clock responder that every process runs: it answers 64-byte requests with the stamps of
// its steady clock, and in the next reply to the same client says when the kernel really sent the previous one. On
// unix sockets it also bears witness that its process runs on this kernel. It probes nobody and keeps no estimate.
//
// Serve's goroutine owns all state but the counters.
package respond

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/clocksync/kernel"
	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/stamp"
	"meridian.internal/shared/clock"
)

const (
	// maxClients bounds what is remembered for interleaving; a client that is forgotten only gets less exact stamps.
	maxClients = 4096
	// pairMaxAge is how old the (steady, raw) pair in a reply may be: a slew of 500 ppm moves it by 0.1 µs in that time.
	pairMaxAge = 200 * time.Millisecond
	// answered is how many seqs of a client are known as answered: more than a client has under way (a volley of clocksync/probe).
	answered = 8
)

// Options of a responder.
type Options struct {
	Key        []byte       // HMAC key; empty: packets are not signed
	KernelDir  string       // folder in which co-located processes prove that they share a kernel; empty: by network namespace only
	NoKernelTS bool         // use the program's stamps even if the kernel has better ones
	Logger     *slog.Logger // nil: silent
}

// Counters of a responder.
type Counters struct {
	Replies int64
	Foreign int64 // packets that are none of ours, or signed wrongly
	Errors  int64 // replies that could not be sent
}

// Responder answers clock requests.
type Responder struct {
	sock    *stamp.Socket
	steady  *clock.Steady
	opts    Options
	clients map[netip.AddrPort]*client
	order   []netip.AddrPort // clients in the order of arrival, oldest first
	pending map[uint32]sent  // sends whose kernel stamp is not known yet
	pair    pair
	witness *kernel.Witness

	replies, foreign, errs atomic.Int64
}

type client struct {
	seq uint32 // of the newest reply whose kernel stamp is known
	tx  stamp.TX
	has bool

	answered [answered]uint32 // seqs that were answered last
	next     int              // place in it
}

// first says whether no request with this seq was answered lately.
func (c *client) first(seq uint32) bool {
	if slices.Contains(c.answered[:], seq) {
		return false
	}
	c.answered[c.next] = seq
	c.next = (c.next + 1) % answered
	return true
}

type sent struct {
	to  netip.AddrPort
	seq uint32
}

type pair struct{ mono, raw, half int64 }

// Listen opens the socket; "" and ":0" give an ephemeral port on all addresses. Serve must be called then.
func Listen(addr string, s *clock.Steady, o Options) (*Responder, error) {
	if addr == "" {
		addr = ":0"
	}
	ua, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, fmt.Errorf("resolve clock address %q: %w", addr, err)
	}
	conn, err := net.ListenUDP("udp", ua)
	if err != nil {
		return nil, fmt.Errorf("listen for clock requests on %s: %w", addr, err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Responder{
		sock: stamp.New(conn, s, !o.NoKernelTS), steady: s, opts: o,
		clients: map[netip.AddrPort]*client{}, pending: map[uint32]sent{},
	}
	r.readPair()
	r.witness = kernel.Listen(o.KernelDir, s, o.Logger)
	return r, nil
}

// Addr is the address that the socket is bound to.
func (r *Responder) Addr() netip.AddrPort {
	return r.sock.Conn().LocalAddr().(*net.UDPAddr).AddrPort()
}

// Advertised is what others dial: host with the port of the socket.
func (r *Responder) Advertised(host string) string {
	return net.JoinHostPort(host, fmt.Sprint(r.Addr().Port()))
}

// Counters returns what was done so far.
func (r *Responder) Counters() Counters {
	return Counters{Replies: r.replies.Load(), Foreign: r.foreign.Load(), Errors: r.errs.Load()}
}

// Serve answers until ctx ends, then closes the socket and returns nil.
func (r *Responder) Serve(ctx context.Context) error {
	conn := r.sock.Conn()
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	wctx, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.witness.Serve(wctx) })
	defer wg.Wait()
	defer end()
	var b [ntp.Size + 1]byte // one more, so that a longer packet is seen as longer
	for ctx.Err() == nil {
		n, from, rx, err := r.sock.Receive(b[:])
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("serve clock requests: %w", err)
		case err != nil:
			// An ICMP error of an earlier reply, for example; the socket goes on.
			r.errs.Add(1)
			continue
		}
		r.answer(b[:n], from, rx)
	}
	return nil
}

func (r *Responder) answer(b []byte, from netip.AddrPort, rx stamp.RX) {
	q, err := ntp.ParsePacket(b, r.opts.Key)
	if err != nil || q.Reply {
		r.foreign.Add(1)
		return
	}
	r.collect()
	p := r.reply(q, from, rx)
	p.T3 = r.steady.Reported() // before the write, so not late
	_, id, err := r.sock.Send(p.Append(nil, r.opts.Key), from)
	if err != nil {
		clear(r.pending)
		r.errs.Add(1)
		r.opts.Logger.Debug("clock reply not sent", "to", from, "err", err)
		return
	}
	r.replies.Add(1)
	if r.sock.Kernel() {
		r.remember(id, sent{from, q.Seq})
		r.collect()
	}
	if r.steady.Now()-r.pair.mono > int64(pairMaxAge) {
		r.readPair()
	}
}

func (r *Responder) reply(q ntp.Packet, from netip.AddrPort, rx stamp.RX) ntp.Packet {
	epoch, instance, _ := r.steady.ID().Words() // our own id is well formed
	lie := r.steady.LieNS()
	p := ntp.Packet{
		Reply: true, KernelRX: rx.Kernel, Seq: q.Seq, Epoch: epoch, Instance: instance, T2: rx.NS + lie,
		RawDiffNS: r.pair.raw - r.pair.mono, PairErrNS: saturate(r.pair.half), HasPair: r.pair.half < 1<<16,
	}
	err := rx.ErrNS
	if c := r.clients[from]; c != nil && c.has && c.seq == q.PrevSeq && c.tx.ErrNS < 1<<16 {
		p.HasPrevTX, p.PrevTX = true, c.tx.NS+lie
		err = max(err, c.tx.ErrNS)
	}
	if err >= 1<<16 { // the bracket was torn by a preemption: the program's stamp is better
		p.KernelRX, p.HasPrevTX, p.T2, err = false, false, r.steady.Reported(), 0
	}
	p.ErrNS = uint16(err)
	return p
}

func saturate(ns int64) uint16 { return uint16(min(max(ns, 0), 1<<16-1)) }

// collect takes the sending stamps that the kernel has ready.
func (r *Responder) collect() {
	if len(r.pending) == 0 {
		return
	}
	r.sock.SentStamps(func(tx stamp.TX) bool {
		if s, ok := r.pending[tx.ID]; ok {
			delete(r.pending, tx.ID)
			if c := r.clients[s.to]; c != nil {
				c.seq, c.tx, c.has = s.seq, tx, true
			}
		}
		return len(r.pending) > 0
	})
}

// remember awaits the kernel's stamp of a reply. Not that of a second reply with one seq, to a request that the path duplicated or
// somebody sent again: the client has taken the first one, perhaps, and a stamp of the second would lie after its arrival.
func (r *Responder) remember(id uint32, s sent) {
	c := r.clients[s.to]
	if c == nil {
		c = r.welcome(s.to)
	}
	if !c.first(s.seq) {
		return
	}
	if len(r.pending) >= maxClients {
		clear(r.pending) // stamps that do not come: some driver gives none
	}
	r.pending[id] = s
}

func (r *Responder) welcome(from netip.AddrPort) *client {
	if len(r.order) >= maxClients {
		delete(r.clients, r.order[0])
		r.order = r.order[1:]
	}
	c := &client{}
	r.clients[from] = c
	r.order = append(r.order, from)
	return c
}

func (r *Responder) readPair() {
	m, raw, h := r.steady.Raw()
	r.pair = pair{m, raw, h}
}
