package kvwire

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/infer"
)

// fetchWith transfers one prompt between a sender and a receiver with these keys.
func fetchWith(t *testing.T, sender, receiver []byte) error {
	t.Helper()
	h := hello("f32", 16)
	p := start(t, h, h)
	defer p.stop()
	p.server.o.Key, p.client.o.Key = sender, receiver
	x := newPrefill(h, 20).run(10)
	o := p.offer(t, 5, x)
	o.Ready(someTrailer)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c := &cache{h: h, got: map[infer.Span][]byte{}}
	_, _, err := p.fetch(ctx, 5, 0, 20, c)
	if err == nil {
		c.check(t, 0, 20)
	} else if len(c.got) > 0 {
		t.Error("KV travelled to somebody who proved nothing")
	}
	o.Withdraw()
	return err
}

func TestOnlyThoseWhoKnowTheSecretExchangeKV(t *testing.T) {
	good, bad := []byte("0123456789abcdef"), []byte("fedcba9876543210")
	for name, k := range map[string]struct {
		sender, receiver []byte
		ok               bool
	}{
		"both know it":              {good, good, true},
		"neither has one":           {nil, nil, true},
		"the receiver has another":  {good, bad, false},
		"the receiver has none":     {good, nil, false},
		"the sender has none":       {nil, good, false},
		"the sender's key is empty": {[]byte{}, good, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if err := fetchWith(t, k.sender, k.receiver); (err == nil) != k.ok {
					t.Errorf("error %v, want success: %v", err, k.ok)
				}
			})
		})
	}
}

func TestProofsCannotBeReflectedOrReplayed(t *testing.T) {
	key := []byte("0123456789abcdef")
	a, b := newNonce(key), newNonce(key)
	p := prove(key, roleSender, a, b)
	if err := checkProof(key, roleSender, a, b, p); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"the other role":    checkProof(key, roleReceiver, a, b, p),
		"other nonces":      checkProof(key, roleSender, a, newNonce(key), p),
		"swapped nonces":    checkProof(key, roleSender, b, a, p),
		"a part":            checkProof(key, roleSender, a, b, p[:10]),
		"nothing":           checkProof(key, roleSender, a, b, ""),
		"an empty nonce":    checkProof(key, roleSender, "", b, prove(key, roleSender, "", b)),
		"nonces that slide": checkProof(key, roleSender, a+"\n"+b[:3], b[4:], p),
	} {
		if !errors.Is(err, ErrStranger) {
			t.Errorf("%s: %v, want ErrStranger", name, err)
		}
	}
}

func TestARequestBeforeTheProofIsNotServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hello("f32", 16)
		p := start(t, h, h)
		defer p.stop()
		p.server.o.Key = []byte("0123456789abcdef")
		o := p.offer(t, 5, newPrefill(h, 20).run(10))
		defer o.Withdraw()
		conn, err := p.ln.dial(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		l := newLink(conn, 1, time.Second)
		say := h
		say.Nonce = newNonce(p.server.o.Key)
		if err := l.sendJSON(TypeHello, 0, say); err != nil {
			t.Fatal(err)
		}
		if _, _, err := readFrame(l.r, nil, only(TypeHelloAck)); err != nil {
			t.Fatal(err)
		}
		if err := l.sendJSON(TypeRequest, 5, Want{DeadlineMS: 1000}); err != nil {
			t.Fatal(err)
		}
		if h, _, err := readFrame(l.r, nil, nil); err == nil {
			t.Errorf("got a frame of type %d, want the end of the connection", h.Type)
		}
	})
}

// What strangers send before they have proved anything: whatever it is, only the one right proof passes.
func FuzzProof(f *testing.F) {
	key := []byte("0123456789abcdef")
	receiver, sender := strings.Repeat("a", 2*nonceBytes), strings.Repeat("b", 2*nonceBytes)
	right := prove(key, roleReceiver, receiver, sender)
	f.Add([]byte(`{"proof":"` + right + `"}`))
	f.Add([]byte(`{"proof":"` + prove(key, roleSender, receiver, sender) + `"}`))
	f.Add([]byte(`{"proof":null}`))
	f.Add([]byte(`{"nonce":"` + receiver + `","proof":""}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := parseJSON[Proof](TypeProof, raw)
		if err != nil {
			if !errors.Is(err, ErrFrame) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		if err := checkProof(key, roleReceiver, receiver, sender, p.Proof); (err == nil) != (p.Proof == right) {
			t.Fatalf("proof %q: %v", p.Proof, err)
		}
		h, err := parseJSON[Hello](TypeHello, raw)
		if err != nil {
			return
		}
		// A receiver may choose its nonce, and send back what it was told: that proves nothing.
		if checkProof(key, roleReceiver, h.Nonce, sender, prove(key, roleSender, h.Nonce, sender)) == nil {
			t.Fatalf("nonce %q: the sender's own proof was taken for the receiver's", h.Nonce)
		}
	})
}
