package kvwire

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/infer"
)

// A stranger that sends a byte now and then holds no slot of the listener for longer than a handshake may take in all.
func TestADrippingStrangerIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		c, err := p.ln.dial(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		begun := time.Now()
		for _, b := range AppendHeader(nil, Header{Type: TypeHello}, make([]byte, 1000)) {
			if _, err := c.Write([]byte{b}); err != nil {
				return
			}
			if d := time.Since(begun); d > 2*p.server.o.Timing.Handshake {
				t.Fatalf("open after %v; the handshake may take %v", d, p.server.o.Timing.Handshake)
			}
			time.Sleep(p.server.o.Timing.Handshake * 3 / 4)
		}
	})
}

// Everything is with a receiver that goes on to ping and never acknowledges, and the sender withdraws: the offer ends.
func TestAWithdrawnOfferThatNobodyAcknowledgesEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		o := p.offer(t, 1, newPrefill(p.server.o.Hello, 32).run(32))
		o.Ready(someTrailer)
		tr, err := p.client.Open(t.Context(), "ctx0", 1) // it pings from here on
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		if err := tr.Request(t.Context(), 0, 5*time.Second); err != nil {
			t.Fatal(err)
		}
		go swallow(tr.l.conn)
		time.Sleep(time.Second)
		o.Withdraw()
		time.Sleep(2 * p.server.o.Timing.Lost)
		select {
		case <-o.Done():
		default:
			t.Error("it has not ended")
		}
	})
}

// A claim's time is over in the moment in which the receiver asks for what it claimed: whoever wins, the offer ends and its room
// comes back.
func TestARequestInTheMomentInWhichItsClaimEnds(t *testing.T) {
	for range 300 {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, hello("f32", 16), hello("f32", 16))
			defer p.stop()
			p.server.room = newRoom(4, 16)
			x := newPrefill(p.server.o.Hello, 64).run(16)
			e, err := p.server.Lease(t.Context(), 64, func() (Export, error) { return x, nil })
			if err != nil {
				t.Fatal(err)
			}
			o := p.offer(t, 1, e)
			o.Ready(someTrailer)
			tr, err := p.client.Open(t.Context(), "ctx0", 1)
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.Claim(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			time.Sleep(p.server.lease)
			if err := tr.Request(t.Context(), 0, time.Minute); err == nil {
				_, _ = tr.Receive(t.Context(), 64, &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}})
			}
			tr.Close()
			time.Sleep(time.Minute)
			select {
			case <-o.Done():
			default:
				t.Error("a minute later the offer has not ended")
				o.finish(ErrClosed)
			}
		})
	}
}

// swallow reads what comes and answers nothing.
func swallow(c net.Conn) {
	b := make([]byte, 1<<14)
	for {
		if _, err := c.Read(b); err != nil {
			return
		}
	}
}

// receivers are peers that send frames as they please.
type receivers struct {
	t      *testing.T
	p      *pair
	rng    *rand.Rand
	conns  []net.Conn
	offers []*Offer
	id     int64

	mu      sync.Mutex // guards what follows
	exports []*prefill
}

// TestWhateverReceiversDoEveryOfferEnds: at the end each export was released once, and the room for leases is free.
func TestWhateverReceiversDoEveryOfferEnds(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			r := &receivers{t: t, p: start(t, hello("f32", 16), hello("f32", 16)), rng: rand.New(rand.NewPCG(seed, 5))}
			defer r.p.stop()
			lends := rand.New(rand.NewPCG(seed, 6))
			r.p.server.o.Lend = func([]int32) (Export, int) {
				r.mu.Lock()
				defer r.mu.Unlock()
				if lends.IntN(3) == 0 {
					return nil, 0
				}
				x := newPrefill(r.p.server.o.Hello, 32).run(16)
				r.exports = append(r.exports, x)
				return x, 32
			}
			r.open()
			for range 60 {
				r.step()
			}
			time.Sleep(15 * time.Second)
			for _, o := range r.offers {
				o.settle(someTrailer, nil)
			}
			time.Sleep(15 * time.Second)
			r.ended(seed)
			for _, c := range r.conns {
				_ = c.Close()
			}
		})
	}
}

