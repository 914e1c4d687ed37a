package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

func status(code int, body string) func(http.ResponseWriter, *http.Request, leg) {
	return func(w http.ResponseWriter, _ *http.Request, _ leg) {
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

func hangUp(w http.ResponseWriter, _ *http.Request, _ leg) { panic(http.ErrAbortHandler) }

func admitAndWait(f *fakeNode) func(http.ResponseWriter, *http.Request, leg) {
	return func(w http.ResponseWriter, r *http.Request, _ leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		f.waitGone(r)
	}
}

func TestALegThatFailsBeforeTheFirstByteIsTriedOnAnotherNode(t *testing.T) {
	cases := []struct {
		name string
		bad  string
		fail func(http.ResponseWriter, *http.Request, leg)
	}{
		{"gen answers 500", "gen0", status(500, `{"error":{"message":"x"}}`)},
		{"gen answers 429", "gen0", status(429, `{"error":{"message":"x"}}`)},
		{"gen hangs up", "gen0", hangUp},
		{"gen ends its stream before a token", "gen0", func(w http.ResponseWriter, _ *http.Request, _ leg) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}},
		{"gen answers with JSON", "gen0", status(200, `{}`)},
		{"ctx answers 503", "ctx0", status(503, `no`)},
		{"ctx hangs up", "ctx0", hangUp},
		{"ctx answers with garbage", "ctx0", status(200, `{}`)},
		{"gen reports that KV did not arrive", "gen0", func(w http.ResponseWriter, _ *http.Request, _ leg) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {\"error\":{\"message\":\"x\",\"stage\":\"kv\"}}\n\n")
		}},
	}
	for _, k := range cases {
		for _, schedule := range []string{GenerationFirst, ContextFirst} {
			t.Run(k.name+"/"+schedule, func(t *testing.T) {
				c := newCluster(t, schedule, "ctx0", "ctx1", "gen0", "gen1")
				var failed atomic.Bool
				c.nodes[k.bad].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
					if !failed.CompareAndSwap(false, true) { // kv: the blame goes to its pair, gen0 may come again
						streamTokens(w, l, "a", "b", "c")
						return
					}
					k.fail(w, r, l)
				}
				if k.bad == "ctx0" && schedule == GenerationFirst { // without KV there is no token
					c.nodes["gen0"].serve = admitAndWait(c.nodes["gen0"])
				}
				got := c.post("/v1/completions", completion)
				if got.status != 200 || text(t, got.events, false) != "abc" {
					t.Fatalf("got %d %q", got.status, got.body)
				}
				records := c.settled()
				if len(records) != 1 || records[0].Outcome != phase.Finished || records[0].Attempt != 1 {
					t.Fatalf("records %+v", records)
				}
				attempts := map[int]int{}
				for _, l := range records[0].Legs {
					attempts[l.Attempt]++
				}
				if attempts[1] != 2 || attempts[0] == 0 {
					t.Errorf("legs %+v", records[0].Legs)
				}
			})
		}
	}
}

// TestAStatusThatIsNotTheClientsBecomesA502: a client must not take a worker's quarrel with the router for an answer, or for one
// about its own key.
func TestAStatusThatIsNotTheClientsBecomesA502(t *testing.T) {
	for _, code := range []int{204, 206, 302, 401, 403, 405} {
		c := newCluster(t, ContextFirst, "ctx0", "gen0")
		c.nodes["ctx0"].serve = func(w http.ResponseWriter, _ *http.Request, _ leg) { w.WriteHeader(code) }
		got := c.post("/v1/completions", completion)
		if got.status != 502 || !strings.Contains(got.body, fmt.Sprintf("context node ctx0: it answered with status %d", code)) || !strings.Contains(got.body, `"server_error"`) {
			t.Errorf("status %d of a node became %d %s", code, got.status, got.body)
		}
	}
}

func TestOverloadOfANodeComesWithATimeToComeAgain(t *testing.T) {
	for said, want := range map[string]string{"7": "7", "": "1", "Wed, 21 Oct 2099 07:28:00 GMT": "1", "-5": "1"} {
		for _, code := range []int{429, 503} {
			c := newCluster(t, Aggregated, "gen0")
			c.nodes["gen0"].serve = func(w http.ResponseWriter, _ *http.Request, _ leg) {
				w.Header().Set("Retry-After", said)
				w.WriteHeader(code)
			}
			if got := c.post("/v1/completions", completion); got.status != code || got.header.Get("Retry-After") != want {
				t.Errorf("%d with Retry-After %q became %d with %q, want %q", code, said, got.status, got.header.Get("Retry-After"), want)
			}
		}
	}
}

