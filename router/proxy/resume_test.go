package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/router/breaker"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// breakAfter sends words with ids 5, 6, ... and breaks the connection.
func breakAfter(words ...string) func(http.ResponseWriter, *http.Request, leg) {
	return func(w http.ResponseWriter, _ *http.Request, _ leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i, word := range words {
			fmt.Fprintf(w, `data: {"choices":[{"index":0,"text":%q,"token_ids":[%d],"finish_reason":null}]}`+"\n\n", word, i+5)
		}
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

func TestAnAnswerThatWasCutGoesOnAtAnotherNode(t *testing.T) {
	for _, schedule := range []string{GenerationFirst, ContextFirst, Aggregated} {
		for _, streamed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/streamed %v", schedule, streamed), func(t *testing.T) {
				names := []string{"gen0", "gen1"}
				if schedule != Aggregated {
					names = append(names, "ctx0")
				}
				c := newCluster(t, schedule, names...)
				c.nodes["gen0"].serve = breakAfter("a", "b")
				c.nodes["gen1"].serve = func(w http.ResponseWriter, _ *http.Request, l leg) { streamTokens(w, l, "c", "d") }
				got := c.post("/v1/completions", strings.Replace(completion, `"stream":true`, `"stream":`+strconv.FormatBool(streamed), 1))
				said := text(t, got.events, false)
				if !streamed {
					said = got.body
				}
				if got.status != 200 || !strings.Contains(said, "abcd") || streamed && said != "abcd" {
					t.Fatalf("got %d %q", got.status, got.body)
				}
				resumed := 0
				for len(c.legs) > 0 {
					l := <-c.legs
					if ids := string(l.body["output_token_ids"]); l.header.Get(api.HeaderAttempt) == "1" {
						if resumed++; ids != "[5,6]" {
							t.Errorf("%s was told of %s, want [5,6]", l.node, ids)
						}
					} else if ids != "" {
						t.Errorf("the first attempt was told of %s", ids)
					}
				}
				if want := len(names) - 1; resumed != want {
					t.Errorf("%d legs of the second attempt, want %d", resumed, want)
				}
				checkSeam(t, c.settled()[0])
			})
		}
	}
}

// TestACharacterMayLieAcrossTheCut: a token that is only part of a character has no text yet, but the other node must know it.
func TestACharacterMayLieAcrossTheCut(t *testing.T) {
	c := newCluster(t, GenerationFirst, "ctx0", "gen0", "gen1")
	c.nodes["gen0"].serve = breakAfter("a", "")
	c.nodes["gen1"].serve = func(w http.ResponseWriter, _ *http.Request, l leg) { streamTokens(w, l, "é", "b") }
	got := c.post("/v1/completions", completion)
	if said := text(t, got.events, false); said != "aéb" {
		t.Errorf("got %q of %q", said, got.body)
	}
	for len(c.legs) > 0 {
		if l := <-c.legs; l.header.Get(api.HeaderAttempt) == "1" && string(l.body["output_token_ids"]) != "[5,6]" {
			t.Errorf("%s was told of %s, want the token without text too", l.node, l.body["output_token_ids"])
		}
	}
	checkSeam(t, c.settled()[0])
}

// checkSeam wants a record that tells of the first attempt, and of where it was cut.
func checkSeam(t *testing.T, r *phase.Record) {
	t.Helper()
	if r.Outcome != phase.Finished || r.Attempt != 0 || r.FinishReason != "stop" || r.Error != nil {
		t.Errorf("record %+v", r)
	}
	if len(r.Resumes) != 1 || r.Resumes[0].Attempt != 1 || r.Resumes[0].Tokens != 2 {
		t.Fatalf("resumes %+v", r.Resumes)
	}
	s, cut := r.Stamps, r.Resumes[0]
	if order := []int64{*s.FirstTokenNS, cut.CutNS, cut.TokenNS, *s.LastTokenNS}; !slices.IsSorted(order) {
		t.Errorf("first token, cut, next token, last token at %v", order)
	}
	for _, l := range r.Legs {
		if l.Given != 2*l.Attempt || (l.Role == phase.Gen && l.Attempt == 0 && l.Outcome != phase.Failed) {
			t.Errorf("leg %+v", l)
		}
	}
}

func TestAnAnswerThatIsAllSaidNeedsNoOtherNode(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0", "gen1")
	for _, n := range c.nodes {
		n.serve = func(w http.ResponseWriter, _ *http.Request, _ leg) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, `data: {"choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":"stop"}]}`+"\n\n")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}
	got := c.post("/v1/completions", completion)
	if text(t, got.events, false) != "a" || !strings.Contains(got.body, `"completion_tokens":1,`) || len(c.legs) != 1 {
		t.Errorf("after %d legs: %q", len(c.legs), got.body)
	}
	if r := c.settled()[0]; r.Outcome != phase.Finished {
		t.Errorf("record %+v", r)
	}
}