func (r *receivers) ended(seed uint64) {
	for i, o := range r.offers {
		select {
		case <-o.Done():
		default:
			r.t.Errorf("seed %d: offer %d of request %d has not ended", seed, i, o.id)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, x := range r.exports {
		if n := x.released.Load(); n != 1 {
			r.t.Errorf("seed %d: export %d was released %d times", seed, i, n)
		}
	}
	if !r.p.server.room.all.TryAcquire(r.p.server.room.limit) {
		r.t.Errorf("seed %d: room for leases is held", seed)
	}
}

func (r *receivers) open() {
	c, err := r.p.ln.dial(r.t.Context(), "")
	if err != nil {
		r.t.Fatal(err)
	}
	go swallow(c)
	h := hello("f32", 16)
	r.send(c, Header{Type: TypeHello}, fmt.Appendf(nil, `{"node":"x","model_hash":%q,"layers":%d,"kv_heads":%d,"head_size":%d,"rope":%q,"kv_type":%q,"tokens_per_block":%d,"ranks":1,"stages":1}`,
		h.ModelHash, h.Layers, h.KVHeads, h.HeadSize, h.RoPE, h.KVType, h.TokensPerBlock))
	r.conns = append(r.conns, c)
}

func (r *receivers) send(c net.Conn, h Header, payload []byte) {
	h.Epoch = 3
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = c.Write(append(AppendHeader(nil, h, payload), payload...)) // it may be closed
}

func (r *receivers) step() {
	switch r.rng.IntN(5) {
	case 0:
		r.offer()
	case 1:
		if len(r.offers) > 0 {
			o := r.offers[r.rng.IntN(len(r.offers))]
			[...]func(){o.Withdraw, func() { o.Ready(someTrailer) }, func() { o.Fail(errors.New("late")) }}[r.rng.IntN(3)]()
		}
	case 2:
		if r.rng.IntN(4) == 0 {
			r.open()
		}
		if r.rng.IntN(6) == 0 {
			_ = r.conns[r.rng.IntN(len(r.conns))].Close()
		}
	default:
		r.frame()
	}
	if r.rng.IntN(3) == 0 {
		time.Sleep(time.Duration(r.rng.IntN(700)) * time.Millisecond)
	}
	if r.rng.IntN(6) == 0 {
		r.id++
	}
}

// offer offers KV, leased if there is room, and prefills it, or not.
func (r *receivers) offer() {
	s := r.p.server
	x := newPrefill(s.o.Hello, 32)
	var e Export = x
	if r.rng.IntN(2) == 0 && s.room.all.TryAcquire(1) {
		s.room.all.Release(1)
		var err error
		if e, err = s.Lease(context.Background(), 16, func() (Export, error) { return x, nil }); err != nil {
			r.t.Fatal(err)
		}
	}
	o, err := s.Offer(r.id+r.rng.Int64N(3), e)
	if err != nil { // there is one of this id
		e.Release()
		return
	}
	r.mu.Lock()
	r.exports = append(r.exports, x)
	r.mu.Unlock()
	r.offers = append(r.offers, o)
	switch r.rng.IntN(4) {
	case 0:
		x.failed <- errors.New("boom")
		o.Fail(errors.New("boom"))
	case 1:
		x.run(16)
	default:
		x.run(16)
		o.Ready(someTrailer)
	}
}

func (r *receivers) frame() {
	h := Header{Request: r.id + r.rng.Int64N(3), TokenFrom: uint32(r.rng.IntN(40)), TokenTo: uint32(r.rng.IntN(40))}
	var payload []byte
	switch r.rng.IntN(8) {
	case 0, 1:
		h.Type = TypeClaim
	case 2, 3:
		h.Type = TypeRequest
		payload = fmt.Appendf(nil, `{"token_from":%d,"deadline_ms":%d}`, r.rng.IntN(40), 1+r.rng.IntN(3000))
	case 4:
		h.Type = TypeAck
	case 5:
		h.Type = TypeCancel
	case 6:
		h.Type = TypeFetch
		payload = make([]byte, 4*r.rng.IntN(50))
	case 7:
		h.Type = TypePing
	}
	r.send(r.conns[r.rng.IntN(len(r.conns))], h, payload)
}

func TestAServerThatHasEndedSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		p.stop()
		if _, err := p.server.take(t.Context(), 1); !errors.Is(err, ErrClosed) {
			t.Errorf("to ask gives %v", err)
		}
		if _, err := p.server.Offer(1, newPrefill(p.server.o.Hello, 100)); !errors.Is(err, ErrClosed) {
			t.Errorf("to offer gives %v", err)
		}
	})
}
