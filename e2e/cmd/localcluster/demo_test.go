package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"sync"
	"sync/atomic"
	"testing"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/api"
)

// aRouter answers every request, and has the timeline of each; an id that comes twice is an error.
func aRouter(t *testing.T) *cluster.Cluster {
	t.Helper()
	var mu sync.Mutex // guards seen
	seen := map[string]bool{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(api.HeaderRequestID)
		mu.Lock()
		defer mu.Unlock()
		if seen[id] {
			t.Errorf("two requests have the id %s", id)
		}
		seen[id] = true
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n")
	})
	mux.HandleFunc("GET /timelines/{id}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"request_id":%q,"complete":true,"outcome":"finished","attempts":[{"role":"ctx","node":"c"},{"role":"gen","node":"g"}],"handover":{"bytes":1}}`, path.Base(r.URL.Path))
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return &cluster.Cluster{Routers: []*cluster.Process{{URL: s.URL}}}
}

func TestADemoThatIsInterruptedSendsNoMore(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var sent atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			sent.Add(1)
			cancel()
		}
		http.NotFound(w, r)
	}))
	defer s.Close()
	rep, _, err := (&demo{Requests: 50, MaxTokens: 1}).play(ctx, &cluster.Cluster{Routers: []*cluster.Process{{URL: s.URL}}})
	if sent.Load() != 1 || rep.Requests != 1 || rep.Incomplete != 1 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d sent, %+v, %v", sent.Load(), rep, err)
	}
}

func TestRunsInOneFolderDoNotShareIDs(t *testing.T) {
	c := aRouter(t)
	for range 2 {
		if rep, _, err := (&demo{Requests: 3, MaxTokens: 1}).play(t.Context(), c); err != nil || rep.Complete != 3 {
			t.Errorf("demo: %+v, %v", rep, err)
		}
		cl := client.New(c.URL(), 1)
		if err := (&testCase{Tokens: 1}).send(t.Context(), cl, "m", &run{Style: "aggregated"}); err != nil {
			t.Errorf("verify: %v", err)
		}
		cl.Close()
	}
}
