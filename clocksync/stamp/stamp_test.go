package stamp

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"meridian.internal/shared/clock"
)

// patience is how long packets and stamps that come are waited for.
const patience = time.Minute

func open(t testing.TB, s *clock.Steady, kernel bool) *Socket {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return New(c, s, kernel)
}

func addr(k *Socket) netip.AddrPort { return k.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

func TestStampsNeverLieAboutTheOrder(t *testing.T) {
	for name, kernel := range map[string]bool{"stamps of the kernel": true, "stamps of the program": false} {
		t.Run(name, func(t *testing.T) {
			s, err := clock.New(clock.Options{})
			if err != nil {
				t.Fatal(err)
			}
			a, b := open(t, s, kernel), open(t, s, kernel)
			if kernel && !a.Kernel() {
				t.Skip("the kernel gives no packet stamps here")
			}
			const packets = 3000
			stamped, received := 0, 0
			// The kernel turns receive stamps on by a work queue, some time after it was asked: packets count from the first that has one.
			counted, began := 0, !kernel
			for i := 0; counted < packets; i++ {
				before, id, err := a.Send([]byte("ping"), addr(b))
				if err != nil || id != uint32(i) {
					t.Fatalf("send %d: id %d, %v", i, id, err)
				}
				n, from, rx, err := b.Receive(make([]byte, 64))
				after := s.Now()
				if err != nil || n != 4 || from != addr(a) {
					t.Fatalf("receive: %d bytes from %v, %v", n, from, err)
				}
				if rx.Kernel {
					received++
				}
				if began = began || rx.Kernel; began {
					counted++
				}
				if rx.NS+rx.ErrNS < before || rx.NS-rx.ErrNS > after {
					t.Fatalf("received at %d ± %d, sent in [%d, %d]", rx.NS, rx.ErrNS, before, after)
				}
				a.SentStamps(func(tx TX) bool {
					stamped++
					if tx.ID == id && (tx.NS+tx.ErrNS < before || tx.NS-tx.ErrNS-rx.ErrNS > rx.NS) {
						t.Fatalf("sent at %d ± %d, outside [%d, %d]", tx.NS, tx.ErrNS, before, rx.NS)
					}
					return true
				})
			}
			if kernel && (stamped < packets/2 || received < packets/4) {
				t.Errorf("of %d packets %d have a sending and %d a receiving stamp", packets, stamped, received)
			}
			if !kernel && stamped+received != 0 {
				t.Errorf("kernel stamps (%d, %d) from a socket without", stamped, received)
			}
		})
	}
}

func TestAFailedSendStartsTheCountAnew(t *testing.T) {
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := open(t, s, true), open(t, s, true)
	if !a.Kernel() {
		t.Skip("the kernel gives no packet stamps here")
	}
	if _, _, err := a.Send(make([]byte, 1<<17), addr(b)); err == nil {
		t.Fatal("a packet of 128 KiB was sent")
	}
	_, id, err := a.Send([]byte("x"), addr(b))
	if err != nil || id != 0 {
		t.Fatalf("id %d, %v", id, err)
	}
	if _, ok := a.Await(id, patience); !ok {
		t.Error("no stamp of the first send after the failed one")
	}
}

func TestAStampAcrossAWallClockStepIsDropped(t *testing.T) {
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	k := open(t, s, false)
	_, wall, _ := s.Wall()
	if _, _, ok := k.toSteady(wall, s.Now()); !ok {
		t.Fatal("a good stamp was dropped")
	}
	k.pair.wall -= 10_000 // as if the wall clock had been set forward since
	k.pair.mono -= 1_000_000
	k.pair.wall -= 1_000_000
	k.pair.at -= 1_000_000
	if ns, _, ok := k.toSteady(wall, s.Now()); ok {
		t.Errorf("a stamp next to a step was mapped to %d", ns)
	}
}

func FuzzControlMessages(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 64))
	f.Add([]byte{64, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 37, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Fuzz(func(t *testing.T, b []byte) {
		if ns, ok := parseRX(b); ok && ns <= 0 {
			t.Fatalf("stamp %d", ns)
		}
		if _, ns, ok := parseTX(b); ok && ns <= 0 {
			t.Fatalf("stamp %d", ns)
		}
	})
}