func TestAnAnswerGoesOnOnlySoOften(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0", "gen1")
	for _, n := range c.nodes {
		n.serve = breakAfter("a")
	}
	got := c.post("/v1/completions", completion)
	if n := len(got.events); n != maxAttempts+1 || !strings.HasPrefix(got.events[n-1], `{"error":`) || len(c.legs) != maxAttempts {
		t.Errorf("%d events after %d legs: %q", n, len(c.legs), got.body)
	}
	if r := c.settled()[0]; r.Outcome != phase.Failed || len(r.Resumes) != maxAttempts-1 || r.Tokens.Output != maxAttempts {
		t.Errorf("record %+v", r)
	}
}

func TestTheCheckpointThatBeganAnAnswerEndsIt(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	b := &sub{s: &session{p: c.proxy, req: &api.Request{Model: "m"}, times: &requestTimes{received: c.proxy.o.Steady.Now()}, life: time.Hour}}
	pick := func() *attempt {
		a := &attempt{s: b.s, sub: b}
		choice, err := a.pick(&exclusions{})
		if err != nil {
			t.Fatal(err)
		}
		defer choice.Release()
		a.choice = choice
		return a
	}
	if !b.fits(pick().choice) {
		t.Error("an answer that has not begun does not fit")
	}
	b.given = []int32{5}
	if !b.fits(pick().choice) {
		t.Error("the same checkpoint does not fit")
	}
	b.hash = "another"
	if b.fits(pick().choice) {
		t.Error("another checkpoint fits")
	}
}

func TestKVThatNobodyClaimsIsReleased(t *testing.T) {
	t.Run("the generation node refuses", func(t *testing.T) {
		c := newCluster(t, ContextFirst, "ctx0", "gen0", "gen1")
		c.nodes["gen0"].serve = status(503, `{"error":{"message":"full"}}`)
		if got := c.post("/v1/completions", completion); got.status != 200 {
			t.Fatalf("got %d %q", got.status, got.body)
		}
		freed := within(t, c.nodes["ctx0"].freed, "the context node is told to free the KV")
		r := c.settled()[0]
		var released []int
		for _, l := range r.Legs {
			if l.ReleasedNS != nil {
				released = append(released, l.Attempt)
			}
		}
		if !slices.Equal(released, []int{0}) || freed == strconv.FormatInt(r.DisaggRequestID, 10) || len(c.nodes["ctx0"].freed) != 0 {
			t.Errorf("attempts %v released, id %s; the record has %d", released, freed, r.DisaggRequestID)
		}
	})
	t.Run("the client leaves between the legs", func(t *testing.T) {
		c := newCluster(t, ContextFirst, "ctx0", "gen0")
		ctx, leave := context.WithCancel(t.Context())
		gen := c.nodes["gen0"]
		gen.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { leave(); gen.waitGone(r) }
		if res, err := c.send(ctx, "/v1/completions", completion); err == nil {
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		if who := c.cancelled(); who != "gen0" {
			t.Errorf("%s was cancelled", who)
		}
		within(t, c.nodes["ctx0"].freed, "the context node is told to free the KV")
	})
}

// stopped has no time pass for breakers and the budget of retries, which also fills with it.
func (c *cluster) stopped() {
	now := c.proxy.o.Steady.Now()
	c.proxy.health.now = func() int64 { return now }
}

func TestRetriesEndWithTheBudget(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0", "gen1")
	c.stopped()
	for c.proxy.health.takeRetry() {
	}
	c.nodes["gen0"].serve = status(500, `{"error":{"message":"x"}}`)
	c.nodes["gen1"].serve = status(500, `{"error":{"message":"x"}}`)
	if got := c.post("/v1/completions", completion); got.status != 500 || len(c.legs) != 1 {
		t.Errorf("got %d after %d legs", got.status, len(c.legs))
	}
	c.settled()
}

func TestWhatANodesDeathBreaksMovesOnceOutsideTheBudget(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0", "gen1", "gen2")
	c.stopped()
	for c.proxy.health.takeRetry() {
	}
	var all atomic.Bool
	for name, n := range c.nodes {
		n.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
			if name == "gen0" || all.Load() {
				hangUp(w, r, l)
			}
			streamTokens(w, l, "a", "b", "c")
		}
	}
	if got := c.post("/v1/completions", completion); got.status != 200 || len(c.legs) != 2 {
		t.Errorf("got %d after %d legs, want 200 after 2", got.status, len(c.legs))
	}
	all.Store(true)
	for len(c.legs) > 0 {
		<-c.legs
	}
	if got := c.post("/v1/completions", completion); got.status != 502 || len(c.legs) != 2 {
		t.Errorf("all die: got %d after %d legs, want 502 after 2", got.status, len(c.legs))
	}
	c.settled()
}

