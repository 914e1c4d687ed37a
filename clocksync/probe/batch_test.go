package probe

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/ntp/ntptest"
	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/clock"
)

// batch runs a batch for the length of the test.
func batch(t *testing.T, s *clock.Steady, key []byte) *Batch {
	t.Helper()
	b := NewBatch(s, key)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); b.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return b
}

func at(t *testing.T, r *respond.Responder) netip.AddrPort {
	t.Helper()
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), r.Addr().Port())
}

func TestABatchGivesEachPeerItsOwnExchanges(t *testing.T) {
	client := steady(t, clock.Options{})
	b := batch(t, client, []byte("k"))
	var wg sync.WaitGroup
	for i := range 100 { // more than one system call carries
		server := steady(t, clock.Options{FaultLie: time.Duration(i) * time.Millisecond})
		to := at(t, serve(t, server, respond.Options{Key: []byte("k")}))
		wg.Go(func() {
			for range 3 {
				x, err := b.burst(t.Context(), to, 3, patience)
				if err != nil {
					t.Errorf("peer %d: %v", i, err)
					return
				}
				if x.Peer != server.ID() || x.Local == nil || x.Remote == nil || len(x.Exchanges) < 3 {
					t.Errorf("peer %d: %+v", i, x)
				}
				for j := range x.Exchanges {
					x.Exchanges[j].ErrNS += server.AnchorErrNS() + client.AnchorErrNS()
				}
				check(t, x, -int64(i)*1_000_000)
			}
		})
	}
	wg.Wait()
}

func TestABatchTakesNoReplyOfAnotherAddressOrExchange(t *testing.T) {
	listen := func() *net.UDPConn {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	peer, stranger := listen(), listen()
	done := make(chan struct{})
	t.Cleanup(func() { peer.Close(); stranger.Close(); <-done })
	go func() {
		defer close(done)
		var in [128]byte
		for {
			n, from, err := peer.ReadFromUDPAddrPort(in[:])
			if err != nil {
				return
			}
			q, err := ntp.ParsePacket(in[:n], nil)
			if err != nil {
				continue
			}
			reply := func(c *net.UDPConn, p ntp.Packet) { _, _ = c.WriteToUDPAddrPort(p.Append(nil, nil), from) }
			reply(stranger, ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 1, T3: 1}) // knows the nonce, is not the peer
			reply(peer, ntp.Packet{Reply: true, Seq: q.Seq + 1, Epoch: 7, T2: 2, T3: 2}) // another exchange
			_, _ = peer.WriteToUDPAddrPort([]byte("noise"), from)
			reply(peer, q)                                                           // the request itself
			reply(peer, ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 5, T3: 6}) // the answer
			reply(peer, ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 8, T3: 9}) // a replay
		}
	}()
	b := batch(t, steady(t, clock.Options{}), nil)
	x, err := b.burst(t.Context(), peer.LocalAddr().(*net.UDPAddr).AddrPort(), 3, patience)
	if err != nil || len(x.Exchanges) != 3 {
		t.Fatalf("%+v %v", x, err)
	}
	for _, e := range x.Exchanges {
		if e.T2 != 5 || e.T3 != 6 {
			t.Errorf("took %+v", e)
		}
	}
}

func TestASilentPeerHoldsUpNobodyInItsBatch(t *testing.T) {
	silent, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	b := batch(t, steady(t, clock.Options{}), nil)
	r := serve(t, steady(t, clock.Options{}), respond.Options{})
	lost := make(chan error, 1)
	go func() {
		_, err := b.burst(t.Context(), silent.LocalAddr().(*net.UDPAddr).AddrPort(), 4, 500*time.Millisecond)
		lost <- err
	}()
	for range 5 {
		if _, err := b.burst(t.Context(), at(t, r), 2, patience); err != nil {
			t.Error(err)
		}
	}
	if err := <-lost; !errors.Is(err, ErrNoReply) {
		t.Errorf("the silent peer: %v, want %v", err, ErrNoReply)
	}
	// One that no packet can be sent to fails at once and leaves the others alone.
	if _, err := b.burst(t.Context(), netip.MustParseAddrPort("255.255.255.255:9"), 4, patience); !errors.Is(err, ErrNoReply) {
		t.Errorf("an address without a way: %v, want %v", err, ErrNoReply)
	}
	if x, err := b.burst(t.Context(), at(t, r), 2, patience); err != nil || len(x.Exchanges) < 2 {
		t.Errorf("after that: %+v %v", x, err)
	}
}

