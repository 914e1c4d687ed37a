package proxy

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// scrape gives what Prometheus would read.
func scrape(t *testing.T, r *prometheus.Registry, accept string) string {
	t.Helper()
	w := httptest.NewRecorder()
	req := httptest.NewRequest("GET", "/metrics", nil)
	req.Header.Set("Accept", accept)
	promhttp.HandlerFor(r, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, req)
	if w.Code != http.StatusOK {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func TestMetrics(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	reg := prometheus.NewRegistry()
	met, err := newMetrics(reg, c.proxy.health, c.proxy.door, c.proxy.bodies, c.pool)
	if err != nil {
		t.Fatal(err)
	}
	c.proxy.met = met
	c.post("/v1/completions", completion)
	c.post("/v1/completions", `{"model":"m","prompt":"hi"}`)
	c.post("/v1/completions", `{"model":"none","prompt":"hi"}`)
	c.post("/v1/completions", `{`)
	records := c.settled()
	text := scrape(t, reg, "")
	for _, want := range []string{
		`meridian_router_requests_total{outcome="finished",stage=""} 2`, `meridian_router_requests_total{outcome="rejected",stage="parse"} 2`,
		`meridian_router_requests_total{outcome="failed",stage="gen"} 0`, `meridian_router_requests_total{outcome="rejected",stage="place"} 0`,
		`meridian_router_requests_running 0`, `meridian_router_body_bytes 0`, `meridian_router_admission{state="waiting"} 0`, `meridian_router_ttft_seconds_count 2`, `meridian_router_e2e_seconds_count 2`, `meridian_router_itl_seconds_count 4`,
		`meridian_router_overhead_seconds_count 2`, `meridian_router_output_tokens_total 6`, `meridian_router_reserved_legs{node="gen0",role="gen"} 0`,
		`meridian_router_node_healthy{node="ctx0",role="ctx"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is missing in\n%s", want, text)
		}
	}
	open := scrape(t, reg, "application/openmetrics-text; version=1.0.0")
	leads := false // not every request's id is kept
	for _, r := range records {
		leads = leads || r.Outcome == "finished" && strings.Contains(open, `request_id="`+r.RequestID+`"`)
	}
	if !leads {
		t.Errorf("no exemplar leads to a request:\n%s", open)
	}
	promtool(t, text)
}

// promtool has the text checked where it is installed.
func promtool(t *testing.T, text string) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if errors.Is(err, exec.ErrNotFound) {
		t.Log("promtool is not installed: its check is left out")
		return
	}
	cmd := exec.CommandContext(t.Context(), path, "check", "metrics")
	cmd.Stdin = strings.NewReader(text)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil || out.Len() > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, &out)
	}
}