func TestABreakerKeepsWorkAwayButNeverFromTheLastNode(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0", "gen1")
	c.stopped() // the breaker stays open
	bad := c.nodes["gen0"]
	bad.serve = status(500, `{"error":{"message":"x"}}`)
	for range 8 { // round robin: half of them meet it first
		c.post("/v1/completions", completion)
	}
	met := 0
	for len(c.legs) > 0 {
		if l := <-c.legs; l.node == "gen0" {
			met++
		}
	}
	if met != 3 {
		t.Errorf("gen0 failed %d legs, want 3 until its breaker opened", met)
	}
	c.pool.Drop("gen", "gen1", "it left")
	bad.serve = nil
	if got := c.post("/v1/completions", completion); got.status != 200 {
		t.Errorf("the last node is not used: %d %q", got.status, got.body)
	}
	c.settled()
}

// TestWhatIsNotANodesFaultOpensNoBreaker: a burst that fills all nodes, requests that are bad and clients without patience must not
// take nodes out.
func TestWhatIsNotANodesFaultOpensNoBreaker(t *testing.T) {
	for name, k := range map[string]struct {
		serve  func(http.ResponseWriter, *http.Request, leg)
		header string // of each request, and its value
		value  string
	}{
		"full, in a node's words": {serve: status(503, `{"error":{"message":"x","type":"overloaded_error"}}`)},
		"full, in nobody's words": {serve: status(503, `no`)},
		"too many requests":       {serve: status(429, `no`)},
		"a bad request":           {serve: status(400, `{"error":{"message":"x"}}`)},
		"the client's deadline":   {serve: func(_ http.ResponseWriter, r *http.Request, _ leg) { <-r.Context().Done() }, header: api.HeaderDeadline, value: "5"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Aggregated, "gen0")
			c.nodes["gen0"].serve = k.serve
			for range 2 * breaker.Trip {
				c.post("/v1/completions", completion, k.header, k.value)
			}
			if open, _ := c.proxy.health.snapshot(); len(open) != 0 {
				t.Errorf("%d requests count as failures: %+v", 2*breaker.Trip, open)
			}
		})
	}
}

// TestANodeThatStopsIsNoClientThatLeft: a node whose grace time is over cuts its requests; they go on elsewhere, as after its death.
func TestANodeThatStopsIsNoClientThatLeft(t *testing.T) {
	const cut = `{"error":{"message":"x","type":"cancelled_error","param":null,"code":499,"stage":"gen","retryable":false}}`
	for name, stops := range map[string]map[string]func(http.ResponseWriter, *http.Request, leg){
		"context node":                 {"ctx0": status(499, cut)},
		"generation node, in a stream": {"gen0": func(w http.ResponseWriter, _ *http.Request, _ leg) { streamEvents(w, aToken, cut) }},
		"generation node":              {"gen0": status(499, cut)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, ContextFirst, "ctx0", "ctx1", "gen0", "gen1")
			for node, serve := range stops {
				c.nodes[node].serve = serve
			}
			for range 2 { // round robin: one of them meets it
				if got := c.post("/v1/completions", `{"model":"m","prompt":"x","stream":true}`); got.status != 200 || strings.Contains(got.body, "error") {
					t.Errorf("got %d %s", got.status, got.body)
				}
			}
			c.settled()
		})
	}
}

// TestARouterThatStopsSaysSo: who is cut at the end of its grace time has not left.
func TestARouterThatStopsSaysSo(t *testing.T) {
	for _, stream := range []bool{true, false} {
		c := newCluster(t, Aggregated, "gen0")
		c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, _ leg) {
			streamEvents(w, aToken)
			c.end()
			<-r.Context().Done()
		}
		got := c.post("/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"x","stream":%t}`, stream))
		if want := map[bool]int{true: 200, false: 503}[stream]; got.status != want || !strings.Contains(got.body, `"type":"service_unavailable_error","param":null,"code":503,"stage":"relay","retryable":true`) {
			t.Errorf("stream %t: got %d %s", stream, got.status, got.body)
		}
		if !stream && got.header.Get("Retry-After") == "" {
			t.Error("it does not say when to come again")
		}
	}
}

func TestPauseEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if !pause(ctx, time.Millisecond) || pause(ctx, time.Hour) {
			t.Error("a pause of 1 ms was cut, or one of an hour was not")
		}
	})
}

func FuzzAppendIDs(f *testing.F) {
	for _, s := range []string{"[]", "[5]", "[1,2,3]", "[2147483647]", "[2147483648]", "[-1]", "[1.5]", "[99999999999999]", "null", "[1,]", "[[1]]"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, list []byte) {
		got, ok := appendIDs(nil, list)
		for _, id := range got {
			if id < 0 {
				t.Errorf("%q gave %d", list, id)
			}
		}
		if again, same := appendIDs(nil, api.AppendIDs(nil, got)); ok && (!same || !slices.Equal(got, again)) {
			t.Errorf("%q gave %v, again %v", list, got, again)
		}
	})
}
