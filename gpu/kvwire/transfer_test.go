package kvwire

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/infer"
)

func TestOnlyWhatTheReceiverLacksTravels(t *testing.T) {
	for _, from := range []int{0, 16, 37, 99} {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, hello("f32", 16), hello("f16", 32))
			defer p.stop()
			x := newPrefill(p.server.o.Hello, 100).run(30)
			o := p.offer(t, 1, x)
			o.Ready(someTrailer)
			sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
			tr, rep, err := p.fetch(t.Context(), 1, from, 100, sink)
			if err != nil || tr.First[0].ID != 42 {
				t.Fatalf("got %+v, %v", tr, err)
			}
			sink.check(t, from, 100)
			<-o.Done()
			if sent, err := o.Result(); err != nil || sent.Bytes != rep.Bytes || sent.Bytes != int64(spanBytes(p.server.o.Hello, infer.Span{LayerTo: 3, TokenFrom: from, TokenTo: 100})) || sent.Tokens != 100-from || rep.Tokens != 100-from || sent.TokensHeld != from {
				t.Errorf("sender reports %+v, %v; receiver %+v", sent, err, rep)
			}
			if x.released.Load() != 1 {
				t.Errorf("released %d times", x.released.Load())
			}
		})
	}
}

func TestARequestMayComeBeforeItsPrefillAndSeesItRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
		done := make(chan error, 1)
		go func() {
			_, _, err := p.fetch(t.Context(), 5, 0, 64, sink)
			done <- err
		}()
		time.Sleep(20 * time.Second) // bubble time: only pings pass
		x := newPrefill(p.server.o.Hello, 64)
		o := p.offer(t, 5, x)
		for l := range 3 {
			x.spans <- infer.Span{LayerFrom: l, LayerTo: l + 1, TokenTo: 32}
		}
		synctest.Wait()
		sink.check(t, 0, 32) // the first chunk is there while the second has not begun
		x.spans <- infer.Span{LayerTo: 3, TokenFrom: 32, TokenTo: 64}
		close(x.spans)
		time.Sleep(3 * time.Second)
		o.Ready(someTrailer)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		sink.check(t, 0, 64)
	})
}

func TestAnOfferEndsWithAReason(t *testing.T) {
	boom := errors.New("device lost")
	for _, c := range []struct {
		name   string
		run    func(p *pair, o *Offer, x *prefill) error // what the receiver sees
		server error
		client string
	}{
		{"nobody asks in time", func(p *pair, o *Offer, _ *prefill) error {
			o.Ready(someTrailer)
			time.Sleep(6 * time.Second)
			return nil
		}, ErrUnclaimed, ""},
		{"it is withdrawn before anybody asks", func(_ *pair, o *Offer, _ *prefill) error { o.Withdraw(); return nil }, ErrWithdrawn, ""},
		{"prefill fails before anybody asks", func(_ *pair, o *Offer, _ *prefill) error { o.Fail(boom); return nil }, boom, ""},
		{"prefill fails under a receiver", func(p *pair, o *Offer, x *prefill) error {
			time.AfterFunc(time.Second, func() { x.failed <- boom })
			_, _, err := p.fetch(context.Background(), 1, 0, 64, &cache{got: map[infer.Span][]byte{}})
			return err
		}, boom, "device lost"},
		{"it is withdrawn under a receiver", func(p *pair, o *Offer, _ *prefill) error {
			time.AfterFunc(time.Second, o.Withdraw)
			_, _, err := p.fetch(context.Background(), 1, 0, 64, &cache{got: map[infer.Span][]byte{}})
			return err
		}, ErrWithdrawn, "withdrawn"},
		{"the receiver gives up", func(p *pair, _ *Offer, _ *prefill) error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, _, err := p.fetch(ctx, 1, 0, 64, &cache{got: map[infer.Span][]byte{}})
			return err
		}, ErrReceiverLost, "deadline"},
		{"the receiver cannot install", func(p *pair, _ *Offer, x *prefill) error {
			x.spans <- infer.Span{LayerTo: 3, TokenTo: 64}
			_, _, err := p.fetch(context.Background(), 1, 0, 64, &cache{fail: errors.New("no room")})
			return err
		}, ErrReceiverLost, "no room"},
		{"a claim is given up", func(p *pair, o *Offer, _ *prefill) error {
			o.Ready(someTrailer)
			tr, err := p.client.Open(context.Background(), "ctx0", 1)
			if err != nil {
				return err
			}
			if err := tr.Claim(context.Background()); err != nil {
				return err
			}
			time.Sleep(time.Minute)
			tr.Close()
			return nil
		}, ErrReceiverLost, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, hello("f32", 16), hello("f32", 16))
			defer p.stop()
			x := newPrefill(p.server.o.Hello, 64)
			o := p.offer(t, 1, x)
			err := c.run(p, o, x)
			if (c.client == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.client) {
				t.Errorf("%s: the receiver sees %v, want %q", c.name, err, c.client)
			}
			<-o.Done()
			if _, err := o.Result(); !errors.Is(err, c.server) {
				t.Errorf("%s: the offer ended with %v, want %v", c.name, err, c.server)
			}
			if x.released.Load() != 1 {
				t.Errorf("%s: released %d times", c.name, x.released.Load())
			}
		})
	}
}

