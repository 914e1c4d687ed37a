package stamp

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"meridian.internal/shared/clock"
)

func openMany(t *testing.T, s *clock.Steady, v6 bool) *Many {
	t.Helper()
	m, err := OpenMany(s, v6)
	if err != nil {
		t.Skipf("no socket with stamps of the kernel: %v", err)
	}
	t.Cleanup(m.Close)
	return m
}

// echoes answers each packet with itself, from its own address.
func echoes(t *testing.T, ip string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(ip), 0)))
	if err != nil {
		t.Skipf("no UDP on %s: %v", ip, err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	go func() {
		defer close(done)
		var b [256]byte
		for {
			n, from, err := c.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestABatchHasAStampForEachPacketThatKeepsTheOrder(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "::1"} {
		t.Run(ip, func(t *testing.T) {
			s, err := clock.New(clock.Options{})
			if err != nil {
				t.Fatal(err)
			}
			m := openMany(t, s, ip == "::1")
			var ds []Datagram
			for i := range BatchSize + 6 {
				ds = append(ds, Datagram{To: echoes(t, ip), Data: fmt.Appendf(nil, "packet %d", i)})
			}
			before := map[string]int64{}
			for rest := ds; len(rest) > 0; {
				n, at, first, err := m.Send(rest)
				if err != nil || int(first) != len(ds)-len(rest) || n < 1 || n > BatchSize {
					t.Fatalf("%d sent from id %d: %v", n, first, err)
				}
				for _, d := range rest[:n] {
					before[string(d.Data)] = at
				}
				rest = rest[n:]
			}
			got, sent := map[string]RX{}, map[uint32]TX{}
			for until := s.Now() + int64(patience); (len(got) < len(ds) || len(sent) < len(ds)) && s.Now() < until; {
				m.Receive(func(from netip.AddrPort, data []byte, rx RX) {
					got[string(data)] = rx
					for _, d := range ds {
						if bytes.Equal(d.Data, data) && d.To != from {
							t.Errorf("%s came from %s, was sent to %s", data, from, d.To)
						}
					}
				})
				m.Sent(func(tx TX) { sent[tx.ID] = tx })
			}
			for i, d := range ds {
				rx, back := got[string(d.Data)]
				tx, stamped := sent[uint32(i)]
				if !back || !stamped {
					t.Fatalf("packet %d: reply %v, sending stamp %v", i, back, stamped)
				}
				if at := before[string(d.Data)]; tx.NS+tx.ErrNS < at || tx.NS-tx.ErrNS > rx.NS+rx.ErrNS || rx.NS-rx.ErrNS > s.Now() {
					t.Errorf("packet %d: handed over at %d, sent at %d ± %d, answered at %d ± %d", i, at, tx.NS, tx.ErrNS, rx.NS, rx.ErrNS)
				}
			}
		})
	}
}

func TestAFailedSendOfABatchNamesItsPeerAndStartsTheCountAnew(t *testing.T) {
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m := openMany(t, s, false)
	good := Datagram{To: echoes(t, "127.0.0.1"), Data: []byte("x")}
	bad := Datagram{To: netip.MustParseAddrPort("255.255.255.255:9"), Data: []byte("x")} // broadcast was not asked for
	if n, _, _, err := m.Send([]Datagram{good, bad, good}); n != 1 || err != nil {
		t.Fatalf("%d sent before the bad one, %v", n, err)
	}
	if n, _, _, err := m.Send([]Datagram{bad, good}); n != 0 || err == nil || !bytes.Contains([]byte(err.Error()), []byte("255.255.255.255:9")) {
		t.Fatalf("%d sent, error %v", n, err)
	}
	if n, _, first, err := m.Send([]Datagram{good}); n != 1 || first != 0 || err != nil {
		t.Errorf("then %d sent from id %d, %v", n, first, err)
	}
}

func TestABatchDropsStampsAcrossAWallClockStep(t *testing.T) {
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m := openMany(t, s, false)
	if _, _, _, err := m.Send([]Datagram{{To: echoes(t, "127.0.0.1"), Data: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	m.pair.wall -= 10_000 // as if the wall clock had been set forward since
	stepped := false
	for until := s.Now() + int64(patience); !stepped && s.Now() < until; {
		stepped = !m.Sent(func(tx TX) { t.Errorf("a stamp next to a step was mapped to %d", tx.NS) })
	}
	if !stepped {
		t.Error("the step was not seen")
	}
}