func TestAProberLeavesABatchThatHasEnded(t *testing.T) {
	server := steady(t, clock.Options{})
	r := serve(t, server, respond.Options{})
	client := steady(t, clock.Options{})
	b := NewBatch(client, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.Run(ctx)
	p := prober(t, client, Options{ClockAddr: r.Advertised("127.0.0.1"), Batch: b})
	p.udp.shared = at(t, r)
	if _, err := p.Burst(t.Context(), 2); !errors.Is(err, errBatch) {
		t.Errorf("error %v, want %v", err, errBatch)
	}
	for range 3 {
		if _, err := p.Burst(t.Context(), 2); err != nil {
			t.Errorf("with its own socket: %v", err)
		}
	}
}

func TestAPeerWithKernelStampsIsHandedToTheBatch(t *testing.T) {
	client := steady(t, clock.Options{})
	r := serve(t, steady(t, clock.Options{}), respond.Options{})
	p := prober(t, client, Options{ClockAddr: r.Advertised("127.0.0.1"), Batch: batch(t, client, nil)})
	for i := range 200 { // the kernel turns receive stamps on some milliseconds after it was asked
		x, err := p.Burst(t.Context(), 4)
		if err != nil {
			t.Fatalf("burst %d: %v", i, err)
		}
		if p.udp.shared.IsValid() {
			if p.udp.sock != nil {
				t.Error("its own socket is still open")
			}
			if x, err = p.Burst(t.Context(), 4); err != nil || x.Transport != UDPKernel {
				t.Errorf("by the batch: %s %v", x.Transport, err)
			}
			return
		}
	}
	t.Skip("the kernel gives no packet stamps here")
}

func TestAClockThatChangesWithinABurstProvesNothing(t *testing.T) {
	addr := ntptest.Answerer(t, func(n int, q ntp.Packet) ntp.Packet {
		return ntp.Packet{Reply: true, Seq: q.Seq, Epoch: uint64(7 + n%2), T2: 5, T3: 6}
	})
	client := steady(t, clock.Options{})
	if _, err := prober(t, client, Options{ClockAddr: addr}).Burst(t.Context(), 4); !errors.Is(err, ErrTwoClock) {
		t.Errorf("over its own socket: %v, want %v", err, ErrTwoClock)
	}
	if _, err := batch(t, client, nil).burst(t.Context(), netip.MustParseAddrPort(addr), 4, patience); !errors.Is(err, ErrTwoClock) {
		t.Errorf("by the batch: %v, want %v", err, ErrTwoClock)
	}
}

// A peer that answers nothing before all packets of a volley are there: sent one by one, they would never come.
func TestPacketsOfAVolleyAreSentAtOnceAndAskForEachOthersStamp(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	go func() {
		defer close(done)
		var qs []ntp.Packet
		var b [ntp.Size]byte
		for {
			n, from, err := c.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			q, err := ntp.ParsePacket(b[:n], nil)
			if err != nil {
				continue
			}
			if qs = append(qs, q); len(qs) < volley {
				continue
			}
			for i, q := range qs {
				p := ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: int64(10 * i), T3: int64(10*i + 1)}
				if i > 0 && q.PrevSeq == qs[i-1].Seq {
					p.HasPrevTX, p.PrevTX = true, int64(10*(i-1)+2)
				}
				_, _ = c.WriteToUDPAddrPort(p.Append(nil, nil), from)
			}
		}
	}()
	x, err := batch(t, steady(t, clock.Options{}), nil).burst(t.Context(), c.LocalAddr().(*net.UDPAddr).AddrPort(), volley, patience)
	if err != nil || x.Lost > 0 {
		t.Fatalf("%+v %v", x, err)
	}
	var t3 []int64
	for _, e := range x.Exchanges {
		t3 = append(t3, e.T3)
	}
	if want := []int64{1, 11, 2, 21, 12}; !slices.Equal(t3, want) {
		t.Errorf("exchanges with T3 %d, want %d", t3, want)
	}
}