func TestAVanishedPeerIsNoticedByItsSilence(t *testing.T) {
	for _, vanished := range []string{"the receiver", "the sender", "both"} {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, hello("f32", 16), hello("f32", 16))
			defer p.stop()
			at := time.Now().Add(2 * time.Second)
			p.client.o.Dial = func(context.Context, string) (net.Conn, error) {
				a, b := net.Pipe()
				if vanished != "the sender" {
					a = &mute{Conn: a, at: at}
				}
				if vanished != "the receiver" {
					b = &mute{Conn: b, at: at}
				}
				p.ln.conns <- b
				return a, nil
			}
			x := newPrefill(p.server.o.Hello, 64)
			o := p.offer(t, 1, x)
			began := time.Now()
			_, _, err := p.fetch(t.Context(), 1, 0, 64, &cache{got: map[infer.Span][]byte{}})
			if took := time.Since(began); err == nil || took > 4*time.Second {
				t.Errorf("%s vanished: the receiver saw %v after %s", vanished, err, took)
			}
			<-o.Done()
			if took := time.Since(began); took > 4*time.Second {
				t.Errorf("%s vanished: the sender noticed after %s", vanished, took)
			}
		})
	}
}

// mute is a connection that loses everything after a time, without an end.
type mute struct {
	net.Conn
	at time.Time
}

func (m *mute) Write(b []byte) (int, error) {
	if time.Now().After(m.at) {
		return len(b), nil
	}
	return m.Conn.Write(b)
}

// flipping is a connection that turns one bit of what it reads, so many bytes from its beginning.
type flipping struct {
	net.Conn
	at int
}

func (f *flipping) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	if f.at >= 0 && f.at < n {
		p[f.at] ^= 8
	}
	f.at -= n
	return n, err
}

func TestABitThatTurnedOnTheWayIsNotInstalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		x := newPrefill(p.server.o.Hello, 64).run(64)
		o := p.offer(t, 1, x)
		o.Ready(someTrailer)
		dial := p.client.o.Dial
		p.client.o.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := dial(ctx, addr)
			return &flipping{c, 2000}, err // in the payload of the first of three KV frames: hello and its answer have some hundred bytes
		}
		sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
		_, _, err := p.fetch(t.Context(), 1, 0, 64, sink)
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), "checksum") || len(sink.got) > 0 {
			t.Errorf("%v, %d spans were installed", err, len(sink.got))
		}
		<-o.Done()
		if _, err := o.Result(); err == nil {
			t.Error("the offer ended as if all had been taken")
		}
	})
}

