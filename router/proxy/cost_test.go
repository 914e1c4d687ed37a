package proxy

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/router/perfheader"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// merges makes the router merge its own records alone, as it does without NATS; late: never.
func (c *cluster) merges(late bool) {
	var mu sync.Mutex // guards waiting
	waiting := map[string]chan *timeline.Line{}
	c.proxy.o.Expect = func(id string) (<-chan *timeline.Line, func()) {
		ch := make(chan *timeline.Line, 1)
		mu.Lock()
		defer mu.Unlock()
		waiting[id] = ch
		return ch, func() {
			mu.Lock()
			defer mu.Unlock()
			delete(waiting, id)
		}
	}
	keep := c.proxy.o.Record
	c.proxy.o.Record = func(r *phase.Record) {
		keep(r)
		mu.Lock()
		defer mu.Unlock()
		if ch := waiting[r.RequestID]; ch != nil && !late {
			ch <- timeline.Merge([]timeline.Part{{Record: r}}, timeline.Clocks{Reference: r.Instance})
		}
	}
}

func TestWhatARequestCost(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.merges(false)
	whole := `{"model":"m","prompt":"hi"}`
	got := c.post("/v1/completions", whole, "x-trtllm-RETURN-metrics", " 1 ")
	if v := got.header.Get("Server-Timing"); got.status != 200 || !strings.Contains(v, "disagg_queue;dur=") || !strings.Contains(v, "disagg_ttft;dur=") {
		t.Errorf("whole answer: %d, Server-Timing %q", got.status, v)
	}
	if v := got.header.Get("X-TRTLLM-Clock-Sync"); !strings.HasPrefix(v, "receive;ts=") || !strings.Contains(v, ", transmit;ts=") {
		t.Errorf("clock sync %q", v)
	}
	for _, v := range []string{"", "0", "true", "11"} {
		if got := c.post("/v1/completions", whole, "X-TRTLLM-return-metrics", v); got.header.Get("Server-Timing") != "" || got.header.Get("X-TRTLLM-Clock-Sync") != "" {
			t.Errorf("nobody asked (%q): %v", v, got.header)
		}
	}
	got = c.post("/v1/completions", completion, "X-TRTLLM-return-metrics", "1")
	at := strings.Index(got.body, "data: [DONE]\n\nevent: trtllm.perf_metrics\ndata: {\"Server-Timing\":\"disagg_queue;dur=")
	if at < 0 || !strings.HasSuffix(got.body, "\"}\n\n") || got.header.Get("X-TRTLLM-Clock-Sync") == "" || got.header.Get("Server-Timing") != "" {
		t.Errorf("stream: %v\n%s", got.header, got.body)
	}
	if got := c.post("/v1/completions", completion); strings.Contains(got.body, "perf_metrics") {
		t.Errorf("nobody asked: %s", got.body)
	}
}

func TestALateLineHoldsNoAnswerBack(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.merges(true)
	got := c.post("/v1/completions", completion, "X-TRTLLM-return-metrics", "1")
	if got.status != 200 || text(t, got.events, false) != "abc" || strings.Contains(got.body, "perf_metrics") {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// TestTheEndMarkWaitsForTheEndOfTheAnswer: the server sends both in one write, unless the event of the cost is still to come.
func TestTheEndMarkWaitsForTheEndOfTheAnswer(t *testing.T) {
	for _, perf := range []bool{false, true} {
		w := httptest.NewRecorder()
		o := &stream{w: echo.NewResponse(w, echo.New()), rc: http.NewResponseController(w), idle: time.Minute, buf: []byte("data: {}\n\n")}
		o.end(&session{perf: perf, req: &api.Request{}})
		if w.Flushed != perf {
			t.Errorf("cost asked for: %v, flushed: %v", perf, w.Flushed)
		}
		o.cost([]perfheader.Header{{Name: "Server-Timing", Value: "x;dur=1"}})
		if !strings.Contains(w.Body.String(), "perf_metrics") {
			t.Errorf("body %q", w.Body)
		}
	}
}
