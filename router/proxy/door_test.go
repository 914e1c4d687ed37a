package proxy

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/router/admit"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

func newTestDoor(limit, room int) *door {
	d := &door{now: func() int64 { return time.Now().UnixNano() }, room: func() int { return limit }, waiters: map[*admit.Ticket]chan struct{}{}}
	d.queue.Room = room
	return d
}

// idle wants that nothing runs, waits or is kept.
func (d *door) idle(t *testing.T) {
	t.Helper()
	if r, w, _ := d.load(); r != 0 || w != 0 || len(d.waiters) != 0 {
		t.Errorf("%d run, %d wait, %d waiters are kept", r, w, len(d.waiters))
	}
}

func TestADoorLetsInWhomThereIsRoomFor(t *testing.T) {
	patient := admit.Ask{Weight: 1, Patience: 10 * time.Second}
	synctest.Test(t, func(t *testing.T) {
		d := newTestDoor(1, 2)
		first, e := d.enter(t.Context(), patient)
		if e != nil {
			t.Fatal(e)
		}
		results := make(chan *api.Error, 3)
		enter := func(ctx context.Context, a admit.Ask) {
			go func() {
				ticket, e := d.enter(ctx, a)
				if e == nil {
					defer d.leave(ticket)
				}
				results <- e
			}()
			synctest.Wait()
		}
		enter(t.Context(), patient)
		gone, leave := context.WithCancel(t.Context())
		enter(gone, patient)
		if _, e := d.enter(t.Context(), patient); e == nil || e.Status() != http.StatusTooManyRequests || e.RetryAfter < time.Second || e.Stage != "queue" {
			t.Errorf("a newcomer to a full queue got %+v", e)
		}
		leave()
		if e := <-results; e == nil || e.Type != api.TypeCancelled {
			t.Errorf("a client that left got %+v", e)
		}
		enter(t.Context(), admit.Ask{Weight: 1, Priority: -1, Patience: time.Second})
		time.Sleep(2 * time.Second)
		if e := <-results; e == nil || e.Status() != http.StatusServiceUnavailable || e.RetryAfter < time.Second {
			t.Errorf("one whose patience ended got %+v", e)
		}
		enter(t.Context(), admit.Ask{Weight: 1, Priority: -1, Patience: time.Minute})
		enter(t.Context(), patient)
		if e := <-results; e == nil { // one of the same principal and a higher priority came
			if e = <-results; e != nil {
				t.Errorf("two that wait in a queue of two: %+v", e)
			}
		} else if e.Status() != http.StatusTooManyRequests {
			t.Errorf("the one that gave way got %+v", e)
		}
		d.leave(first)
		synctest.Wait()
		for len(results) > 0 {
			if e := <-results; e != nil {
				t.Errorf("one that waited got %+v", e)
			}
		}
		d.idle(t)
	})
}

// TestWhoWaitsHearsOfANodeThatJoins though no request comes or ends.
func TestWhoWaitsHearsOfANodeThatJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newTestDoor(0, 9)
		var limit atomic.Int64
		limit.Store(1)
		d.room = func() int { return int(limit.Load()) }
		first, e := d.enter(t.Context(), admit.Ask{Weight: 1})
		if e != nil {
			t.Fatal(e)
		}
		began := time.Now()
		in := make(chan *admit.Ticket)
		for range 2 {
			go func() {
				ticket, e := d.enter(t.Context(), admit.Ask{Weight: 1, Patience: time.Minute})
				if e != nil {
					t.Error(e)
				}
				in <- ticket
			}()
		}
		time.Sleep(time.Second)
		limit.Store(3)
		for range 2 {
			ticket := <-in
			defer d.leave(ticket)
		}
		if waited := time.Since(began); waited > time.Second+2*refreshEvery {
			t.Errorf("they waited %v", waited)
		}
		d.leave(first)
	})
}

