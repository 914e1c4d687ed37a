// Package stamp owns a UDP socket whose packets carry stamps of the steady clock: the kernel's own where it gives them,
// else the program's, always on the safe side (a sending stamp is never late, a receiving one never early). It knows
// nothing of what the packets mean.
//
// The kernel stamps packets in CLOCK_REALTIME. A pair (steady, wall) read next to a stamp turns it into steady time; a
// stamp next to which the wall clock was stepped is dropped. One goroutine at a time may use a Socket.
package stamp

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"meridian.internal/shared/clock"
)

// Socket is a UDP socket with stamps.
type Socket struct {
	mapper
	conn   *net.UDPConn
	kernel bool
	sent   uint32 // sends since the kernel's counter was armed
	oob    []byte
}

// RX is the stamp of a received packet.
type RX struct {
	NS     int64
	ErrNS  int64 // half bracket of the pair; 0 for a program's stamp
	Kernel bool
}

// TX is the kernel's stamp of a sent packet; ID counts the sends from 0.
type TX struct {
	ID    uint32
	NS    int64
	ErrNS int64
}

// New wraps conn. Without support in the kernel, or with kernel false, all stamps are the program's.
func New(conn *net.UDPConn, s *clock.Steady, kernel bool) *Socket {
	k := &Socket{mapper: newMapper(s), conn: conn, oob: make([]byte, 512)}
	if kernel {
		k.kernel = arm(conn) == nil
	}
	return k
}

// Kernel says whether the kernel stamps.
func (k *Socket) Kernel() bool { return k.kernel }

// Conn returns the socket, for deadlines and addresses.
func (k *Socket) Conn() *net.UDPConn { return k.conn }

// Receive waits for a packet, until the read deadline of Conn.
func (k *Socket) Receive(b []byte) (int, netip.AddrPort, RX, error) {
	n, oobn, _, from, err := k.conn.ReadMsgUDPAddrPort(b, k.oob)
	now := k.steady.Now()
	if err != nil {
		return 0, netip.AddrPort{}, RX{}, err
	}
	rx := RX{NS: now}
	if k.kernel {
		if wall, ok := parseRX(k.oob[:oobn]); ok {
			if ns, half, ok := k.toSteady(wall, now); ok {
				rx = RX{NS: ns, ErrNS: half, Kernel: true}
			}
		}
	}
	return n, from, rx, nil
}

// Send writes a packet; to is ignored on a connected socket (then it must be the zero AddrPort). beforeNS was read
// before the write, so it is not late. The id is the one that SentStamps will name.
func (k *Socket) Send(b []byte, to netip.AddrPort) (beforeNS int64, id uint32, err error) {
	beforeNS = k.steady.Now()
	if to.IsValid() {
		_, err = k.conn.WriteToUDPAddrPort(b, to)
	} else {
		_, err = k.conn.Write(b)
	}
	id = k.sent
	k.sent++
	if err != nil {
		k.rearm()
		return 0, 0, fmt.Errorf("send clock packet: %w", err)
	}
	return beforeNS, id, nil
}

// rearm starts the kernel's count of sends anew: after a failed send nobody knows whether it was counted.
func (k *Socket) rearm() {
	if k.kernel {
		_ = k.drain(func(uint32, int64) bool { return true })
		k.kernel = rearm(k.conn) == nil
		k.sent = 0
	}
}

// SentStamps hands over the kernel's sending stamps that are ready, until each wants no more. It does not wait.
func (k *Socket) SentStamps(each func(TX) (more bool)) {
	if !k.kernel {
		return
	}
	now := k.steady.Now()
	_ = k.drain(func(id uint32, wall int64) bool {
		ns, half, ok := k.toSteady(wall, now)
		return !ok || each(TX{ID: id, NS: ns, ErrNS: half})
	})
}

// Await is SentStamps for one id: on a real card the stamp may come some microseconds after the send returned.
func (k *Socket) Await(id uint32, limit time.Duration) (tx TX, ok bool) {
	for until := k.steady.Now() + int64(limit); ; {
		k.SentStamps(func(t TX) bool {
			if t.ID == id {
				tx, ok = t, true
			}
			return !ok
		})
		if ok || !k.kernel || k.steady.Now() >= until {
			return tx, ok
		}
	}
}
