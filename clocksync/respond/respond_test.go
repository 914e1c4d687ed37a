package respond

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

func steady(t testing.TB) *clock.Steady {
	t.Helper()
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func serve(t testing.TB, s *clock.Steady, o Options) *Responder {
	t.Helper()
	r, _ := serveUntil(t, s, o)
	return r
}

// serveUntil is serve with the end in the hands of the test: a reply is counted after it was sent, so that only a
// responder that has ended has counted all that a client got.
func serveUntil(t testing.TB, s *clock.Steady, o Options) (r *Responder, end func()) {
	t.Helper()
	r, err := Listen("127.0.0.1:0", s, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return r, end
}

func dial(t testing.TB, r *Responder) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(r.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

func ask(t testing.TB, c *net.UDPConn, q ntp.Packet) (ntp.Packet, int) {
	t.Helper()
	if _, err := c.Write(q.Append(nil, nil)); err != nil {
		t.Fatal(err)
	}
	var b [256]byte
	n, err := c.Read(b[:])
	if err != nil {
		t.Fatal(err)
	}
	p, err := ntp.ParsePacket(b[:n], nil)
	if err != nil {
		t.Fatal(err)
	}
	return p, n
}

func TestRepliesSayWhoseClockItIsAndWhen(t *testing.T) {
	s := steady(t)
	r := serve(t, s, Options{})
	c := dial(t, r)
	epoch, instance, err := s.ID().Words()
	if err != nil {
		t.Fatal(err)
	}
	before := s.Now()
	p, n := ask(t, c, ntp.Packet{Seq: 7})
	after := s.Now()
	if !p.Reply || p.Seq != 7 || p.Epoch != epoch || p.Instance != instance || !p.HasPair || p.HasPrevTX || n != ntp.Size {
		t.Errorf("reply %+v of %d bytes", p, n)
	}
	e := int64(p.ErrNS)
	if p.T2 < before-e || p.T2 > p.T3+e || p.T3 > after {
		t.Errorf("stamps %d %d (± %d) outside [%d, %d]", p.T2, p.T3, e, before, after)
	}
}

func TestTheSendingStampOfAReplyComesWithTheNextOne(t *testing.T) {
	r := serve(t, steady(t), Options{})
	if !r.sock.Kernel() {
		t.Skip("the kernel gives no packet stamps here")
	}
	c := dial(t, r)
	first, _ := ask(t, c, ntp.Packet{Seq: 100})
	second, _ := ask(t, c, ntp.Packet{Seq: 101, PrevSeq: 100})
	if !second.HasPrevTX || second.PrevTX < first.T3-int64(second.ErrNS) || second.PrevTX > second.T2+int64(second.ErrNS) {
		t.Errorf("previous reply sent at %d (%v), between %d and %d expected", second.PrevTX, second.HasPrevTX, first.T3, second.T2)
	}
	if third, _ := ask(t, c, ntp.Packet{Seq: 102, PrevSeq: 100}); third.HasPrevTX {
		t.Error("a stamp was given for an exchange that is not the previous one")
	}
	if other, _ := ask(t, dial(t, r), ntp.Packet{Seq: 103, PrevSeq: 102}); other.HasPrevTX {
		t.Error("a client got the stamp of another's reply")
	}
}

func TestStrangersGetNoAnswerAndDoNoHarm(t *testing.T) {
	r, end := serveUntil(t, steady(t), Options{})
	c := dial(t, r)
	for _, b := range [][]byte{{}, {1}, make([]byte, ntp.Size), make([]byte, 1400), ntp.Packet{Reply: true, Seq: 1}.Append(nil, nil), ntp.Packet{Seq: 2}.Append(nil, []byte("key"))} {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	p, _ := ask(t, c, ntp.Packet{Seq: 9})
	if p.Seq != 9 {
		t.Errorf("the first answer is to seq %d", p.Seq)
	}
	end()
	if n := r.Counters(); n.Replies != 1 || n.Foreign != 6 || n.Errors != 0 {
		t.Errorf("counters %+v", n)
	}
}

func TestWhatIsRememberedOfClientsIsBounded(t *testing.T) {
	r, err := Listen("127.0.0.1:0", steady(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.sock.Conn().Close()
	for i := range 3 * maxClients {
		r.remember(uint32(i), sent{to: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1), seq: uint32(i)})
	}
	if len(r.clients) > maxClients || len(r.order) > maxClients || len(r.pending) > maxClients {
		t.Errorf("%d clients, %d in order, %d pending", len(r.clients), len(r.order), len(r.pending))
	}
}

func TestAnUnusableAddressIsNamed(t *testing.T) {
	for _, a := range []string{"nonsense", "127.0.0.1:99999"} {
		if _, err := Listen(a, steady(t), Options{}); err == nil {
			t.Errorf("%q was accepted", a)
		}
	}
}

func TestTheAdvertisedAddressHasTheRealPort(t *testing.T) {
	r := serve(t, steady(t), Options{})
	if got, want := r.Advertised("node-1"), net.JoinHostPort("node-1", ""); got == want || got[:7] != "node-1:" {
		t.Errorf("advertised %q", got)
	}
}

// A path may duplicate a request, and somebody may send it again. The sender takes the first reply: if the stamp of a later one were told
// as the time that it left, it would have come before it was sent.
func TestTheStampOfAReplyIsThatOfTheFirstOne(t *testing.T) {
	s := steady(t)
	r := serve(t, s, Options{})
	if !r.sock.Kernel() {
		t.Skip("the kernel gives no packet stamps here")
	}
	c := dial(t, r)
	ask(t, c, ntp.Packet{Seq: 100})
	came := s.Now()
	ask(t, c, ntp.Packet{Seq: 100})
	next, _ := ask(t, c, ntp.Packet{Seq: 101, PrevSeq: 100})
	if next.HasPrevTX && next.PrevTX > came+int64(next.ErrNS) {
		t.Errorf("the reply that came at %d was sent at %d, as is said", came, next.PrevTX)
	}
	ask(t, c, ntp.Packet{Seq: 100}) // once more, when another exchange has followed
	last, _ := ask(t, c, ntp.Packet{Seq: 101, PrevSeq: 100})
	if last.HasPrevTX && last.PrevTX > came+int64(last.ErrNS) {
		t.Errorf("the reply that came at %d was sent at %d, as is said", came, last.PrevTX)
	}
}
