package kvwire

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/infer"
)

// lending makes a server that has the first so many tokens of every prompt cached.
func lending(p *pair, have int) (asked *[]int32, lent **prefill) {
	asked, lent = new([]int32), new(*prefill)
	p.server.o.Lend = func(tokens []int32) (Export, int) {
		*asked = tokens
		if have == 0 {
			return nil, 0
		}
		*lent = newPrefill(p.server.o.Hello, have).run(have)
		return *lent, have
	}
	return asked, lent
}

func TestAPeerLendsWhatItHasCached(t *testing.T) {
	prompt := make([]int32, 96)
	for i := range prompt {
		prompt[i] = int32(i) - 5
	}
	for _, c := range []struct {
		name             string
		have, held, want int
		fails            bool
	}{
		{"all of it", 96, 0, 96, false},
		{"the part that is lacking", 96, 32, 96, false},
		{"less than the prompt", 64, 32, 64, false},
		{"no more than is there already", 32, 32, 0, true},
		{"nothing", 0, 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := start(t, hello("f32", 16), hello("f16", 32))
				defer p.stop()
				asked, lent := lending(p, c.have)
				sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
				for range 2 { // the connection serves again, also after a refusal
					clear(sink.got)
					tr, err := p.client.Open(t.Context(), "gen1", 5)
					if err != nil {
						t.Fatal(err)
					}
					if err := tr.Fetch(t.Context(), prompt, c.held); err != nil {
						t.Fatal(err)
					}
					trailer, err := tr.Receive(t.Context(), len(prompt), sink)
					tr.Close()
					if (err != nil) != c.fails || c.fails && !errors.Is(err, ErrRemote) {
						t.Fatalf("%+v, %v", trailer, err)
					}
					if !slices.Equal(*asked, prompt) {
						t.Errorf("asked for %v", *asked)
					}
					if c.fails {
						continue
					}
					sink.check(t, c.held, c.want)
					if r := tr.Report(); trailer.PromptTokens != c.want || r.Tokens != c.want-c.held || r.TokensHeld != c.held || r.Peer != "n" {
						t.Errorf("%+v, %+v", trailer, r)
					}
				}
				synctest.Wait()
				if *lent != nil && (*lent).released.Load() != 1 {
					t.Errorf("the lease was ended %d times", (*lent).released.Load())
				}
			})
		})
	}
}

func TestALenderThatDiesIsNoticedAndALostReceiverEndsTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		lent := newPrefill(p.server.o.Hello, 64) // which never gives anything
		p.server.o.Lend = func([]int32) (Export, int) { return lent, 64 }
		tr, err := p.client.Open(t.Context(), "gen1", 5)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Fetch(t.Context(), make([]int32, 64), 0); err != nil {
			t.Fatal(err)
		}
		go func() {
			time.Sleep(time.Second)
			_ = p.ln.last.Close()
		}()
		_, err = tr.Receive(t.Context(), 64, &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}})
		tr.Close()
		synctest.Wait()
		if err == nil || lent.released.Load() != 1 {
			t.Errorf("%v, released %d times", err, lent.released.Load())
		}
	})
}