func TestSlotsOfACluster(t *testing.T) {
	one := func(role node.Role, state node.State, batch int) pool.Status {
		return pool.Status{Healthy: true, Info: node.Info{Role: role, State: state, Model: &node.Model{MaxBatchSize: batch}}}
	}
	sick := one(node.RoleGen, node.Ready, 8)
	sick.Healthy = false
	for _, c := range []struct {
		name  string
		nodes []pool.Status
		want  int
	}{
		{"none is ready: placing says so", []pool.Status{sick, one(node.RoleGen, node.Draining, 8)}, unlimited},
		{"generation nodes count", []pool.Status{one(node.RoleCtx, node.Ready, 64), one(node.RoleGen, node.Ready, 8), one(node.RoleGen, node.Ready, 4)}, 24},
		{"context nodes alone serve whole requests", []pool.Status{one(node.RoleCtx, node.Ready, 8)}, 16},
		{"a foreign worker does not say", []pool.Status{one(node.RoleGen, node.Ready, 0)}, foreignSlots},
	} {
		if got := slots(c.nodes); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestARefusedRequestHasARecordAndReachesNoNode(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	c.proxy.door.room = func() int { return 1 }
	c.proxy.door.queue.Room = 1
	c.proxy.o.QueueTime = time.Nanosecond
	running, end := make(chan struct{}), make(chan struct{})
	c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		close(running)
		hold(r, end)
		streamTokens(w, l, "a")
	}
	done := make(chan reply, 1)
	go func() { done <- c.post("/v1/completions", completion) }()
	within(t, running, "the leg runs")
	refused := c.post("/v1/completions", completion)
	if refused.status != 503 || refused.header.Get("Retry-After") == "" || !strings.Contains(refused.body, `"stage":"queue"`) {
		t.Errorf("got %d %v %q", refused.status, refused.header, refused.body)
	}
	close(end)
	if got := within(t, done, "the one that ran ends"); got.status != 200 {
		t.Errorf("the one that ran got %d", got.status)
	}
	c.nodes["gen0"].serve = nil
	for _, bad := range []struct{ body, header, value string }{
		{`{"model":"m"`, "X-None", ""}, {`{"model":"nobody","prompt":"a"}`, "X-None", ""}, {completion, api.HeaderRequestID, "a b"}, {completion, api.HeaderDeadline, "soon"},
	} {
		c.post("/v1/completions", bad.body, bad.header, bad.value)
	}
	if records := c.settled(); len(records) != 6 || len(c.legs) != 1 {
		t.Fatalf("%d records and %d legs, want 6 and 1", len(records), len(c.legs))
	} else {
		for _, r := range append(records[:1:1], records[2:]...) {
			if r.Outcome != phase.Rejected || r.Error == nil || r.Stamps.EndNS == nil || len(r.Legs) != 0 {
				t.Errorf("record %+v", r)
			}
		}
	}
	c.proxy.door.idle(t)
}

func TestTheClientsDeadlineCountsWithinTheRouters(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	gen := c.nodes["gen0"]
	gen.serve = admitAndWait(gen)
	const life = 3 * time.Second // the leg is sent within it
	got := c.post("/v1/completions", completion, api.HeaderDeadline, strconv.FormatInt(life.Milliseconds(), 10))
	if got.status != 504 || !strings.Contains(got.body, `"timeout_error"`) {
		t.Errorf("got %d %q", got.status, got.body)
	}
	c.cancelled()
	if left, err := strconv.ParseInt(c.leg().header.Get(api.HeaderDeadline), 10, 64); err != nil || left >= life.Milliseconds() {
		t.Errorf("the leg was given %d ms of %d: %v", left, life.Milliseconds(), err)
	}
	if r := c.settled()[0]; r.Outcome != phase.Expired {
		t.Errorf("outcome %s", r.Outcome)
	}
	req, _ := http.NewRequest("POST", "/", http.NoBody)
	for v, want := range map[string]time.Duration{"": c.proxy.o.Timeout, "1": time.Millisecond, "9223372036854775807": c.proxy.o.Timeout} {
		req.Header.Set(api.HeaderDeadline, v)
		if got, e := c.proxy.lifeOf(req); e != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", v, got, e, want)
		}
	}
}

// TestARequestWhoseTimeIsOverHasOneError: whoever sees it first, a node or the router.
func TestARequestWhoseTimeIsOverHasOneError(t *testing.T) {
	const over = `{"error":{"message":"engine: deadline passed","type":"timeout_error","param":null,"code":504,"stage":"gen","retryable":false}}`
	for name, serve := range map[string]func(w http.ResponseWriter, r *http.Request, l leg){
		"by the router":              func(_ http.ResponseWriter, r *http.Request, _ leg) { <-r.Context().Done() },
		"by the node":                func(w http.ResponseWriter, _ *http.Request, l leg) { almost(l); status(504, over)(w, nil, l) },
		"by the node, in the stream": func(w http.ResponseWriter, _ *http.Request, l leg) { almost(l); streamEvents(w, over) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Aggregated, "gen0")
			c.nodes["gen0"].serve = serve
			got := c.post("/v1/completions", completion, api.HeaderDeadline, "100")
			if got.status != 504 || !strings.Contains(got.body, `"type":"timeout_error","param":null,"code":504`) || !strings.Contains(got.body, `"retryable":true`) ||
				!strings.Contains(got.body, "longer than the 100ms that it had") {
				t.Errorf("got %d %s", got.status, got.body)
			}
			if r := c.settled()[0]; r.Outcome != phase.Expired {
				t.Errorf("outcome %s", r.Outcome)
			}
		})
	}
	c := newCluster(t, Aggregated, "gen0")
	c.nodes["gen0"].serve = status(504, `{"error":{"message":"it took 60 s","type":"timeout_error"}}`)
	if got := c.post("/v1/completions", completion); got.status != 504 || !strings.Contains(got.body, "it took 60 s") {
		t.Errorf("a node's own limit: got %d %s", got.status, got.body)
	}
}

// almost waits until what a leg was given of the request's time is nearly over.
func almost(l leg) {
	ms, _ := strconv.Atoi(l.header.Get(api.HeaderDeadline))
	time.Sleep(time.Duration(ms)*time.Millisecond - 2*time.Millisecond)
}

func TestASlowReaderIsCutWithARecord(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	c.proxy.o.ClientIdle = time.Second // within which the first write happens
	gen, word := c.nodes["gen0"], strings.Repeat("x", 64<<10)
	gen.serve = func(w http.ResponseWriter, r *http.Request, _ leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil { // until the router gives up
			io.WriteString(w, `data: {"choices":[{"index":0,"text":"`+word+`","token_ids":[5],"finish_reason":null}]}`+"\n\n")
		}
		gen.waitGone(r)
	}
	res, err := c.send(t.Context(), "/v1/completions", completion)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	c.cancelled()
	if r := c.settled()[0]; r.Outcome != phase.Cancelled || r.Error.Stage != "relay" || !strings.Contains(r.Error.Message, "too long") {
		t.Errorf("record %+v, error %+v", r, r.Error)
	}
}