func TestBadInputIsNotTriedTwice(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "ctx1", "gen0", "gen1")
	for _, n := range []string{"gen0", "gen1"} {
		c.nodes[n].serve = status(400, `{"error":{"message":"bad","type":"invalid_request_error","param":"logit_bias"}}`)
	}
	got := c.post("/v1/completions", completion)
	if got.status != 400 || !strings.Contains(got.body, `"param":"logit_bias"`) || !strings.Contains(got.body, `"retryable":false`) || len(c.legs) != 1 {
		t.Errorf("got %d %q after %d legs", got.status, got.body, len(c.legs))
	}
	c.settled()
}

func TestFailureOfOneLegCancelsTheOther(t *testing.T) {
	t.Run("ctx fails while gen waits", func(t *testing.T) {
		c := newCluster(t, GenerationFirst, "ctx0", "gen0")
		c.nodes["gen0"].serve = admitAndWait(c.nodes["gen0"])
		c.nodes["ctx0"].serve = status(500, `{"error":{"message":"boom","stage":"engine"}}`)
		got := c.post("/v1/completions", completion)
		if got.status != 500 || !strings.Contains(got.body, `"stage":"ctx"`) || !strings.Contains(got.body, "boom") {
			t.Errorf("got %d %q", got.status, got.body)
		}
		if who := c.cancelled(); who != "gen0" {
			t.Errorf("%s was cancelled", who)
		}
		c.settled()
	})
	t.Run("gen fails while ctx works", func(t *testing.T) {
		c := newCluster(t, GenerationFirst, "ctx0", "gen0")
		working := make(chan struct{})
		c.nodes["ctx0"].serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { close(working); c.nodes["ctx0"].waitGone(r) }
		c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, _ leg) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			hold(r, working)
			panic(http.ErrAbortHandler)
		}
		got := c.post("/v1/completions", completion)
		if got.status != 502 || !strings.Contains(got.body, `"stage":"gen"`) {
			t.Errorf("got %d %q", got.status, got.body)
		}
		if who := c.cancelled(); who != "ctx0" {
			t.Errorf("%s was cancelled", who)
		}
		c.settled()
	})
}

// oneWordThen sends a word as a worker does that names no tokens, then does f.
func oneWordThen(f func(w http.ResponseWriter, r *http.Request)) func(http.ResponseWriter, *http.Request, leg) {
	return func(w http.ResponseWriter, r *http.Request, _ leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}`+"\n\n")
		w.(http.Flusher).Flush()
		f(w, r)
	}
}

// oneTokenThen sends one token, then does f.
func oneTokenThen(f func(w http.ResponseWriter, r *http.Request)) func(http.ResponseWriter, *http.Request, leg) {
	return func(w http.ResponseWriter, r *http.Request, _ leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}]}`+"\n\n")
		w.(http.Flusher).Flush()
		f(w, r)
	}
}

func TestABrokenStreamOfUnnamedTokensEndsWithOneErrorEvent(t *testing.T) {
	cases := []struct {
		name  string
		stage string
		then  func(w http.ResponseWriter, r *http.Request)
	}{
		{"the connection breaks", "gen", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"the stream ends without an end mark", "gen", func(http.ResponseWriter, *http.Request) {}},
		{"the node sends an error event", "kv", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, `data: {"error":{"message":"x","stage":"kv"}}`+"\n\n")
		}},
		{"the node sends garbage", "gen", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "data: {\n\n") }},
	}
	for _, k := range cases {
		t.Run(k.name, func(t *testing.T) {
			c := newCluster(t, Aggregated, "gen0", "gen1")
			c.nodes["gen0"].serve = oneWordThen(k.then)
			c.nodes["gen1"].serve = oneWordThen(k.then)
			got := c.post("/v1/completions", completion)
			n := len(got.events)
			if got.status != 200 || n != 2 || !strings.HasPrefix(got.events[n-1], `{"error":`) || !strings.Contains(got.events[n-1], `"stage":"`+k.stage+`"`) {
				t.Errorf("got %d %q", got.status, got.body)
			}
			if len(c.legs) != 1 {
				t.Errorf("%d legs: an answer that has begun was tried again", len(c.legs))
			}
			if r := c.settled()[0]; r.Outcome != phase.Failed || r.Error.Stage != k.stage || r.Stamps.EndNS == nil {
				t.Errorf("record %+v", r)
			}
		})
	}
}

func TestALostNodeEndsItsStreams(t *testing.T) {
	for _, lost := range []string{"ctx0", "gen0"} {
		t.Run(lost, func(t *testing.T) {
			c := newCluster(t, GenerationFirst, "ctx0", "gen0")
			gen, ctx := c.nodes["gen0"], c.nodes["ctx0"]
			if gen.serve = admitAndWait(gen); lost == "gen0" {
				gen.serve = oneTokenThen(func(_ http.ResponseWriter, r *http.Request) { gen.waitGone(r) })
			}
			ctx.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) {
				c.pool.Drop(node.Role(lost[:3]), lost, "its lease ended")
				ctx.waitGone(r)
			}
			got := c.post("/v1/completions", completion)
			if !strings.Contains(got.body, `"stage":"`+lost[:3]+`"`) || !strings.Contains(got.body, "is gone") {
				t.Errorf("got %d %q", got.status, got.body)
			}
			if a, b := c.cancelled(), c.cancelled(); a == b {
				t.Errorf("cancelled %s and %s", a, b)
			}
		})
	}
}

