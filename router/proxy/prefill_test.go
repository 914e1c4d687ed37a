package proxy

import (
	"net/http"
	"testing"
	"time"

	"meridian.internal/router/breaker"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// decodeWhenMoved makes a generation node wait until it is told another source.
func decodeWhenMoved(f *fakeNode) {
	f.moved = make(chan api.DisaggParams, 4)
	f.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		select {
		case <-f.moved:
			streamTokens(w, l, "a", "b", "c")
		case <-r.Context().Done():
		}
	}
}

func TestPrefillGoesOnElsewhereWhileTheGenerationLegKeepsItsAdmission(t *testing.T) {
	for name, fail := range map[string]func(http.ResponseWriter, *http.Request, leg){
		"it answers 500": status(500, `{"error":{"message":"x"}}`), "it hangs up": hangUp, "it is full": status(503, `{"error":{"message":"x"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, GenerationFirst, "ctx0", "ctx1", "gen0", "gen1")
			c.nodes["ctx0"].serve = fail
			decodeWhenMoved(c.nodes["gen0"])
			got := c.post("/v1/completions", completion)
			if got.status != 200 || text(t, got.events, false) != "abc" || len(c.legs) != 3 {
				t.Fatalf("got %d %q after %d legs", got.status, got.body, len(c.legs))
			}
			legs := c.taken(3)
			first, second := *legs["ctx0"].disagg.DisaggRequestID, *legs["ctx1"].disagg.DisaggRequestID
			if first == second || *legs["gen0"].disagg.DisaggRequestID != first || legs["gen0"].header.Get(api.HeaderKVWait) == "" {
				t.Errorf("ids %d and %d; gen leg %+v", first, second, legs["gen0"])
			}
			r := c.settled()[0]
			if r.Outcome != phase.Finished || r.Attempt != 0 || r.DisaggRequestID != second || r.Decision.Ctx != "ctx1" || len(r.Legs) != 3 {
				t.Errorf("record %+v, decision %+v", r, r.Decision)
			}
			if r.Legs[0].Node != "ctx0" || r.Legs[0].Outcome == "" || r.Legs[1].Node != "ctx1" || r.Legs[1].Outcome != "" {
				t.Errorf("legs %+v", r.Legs)
			}
		})
	}
}

// hedged is a cluster whose prefills took 1 ms up to now.
func hedged(t *testing.T, schedule string) *cluster {
	c := newCluster(t, schedule, "ctx0", "ctx1", "gen0")
	h := breaker.NewHedge(0.5)
	for range 32 {
		h.Observe(2, int64(time.Millisecond))
	}
	c.proxy.health.hedge = h
	return c
}

func TestASlowPrefillGetsASecondOneBesideIt(t *testing.T) {
	for _, schedule := range []string{GenerationFirst, ContextFirst} {
		t.Run(schedule, func(t *testing.T) {
			c := hedged(t, schedule)
			slow, begun := c.nodes["ctx0"], make(chan struct{})
			slow.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { close(begun); slow.waitGone(r) }
			c.nodes["ctx1"].serve = func(w http.ResponseWriter, r *http.Request, l leg) { hold(r, begun); answerCtx(w, l) }
			if schedule == GenerationFirst {
				decodeWhenMoved(c.nodes["gen0"])
			}
			got := c.post("/v1/completions", completion)
			if got.status != 200 || text(t, got.events, false) != "abc" || len(c.legs) != 3 {
				t.Fatalf("got %d %q after %d legs", got.status, got.body, len(c.legs))
			}
			legs := c.taken(3)
			first, second := *legs["ctx0"].disagg.DisaggRequestID, *legs["ctx1"].disagg.DisaggRequestID
			if who := c.cancelled(); who != "ctx0" || first == second {
				t.Errorf("%s was cancelled; ids %d and %d", who, first, second)
			}
			within(t, slow.freed, "the node is told to free the KV")
			r := c.settled()[0]
			if r.Outcome != phase.Finished || r.DisaggRequestID != second || r.Decision.Ctx != "ctx1" || len(r.Legs) != 3 || r.Legs[0].Outcome != phase.Cancelled {
				t.Errorf("record %+v, decision %+v, legs %+v", r, r.Decision, r.Legs)
			}
			// The budget is spent: the next slow one gets no second.
			if c.proxy.health.takeHedge() {
				t.Error("a second hedge at once")
			}
		})
	}
}

// TestASecondPrefillIsPaidForWhereItIsMade: where no node is left nothing is spent, and without a budget no node
// is claimed.
func TestASecondPrefillIsPaidForWhereItIsMade(t *testing.T) {
	for name, spent := range map[string]bool{"no other node": false, "no budget": true} {
		t.Run(name, func(t *testing.T) {
			c := hedged(t, ContextFirst)
			choice, err := c.pool.Pick(pool.Ask{Model: "m", Tokens: 2})
			if err != nil {
				t.Fatal(err)
			}
			s := &session{p: c.proxy, req: &api.Request{Model: "m"}, times: &requestTimes{received: c.proxy.o.Steady.Now()}, life: time.Minute}
			a := &attempt{s: s, sub: &sub{s: s, ids: []int32{7, 2}}, choice: choice, calls: []*prefillCall{{lease: choice.Ctx}}}
			if spent {
				c.proxy.health.takeHedge()
			} else {
				a.calls = append(a.calls, &prefillCall{lease: &pool.Lease{Name: "ctx0"}}, &prefillCall{lease: &pool.Lease{Name: "ctx1"}}) // asked already
			}
			if a.hedge(nil) != nil {
				t.Error("it is made")
			}
			if left := c.proxy.health.takeHedge(); left == spent {
				t.Errorf("the budget is there: %t", left)
			}
			choice.Release()
			c.settled()
		})
	}
}

func TestASecondPrefillThatIsSlowerIsCancelled(t *testing.T) {
	c := hedged(t, ContextFirst)
	slower, begun := c.nodes["ctx1"], make(chan struct{})
	c.nodes["ctx0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) { hold(r, begun); answerCtx(w, l) }
	slower.serve = func(_ http.ResponseWriter, r *http.Request, _ leg) { close(begun); slower.waitGone(r) }
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "abc" {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	if who := c.cancelled(); who != "ctx1" {
		t.Errorf("%s was cancelled", who)
	}
	within(t, slower.freed, "the node is told to free the KV")
	if r := c.settled()[0]; r.Decision.Ctx != "ctx0" || len(r.Legs) != 3 || r.Legs[1].Outcome != phase.Cancelled {
		t.Errorf("decision %+v, legs %+v", r.Decision, r.Legs)
	}
}

func TestWhenBothPrefillsFailTheRequestGoesOnAsWithOne(t *testing.T) {
	c := hedged(t, ContextFirst)
	begun := make(chan struct{})
	c.nodes["ctx0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) { hold(r, begun); status(500, `no`)(w, r, l) }
	c.nodes["ctx1"].serve = func(w http.ResponseWriter, r *http.Request, l leg) { close(begun); status(500, `no`)(w, r, l) }
	if got := c.post("/v1/completions", completion); got.status != 503 && got.status != 500 {
		t.Errorf("got %d %q", got.status, got.body)
	}
	c.settled()
}
