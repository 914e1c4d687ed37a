package probe

import (
	"context"
	"errors"
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

// udpProber keeps one connected socket, so that the responder can interleave and an ICMP refusal is an error at once. A peer
// that is known to be stamped by the kernel on both sides is handed over to the batch, and the socket is closed.
type udpProber struct {
	steady *clock.Steady
	opts   Options
	sock   *stamp.Socket
	shared netip.AddrPort // where the batch finds the peer; invalid: own socket
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
		u.sock = nil
	}
}

// burst sends one packet more than asked with kernel stamps, because the exact stamp of a reply comes with the next one.
func (u *udpProber) burst(ctx context.Context, n int) (Burst, error) {
	if u.shared.IsValid() {
		b, err := u.opts.Batch.burst(ctx, u.shared, n+1, u.opts.Timeout)
		if err != nil || b.Transport != UDPKernel {
			u.shared = netip.AddrPort{} // the name may lead elsewhere by now
		}
		if errors.Is(err, errBatch) {
			u.opts.Batch = nil
		}
		return b, err
	}
	if err := u.open(); err != nil {
		return Burst{}, err
	}
	if u.sock.Kernel() {
		n++
	}
	t := talk{burst: Burst{Transport: UDP, Local: localPair(u.steady)}}
	for i := 0; i < n && ctx.Err() == nil; i++ {
		f, err := u.exchange(ctx, &t)
		if err != nil {
			if t.lose(err) {
				break
			}
			continue
		}
		if err := t.take(f); err != nil {
			return Burst{}, fmt.Errorf("ask the clock at %s: %w", u.opts.ClockAddr, err)
		}
	}
	b, err := t.end()
	switch {
	case err != nil:
		u.close() // the name may lead elsewhere by now
		err = fmt.Errorf("ask the clock at %s: %w", u.opts.ClockAddr, err)
	case u.opts.Batch != nil && b.Transport == UDPKernel && b.Lost == 0:
		u.handOver()
	}
	return b, err
}

// handOver leaves the next bursts to the batch.
func (u *udpProber) handOver() {
	to, ok := u.sock.Conn().RemoteAddr().(*net.UDPAddr)
	if !ok || to.Zone != "" {
		return
	}
	ap := to.AddrPort()
	u.shared = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	u.close()
}

// exchange sends one request and waits for its reply.
func (u *udpProber) exchange(ctx context.Context, t *talk) (*flight, error) {
	f, q := t.begin(u.steady.ID(), rand.Uint32())
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
	f.t1 = t1
	if err := u.receive(f); err != nil {
		return nil, err
	}
	if u.sock.Kernel() {
		if tx, ok := u.sock.Await(id, maxStampWait); ok {
			f.tx, f.hasTX = tx, true
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
		f.reply, f.t4 = r, rx
		return nil
	}
}