// TestFramesOfAnotherProcessAreRefused: what another incarnation of the sender says on a connection is none of its business.
func TestFramesOfAnotherProcessAreRefused(t *testing.T) {
	h := hello("f32", 16)
	tr := &Transfer{c: &Client{o: ClientOptions{Hello: h}}, l: &peerLink{link: &link{}, peer: h, peerEpoch: 7}, id: 3}
	r := &receiver{t: tr, prompt: 100}
	for _, kind := range []Type{TypePing, TypeTrailer, TypeError} {
		for epoch, ok := range map[uint64]bool{7: true, 8: false, 0: false} {
			if err := r.accept(Header{Type: kind, Request: 3, Epoch: epoch}); (err == nil) != ok || err != nil && !errors.Is(err, ErrFrame) {
				t.Errorf("type %d of epoch %d on a connection of epoch 7: %v", kind, epoch, err)
			}
		}
	}
}

func TestAnIncompatiblePairIsRefusedWithTheReason(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*Hello)
		want string
	}{
		{"another model", func(h *Hello) { h.ModelHash = "x" }, "model hash is"},
		{"another number of layers", func(h *Hello) { h.Layers = 4 }, "layers is"},
		{"another number of KV heads", func(h *Hello) { h.KVHeads = 1 }, "KV heads is"},
		{"another head size", func(h *Hello) { h.HeadSize = 8 }, "head size is"},
		{"another rotation", func(h *Hello) { h.RoPE = "yarn" }, "RoPE is"},
		{"a KV type that cannot be converted", func(h *Hello) { h.KVType = "f8e4m3" }, "KV type"},
		{"a block size of nothing", func(h *Hello) { h.TokensPerBlock = 0 }, "tokens per block"},
	} {
		synctest.Test(t, func(t *testing.T) {
			other := hello("f32", 16)
			c.edit(&other)
			p := start(t, hello("f32", 16), other)
			defer p.stop()
			_, err := p.client.Open(t.Context(), "ctx0", 1)
			if !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: got %v, want a refusal that says %q", c.name, err, c.want)
			}
		})
	}
}

func TestAClaimHoldsTheLeaseUntilTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		o := p.offer(t, 1, newPrefill(p.server.o.Hello, 64).run(64))
		o.Ready(someTrailer)
		tr, err := p.client.Open(t.Context(), "ctx0", 1)
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		if err := tr.Claim(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // far beyond the lease
		if err := tr.Request(t.Context(), 16, time.Second); err != nil {
			t.Fatal(err)
		}
		sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
		if _, err := tr.Receive(t.Context(), 64, sink); err != nil {
			t.Fatal(err)
		}
		sink.check(t, 16, 64)
	})
}

// A receiver may wait long for room before it asks.
func TestAConnectionIsKeptForARequestThatComesLate(t *testing.T) {
	for name, ask := range map[string]func(context.Context, *Transfer) error{
		"request": func(ctx context.Context, tr *Transfer) error { return tr.Request(ctx, 0, time.Minute) },
		"fetch":   func(ctx context.Context, tr *Transfer) error { return tr.Fetch(ctx, make([]int32, 64), 0) },
	} {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, hello("f32", 16), hello("f32", 16))
			defer p.stop()
			lending(p, 64)
			tr, err := p.client.Open(t.Context(), "ctx0", 1)
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Close()
			time.Sleep(time.Minute) // far beyond what an idle connection lives
			if err := ask(t.Context(), tr); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if name == "request" {
				p.offer(t, 1, newPrefill(p.server.o.Hello, 64).run(64)).Ready(someTrailer)
			}
			sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
			if _, err := tr.Receive(t.Context(), 64, sink); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			sink.check(t, 0, 64)
		})
	}
}

// TestAClaimOfMostOfTheBlocksEndsWithTheLease: of two nodes that serve both schedules each could hold what the other waits for.
func TestAClaimOfMostOfTheBlocksEndsWithTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		p.server.room = newRoom(8, 16)
		for tokens, holds := range map[int]bool{64: true, 65: false} {
			x, err := p.server.Lease(t.Context(), tokens, func() (Export, error) { return newPrefill(p.server.o.Hello, tokens).run(64), nil })
			if err != nil {
				t.Fatal(err)
			}
			o := p.offer(t, int64(tokens), x)
			o.Ready(someTrailer)
			tr, err := p.client.Open(t.Context(), "ctx0", int64(tokens))
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.Claim(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(p.server.lease + time.Second)
			synctest.Wait()
			select {
			case <-o.Done():
				if _, err := o.Result(); holds || !errors.Is(err, ErrReceiverLost) {
					t.Errorf("%d tokens: the claim ended: %v", tokens, err)
				}
			default:
				if !holds {
					t.Errorf("%d tokens: the claim goes on though it holds most of the blocks", tokens)
				}
			}
			tr.Close()
			<-o.Done()
			if !p.server.room.all.TryAcquire(4) {
				t.Errorf("%d tokens: room is not back", tokens)
			}
			p.server.room.all.Release(4)
		}
	})
}