// TestAStreamOutlivesItsContextNode: once the KV is at the generation node, the other is needed for nothing but usage.
func TestAStreamOutlivesItsContextNode(t *testing.T) {
	c := newCluster(t, GenerationFirst, "ctx0", "gen0")
	gen, ctx := c.nodes["gen0"], c.nodes["ctx0"]
	lost := make(chan struct{})
	ctx.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { ctx.waitGone(r) }
	gen.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		oneTokenThen(func(w http.ResponseWriter, r *http.Request) {
			hold(r, lost)
			io.WriteString(w, `data: {"choices":[{"index":0,"text":"b","token_ids":[6],"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
		})(w, r, l)
	}
	res, err := c.send(t.Context(), "/v1/completions", completion)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	answer := bufio.NewReader(res.Body)
	if line, err := answer.ReadString('\n'); err != nil || !strings.Contains(line, `"text":"a"`) {
		t.Fatalf("first event %q, %v", line, err)
	}
	c.taken(2)
	c.pool.Drop("ctx", "ctx0", "its lease ended")
	c.cancelled() // its leg is over
	close(lost)
	rest, err := io.ReadAll(answer)
	if err != nil || !strings.Contains(string(rest), `"text":"b"`) || strings.Contains(string(rest), "error") {
		t.Errorf("the rest of the answer is %q, %v", rest, err)
	}
}

func TestAClientThatLeavesCancelsBothLegs(t *testing.T) {
	for _, when := range []string{"before the first token", "in the stream"} {
		t.Run(when, func(t *testing.T) {
			c := newCluster(t, GenerationFirst, "ctx0", "gen0")
			ready := make(chan struct{})
			gen, ctx := c.nodes["gen0"], c.nodes["ctx0"]
			ctx.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { close(ready); ctx.waitGone(r) }
			gen.serve = admitAndWait(gen)
			if when == "in the stream" {
				gen.serve = oneTokenThen(func(_ http.ResponseWriter, r *http.Request) { gen.waitGone(r) })
			}
			leaving, leave := context.WithCancel(t.Context())
			go func() { <-ready; leave() }()
			if res, err := c.send(leaving, "/v1/completions", completion); err == nil {
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			if a, b := c.cancelled(), c.cancelled(); a == b {
				t.Errorf("cancelled %s and %s", a, b)
			}
		})
	}
}

func TestConnectionsAreKept(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	for range 5 {
		if got := c.post("/v1/completions", completion); got.status != 200 {
			t.Fatalf("got %d", got.status)
		}
	}
	if n := c.proxy.o.Client.Idle(); n != 2 {
		t.Errorf("%d idle connections after 5 requests in a row, want 1 to each node", n)
	}
}

func TestKVThatDoesNotArriveIsTheFaultOfAContextNodeThatSaysNothing(t *testing.T) {
	c := newCluster(t, GenerationFirst, "ctx0", "ctx1", "gen0")
	silent := c.nodes["ctx0"]
	silent.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { silent.waitGone(r) }
	var asked atomic.Int32
	c.nodes["gen0"].serve = func(w http.ResponseWriter, _ *http.Request, l leg) {
		if asked.Add(1) > 1 {
			streamTokens(w, l, "a", "b", "c")
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"error\":{\"message\":\"x\",\"stage\":\"kv\"}}\n\n")
	}
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "abc" {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	if r := c.settled()[0]; len(r.Legs) != 4 || r.Legs[0].Outcome != phase.Failed || r.Legs[1].Outcome != phase.Cancelled {
		t.Errorf("legs %+v", r.Legs)
	}
}

func TestAReceiverThatAContextNodeMissesIsAtFault(t *testing.T) {
	c := newCluster(t, GenerationFirst, "ctx0", "gen0", "gen1")
	var asked atomic.Int32
	c.nodes["ctx0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		if asked.Add(1) > 1 {
			answerCtx(w, l)
			return
		}
		status(500, `{"error":{"message":"x","stage":"kv","retryable":true}}`)(w, r, l)
	}
	c.nodes["gen0"].serve = admitAndWait(c.nodes["gen0"])
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "abc" {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	if r := c.settled()[0]; len(r.Legs) != 4 || r.Legs[0].Outcome != phase.Cancelled || r.Legs[1].Outcome != phase.Failed || r.Legs[3].Node != "gen1" {
		t.Errorf("legs %+v", r.Legs)
	}
}
