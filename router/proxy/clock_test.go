package proxy

import (
	"net/http"
	"testing"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

func TestARoutedRequestIsAClockExchange(t *testing.T) {
	c := newCluster(t, "auto", "ctx0", "gen0")
	ids := map[string]clock.ID{"ctx.ctx0": clock.MakeID(1, 1), "gen.gen0": clock.MakeID(2, 2)}
	const ahead = int64(1e15) // of the nodes' clocks
	for key, id := range ids {
		n := c.nodes[key[4:]]
		n.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
			received := c.proxy.o.Steady.Now() + ahead
			w.Header().Set(clock.InbandHeader, string(clock.AppendInband(nil, id, received, c.proxy.o.Steady.Now()+ahead)))
			if key == "ctx.ctx0" {
				answerCtx(w, l)
			} else {
				streamTokens(w, l, "a", "b")
			}
		}
	}
	type seen struct {
		key string
		id  clock.ID
		x   ntp.Exchange
	}
	got := make(chan seen, 10)
	c.proxy.o.Exchange = func(key string, id clock.ID, x ntp.Exchange) { got <- seen{key, id, x} }
	if r := c.post("/v1/completions", `{"model":"m","prompt":"hi","stream":true}`); r.status != http.StatusOK {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	for range 2 {
		s := within(t, got, "an exchange comes")
		if ids[s.key] != s.id {
			t.Errorf("%s came with clock %s", s.key, s.id)
		}
		if s.x.Lower() > -ahead || s.x.Upper() < -ahead || !s.x.Possible(0) {
			t.Errorf("%s: [%d, %d] does not hold the offset %d", s.key, s.x.Lower(), s.x.Upper(), -ahead)
		}
	}
	for key := range ids {
		n := c.nodes[key[4:]]
		old := n.serve
		n.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
			old(headerOnly{w, func() { w.Header().Set(clock.InbandHeader, "nonsense") }}, r, l)
		}
	}
	if r := c.post("/v1/completions", `{"model":"m","prompt":"hi","stream":true}`); r.status != http.StatusOK {
		t.Fatalf("status %d: %s", r.status, r.body)
	}
	if len(got) != 0 {
		t.Errorf("a malformed header made an exchange: %+v", <-got)
	}
}

// headerOnly runs f before the head is written.
type headerOnly struct {
	http.ResponseWriter
	f func()
}

func (h headerOnly) Write(b []byte) (int, error) { h.f(); return h.ResponseWriter.Write(b) }
func (h headerOnly) Flush()                      { h.f(); h.ResponseWriter.(http.Flusher).Flush() }