func TestConnectionsAreKeptAndServeOneTransferAfterAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		dials := 0
		p.client.o.Dial = func(ctx context.Context, addr string) (net.Conn, error) { dials++; return p.ln.dial(ctx, addr) }
		for id := range int64(20) {
			p.offer(t, id, newPrefill(p.server.o.Hello, 40).run(16)).Ready(someTrailer)
			if _, _, err := p.fetch(t.Context(), id, 0, 40, &cache{got: map[infer.Span][]byte{}}); err != nil {
				t.Fatal(err)
			}
		}
		if dials != 1 {
			t.Errorf("%d connections for 20 transfers, want 1", dials)
		}
	})
}

// closing tells when a connection is closed by this side.
type closing struct {
	net.Conn
	once sync.Once
	open *atomic.Int32
}

func (c *closing) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// TestIdleConnectionsToAPeerThatIsAskedNoMoreAreClosed: without a further transfer nothing else would close our side of them.
func TestIdleConnectionsToAPeerThatIsAskedNoMoreAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		var open atomic.Int32
		p.client.o.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := p.ln.dial(ctx, addr)
			open.Add(1)
			return &closing{Conn: c, open: &open}, err
		}
		transfer := func(id int64) *Transfer {
			p.offer(t, id, newPrefill(p.server.o.Hello, 40).run(16)).Ready(someTrailer)
			tr, err := p.client.Open(t.Context(), "ctx0", id)
			if err != nil {
				t.Fatal(err)
			}
			if err = tr.Request(t.Context(), 0, time.Minute); err == nil {
				_, err = tr.Receive(t.Context(), 40, &cache{got: map[infer.Span][]byte{}})
			}
			if err != nil {
				t.Fatal(err)
			}
			return tr
		}
		for _, tr := range []*Transfer{transfer(1), transfer(2), transfer(3)} {
			tr.Close()
		}
		time.Sleep(p.client.o.Timing.Idle / 4)
		transfer(4).Close() // this one's is used last
		if n := open.Load(); n != 3 {
			t.Errorf("%d connections are open after transfers, want 3", n)
		}
		time.Sleep(p.client.o.Timing.Idle / 4)
		synctest.Wait()
		if n := open.Load(); n != 1 {
			t.Errorf("%d connections are open when all but one were idle for long, want 1", n)
		}
		time.Sleep(p.client.o.Timing.Idle)
		synctest.Wait()
		if n := open.Load(); n != 0 {
			t.Errorf("%d connections are open after an idle time, want 0", n)
		}
	})
}

// remembering is a listener that tells of its connections.
type remembering struct {
	net.Listener
	accepted chan net.Conn
}

func (r *remembering) Accept() (net.Conn, error) {
	c, err := r.Listener.Accept()
	if err == nil {
		r.accepted <- c
	}
	return c, err
}

// startTCP serves on the loopback network.
func startTCP(t *testing.T) (s *Server, c *Client, ln *remembering) {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Skip("no loopback network: " + err.Error())
	}
	ln = &remembering{tcp, make(chan net.Conn, 1000)}
	log, h := slog.New(slog.DiscardHandler), hello("f32", 16)
	now := func() int64 { return time.Now().UnixNano() }
	s = NewServer(ServerOptions{Hello: h, Epoch: 7, Now: now, Logger: log, Lease: time.Minute, Timing: patient})
	c = NewClient(ClientOptions{Hello: h, Epoch: 8, Now: now, Logger: log, Timing: patient})
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(ctx, ln) })
	t.Cleanup(func() {
		c.Close()
		cancel()
		serving.Wait()
	})
	return s, c, ln
}

