package probe

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/stamp"
	"meridian.internal/shared/clock"
)

// maxStampWait is how long a kernel sending stamp is waited for; on loopback it is there when the send returns.
const maxStampWait = 200 * time.Microsecond

// udpProber keeps one connected socket, so that the responder can interleave and an ICMP refusal is an error at once.
type udpProber struct {
	steady *clock.Steady
	opts   Options
	sock   *stamp.Socket
	prev   *flight // the newest exchange, whose T3 by the kernel is still to come
}

// flight is one exchange under way or done.
type flight struct {
	seq           uint32
	t1App, t1     int64 // before the write; kernel stamp
	t1Err         int64
	t1Kernel      bool
	t4            stamp.RX
	reply         ntp.Packet
	epoch         uint64
	instance      uint32
	exactReturned bool
}

func (u *udpProber) open() error {
	if u.sock != nil {
		return nil
	}
	addr, err := net.ResolveUDPAddr("udp", u.opts.ClockAddr)
	if err != nil {
		return fmt.Errorf("resolve clock address %s: %w", u.opts.ClockAddr, err)
	}
	conn, err := net.DialUDP("udp", nil, addr)
	if err != nil {
		return fmt.Errorf("dial clock %s: %w", u.opts.ClockAddr, err)
	}
	u.sock = stamp.New(conn, u.steady, !u.opts.NoKernelTS)
	return nil
}

func (u *udpProber) close() {
	if u.sock != nil {
		u.sock.Conn().Close()
		u.sock, u.prev = nil, nil
	}
}

// burst sends one packet more than asked with kernel stamps, because the exact stamp of a reply comes with the next one.
func (u *udpProber) burst(ctx context.Context, n int) (Burst, error) {
	if err := u.open(); err != nil {
		return Burst{}, err
	}
	if u.sock.Kernel() {
		n++
	}
	// The last exchange of the burst before is long ago: by the drift since then it would not belong to this one.
	u.prev = nil
	b := Burst{Transport: UDP, Local: localPair(u.steady)}
	var lastErr error
	for i := 0; i < n && ctx.Err() == nil; i++ {
		f, err := u.exchange(ctx)
		if err != nil {
			b.Lost++
			lastErr = err
			if b.Lost >= 2 && len(b.Exchanges) == 0 {
				break
			}
			continue
		}
		id := clock.MakeID(f.epoch, f.instance)
		if b.Peer != "" && b.Peer != id {
			u.prev = nil
			return Burst{}, fmt.Errorf("%w: %s and %s at %s", ErrTwoClock, b.Peer, id, u.opts.ClockAddr)
		}
		b.Peer = id
		u.take(&b, f)
	}
	if len(b.Exchanges) == 0 {
		u.close() // the name may lead elsewhere by now
		if lastErr != nil {
			return Burst{}, fmt.Errorf("%w from %s: %w", ErrNoReply, u.opts.ClockAddr, lastErr)
		}
	}
	return b.finish(u.opts.ClockAddr)
}

// take adds what the reply of f proves: about f with what is known already, about the previous exchange exactly.
func (u *udpProber) take(b *Burst, f *flight) {
	prev := u.prev
	u.prev = f
	r := f.reply
	if r.HasPair {
		b.Remote = &ntp.Pair{AtNS: r.T3, DiffNS: r.RawDiffNS, ErrNS: int64(r.PairErrNS)}
	}
	b.Exchanges = append(b.Exchanges, f.exchange(r.T3, 0))
	if r.HasPrevTX && prev != nil && !prev.exactReturned && prev.epoch == f.epoch && prev.instance == f.instance {
		prev.exactReturned = true
		b.Exchanges = append(b.Exchanges, prev.exchange(r.PrevTX, int64(r.ErrNS)))
		if prev.t1Kernel && prev.t4.Kernel && prev.reply.KernelRX {
			b.Transport = UDPKernel
		}
	}
}

func (f *flight) exchange(t3, t3Err int64) ntp.Exchange {
	t1, t1Err := f.t1App, int64(0)
	if f.t1Kernel {
		t1, t1Err = f.t1, f.t1Err
	}
	remote := max(int64(f.reply.ErrNS), t3Err)
	return ntp.Exchange{T1: t1, T2: f.reply.T2, T3: t3, T4: f.t4.NS, ErrNS: max(t1Err, f.t4.ErrNS) + remote}
}

// exchange sends one request and waits for its reply.
func (u *udpProber) exchange(ctx context.Context) (*flight, error) {
	epoch, instance, _ := u.steady.ID().Words()
	q := ntp.Packet{Seq: rand.Uint32(), Epoch: epoch, Instance: instance}
	if u.prev != nil {
		q.PrevSeq = u.prev.seq
	}
	deadline := time.Now().Add(u.opts.Timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := u.sock.Conn().SetReadDeadline(deadline); err != nil {
		return nil, fmt.Errorf("set deadline: %w", err)
	}
	t1, id, err := u.sock.Send(q.Append(nil, u.opts.Key), netip.AddrPort{})
	if err != nil {
		return nil, err
	}
	f := &flight{seq: q.Seq, t1App: t1}
	if err := u.receive(f); err != nil {
		return nil, err
	}
	if u.sock.Kernel() {
		if tx, ok := u.sock.Await(id, maxStampWait); ok && tx.NS >= t1-tx.ErrNS && tx.NS <= f.t4.NS+tx.ErrNS+f.t4.ErrNS {
			f.t1, f.t1Err, f.t1Kernel = tx.NS, tx.ErrNS, true
		}
	}
	return f, nil
}

// receive reads until the reply to f comes; anything else is a leftover or a forgery.
func (u *udpProber) receive(f *flight) error {
	var b [ntp.Size + 1]byte
	for {
		n, _, rx, err := u.sock.Receive(b[:])
		if err != nil {
			return fmt.Errorf("await clock reply: %w", err)
		}
		r, err := ntp.ParsePacket(b[:n], u.opts.Key)
		if err != nil || !r.Reply || r.Seq != f.seq {
			continue
		}
		f.reply, f.t4, f.epoch, f.instance = r, rx, r.Epoch, r.Instance
		return nil
	}
}
