package qualify

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
)

// worker answers probes as nodes do; bad, when not nil, answers instead.
func worker(t *testing.T, name string, bad func(w http.ResponseWriter) bool) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var in struct {
			Stream bool
			Disagg api.DisaggParams `json:"disaggregated_params"`
		}
		if err := json.Unmarshal(body, &in); err != nil || r.Header.Get(api.HeaderProbe) != "1" || r.Header.Get(api.HeaderDeadline) == "" {
			t.Errorf("%s got %q with %v: %v", name, body, r.Header, err)
		}
		if bad != nil && bad(w) {
			return
		}
		if in.Disagg.RequestType == api.ContextOnly {
			fmt.Fprintf(w, `{"choices":[{"index":0,"text":"a","finish_reason":"length","disaggregated_params":{"request_type":"context_only","opaque":"x","disagg_request_id":%d}}]}`,
				*in.Disagg.DisaggRequestID)
			return
		}
		if !in.Stream || !strings.Contains(string(body), `"opaque":"x"`) || in.Disagg.RequestType != api.GenerationOnly {
			t.Errorf("%s got %s", name, body)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s
}

func TestPairsProveThemselvesAndBadOnesGetNoWork(t *testing.T) {
	var mended atomic.Bool
	broken := func(answer func(w http.ResponseWriter)) func(http.ResponseWriter) bool {
		return func(w http.ResponseWriter) bool {
			if mended.Load() {
				return false
			}
			answer(w)
			return true
		}
	}
	for name, bad := range map[string]func(w http.ResponseWriter){
		"an error":  func(w http.ResponseWriter) { w.WriteHeader(http.StatusInternalServerError) },
		"no stream": func(w http.ResponseWriter) { fmt.Fprint(w, "{}") },
		"an empty stream": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: [DONE]\n\n")
		},
		"an error in stream": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"error\":{\"message\":\"no KV\"}}\n\n")
		},
		"a cut stream": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
	} {
		well := t.Run(name, func(t *testing.T) {
			mended.Store(false)
			p := run(t)
			add(p, node.RoleCtx, "ctx0", worker(t, "ctx0", nil).URL)
			add(p, node.RoleGen, "bad", worker(t, "bad", broken(bad)).URL)
			until(t, "the pair is refused", func() bool { l, _ := p.Pairs(); return len(l) == 1 && l[0].State == pool.Refused })
			if err := p.Ready(false, false); err == nil || !strings.Contains(err.Error(), "bad") {
				t.Errorf("ready: %v", err)
			}
			if c, err := p.Pick(pool.Ask{Model: "m"}); err == nil {
				t.Errorf("a refused pair got work: %+v", c.Decision)
			}
			add(p, node.RoleGen, "good", worker(t, "good", nil).URL)
			until(t, "ready", func() bool { return p.Ready(false, false) == nil })
			for range 4 {
				c, err := p.Pick(pool.Ask{Model: "m"})
				if err != nil || c.Gen.Name != "good" {
					t.Fatalf("%+v, %v, want good", c, err)
				}
				c.Release()
			}
			mended.Store(true)
			until(t, "the pair is tried again", func() bool { l, _ := p.Pairs(); return l[0].Gen == "bad" && l[0].State == pool.Qualified })
		})
		if !well {
			break // each waits until its time is over
		}
	}
}

func TestANodeWithoutRoomIsAskedAgain(t *testing.T) {
	var asked atomic.Int64
	var full atomic.Bool
	full.Store(true)
	p := run(t)
	add(p, node.RoleCtx, "ctx0", worker(t, "ctx0", func(w http.ResponseWriter) bool {
		refuse := full.Load() // before it is counted: then it may change
		asked.Add(1)
		if refuse {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return refuse
	}).URL)
	add(p, node.RoleGen, "gen0", worker(t, "gen0", nil).URL)
	until(t, "it is asked again", func() bool { return asked.Load() >= 2 })
	if l, _ := p.Pairs(); l[0].State != pool.Unproven || !strings.Contains(l[0].Why, "no room") {
		t.Errorf("%+v: no room says nothing of the pair", l)
	}
	full.Store(false)
	until(t, "ready", func() bool { return p.Ready(false, false) == nil })
	if l, _ := p.Pairs(); l[0].State != pool.Qualified || asked.Load() < 3 {
		t.Errorf("%+v after %d probes, want qualified after 3 or more", l, asked.Load())
	}
}

func run(t *testing.T) *pool.Pool {
	t.Helper()
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := pool.New(pool.Options{Now: steady.Now, Qualify: true})
	if err != nil {
		t.Fatal(err)
	}
	client := upstream.New(upstream.Options{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	id := int64(1 << 41)
	q := New(Options{
		Router: "r", Pool: p, Client: client, Now: steady.Now, NextID: func() int64 { return atomic.AddInt64(&id, 1) },
		Schedule: func() (bool, bool) { return false, false },
	})
	go func() { ended <- q.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		client.Close()
	})
	return p
}

func add(p *pool.Pool, role node.Role, name, url string) {
	p.Put(node.Info{Name: name, Role: role, URL: url, State: node.Ready, Seq: 1, ClockID: clock.MakeID(1, 1), Model: &node.Model{Name: "m", Hash: "h"}})
}

// until waits for what a goroutine does.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	const patience = time.Minute // a refused pair waits up to half of it for its next probe
	for end := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %s still not: %s", patience, what)
		}
	}
}