// TestAKeptConnectionThatItsSenderClosedIsNotUsed: the first transfer after an idle time goes well, whatever has closed the
// connection meanwhile.
func TestAKeptConnectionThatItsSenderClosedIsNotUsed(t *testing.T) {
	s, c, ln := startTCP(t)
	p := &pair{server: s, client: c}
	for id := range int64(3) {
		p.offer(t, id, newPrefill(s.o.Hello, 40).run(16)).Ready(someTrailer)
		tr, err := c.Open(t.Context(), ln.Addr().String(), id)
		if err != nil {
			t.Fatal(err)
		}
		if err = tr.Request(t.Context(), 0, time.Minute); err == nil {
			_, err = tr.Receive(t.Context(), 40, &cache{got: map[infer.Span][]byte{}})
		}
		if err != nil {
			t.Errorf("transfer %d: %v", id, err)
		}
		l := tr.l
		tr.Close()
		if len(ln.accepted) != 1 {
			t.Fatalf("transfer %d used %d new connections, want 1", id, len(ln.accepted))
		}
		_ = (<-ln.accepted).Close()
		for end := time.Now().Add(20 * time.Second); silent(l.conn) && time.Now().Before(end); { // until the end of it is here
			time.Sleep(time.Millisecond)
		}
	}
}

func TestRandomBreaksHarmNoOtherTransfer(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	s, c, ln := startTCP(t)
	ctx, h := t.Context(), s.o.Hello
	var work sync.WaitGroup
	offers := make([]*Offer, 100)
	for id := range offers {
		x := newPrefill(h, 90).run(20)
		o, err := s.Offer(int64(id), x)
		if err != nil {
			t.Fatal(err)
		}
		o.Ready(someTrailer)
		offers[id] = o
		broken, frames := r.IntN(3) == 0, r.IntN(20) // that came before the break; there are 16 at most, with the trailer
		work.Go(func() {
			tr, err := c.Open(ctx, ln.Addr().String(), int64(id))
			if err != nil {
				t.Error(err)
				return
			}
			defer tr.Close()
			sink := &cache{h: h, got: map[infer.Span][]byte{}}
			err = tr.Request(ctx, 0, time.Minute)
			if broken {
				for i := 0; i < frames && err == nil; i++ {
					var h Header
					if h, _, err = readFrame(tr.l.r, nil, nil); h.Type == TypeTrailer {
						break // all is here, and its sender does not hear so
					}
				}
				_ = tr.l.conn.Close()
			} else if err == nil {
				_, err = tr.Receive(ctx, 90, sink)
			}
			if !broken {
				if err != nil {
					t.Errorf("transfer %d: %v", id, err)
				}
				sink.check(t, 0, 90)
			}
		})
	}
	work.Wait()
	for id, o := range offers {
		select {
		case <-o.Done():
		case <-time.After(30 * time.Second):
			t.Fatalf("offer %d has not ended", id)
		}
	}
}

// The acknowledgement of a transfer may arrive just after its sender withdrew: all was sent, so it is a success and the
// connection serves on. Both ends of the wait are ready then, and neither may be taken by chance.
func TestAnAcknowledgementCountsAfterAWithdrawal(t *testing.T) {
	for id := range int64(50) {
		h := hello("f32", 16)
		s := NewServer(ServerOptions{Hello: h, Now: func() int64 { return 1 }, Logger: slog.New(slog.DiscardHandler)})
		o, err := s.Offer(id, newPrefill(h, 10).run(10))
		if err != nil {
			t.Fatal(err)
		}
		_, cancel := context.WithCancelCause(t.Context())
		if !o.claim(cancel) {
			t.Fatal("an offer that nobody has was not to be had")
		}
		n := &session{s: s, offer: o, cancel: cancel, ended: make(chan struct{}), sent: make(chan *Offer, 1)}
		n.sent <- o
		o.Withdraw()
		close(n.ended)
		if err := n.acknowledge(id); err != nil {
			t.Fatal(err)
		}
		<-o.Done()
		if _, err := o.Result(); err != nil {
			t.Fatal(err)
		}
	}
}
