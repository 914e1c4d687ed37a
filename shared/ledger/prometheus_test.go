package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
	"meridian.internal/shared/serve/servetest"
)

// installed skips the test where Debian's package prometheus, or another, is not installed.
func installed(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skip("this needs Prometheus: apt-get install prometheus")
	}
	return path
}

// aNodesMetrics serves metrics in which everything has a value.
func aNodesMetrics(t *testing.T, vllm bool) *httptest.Server {
	t.Helper()
	reg := prometheus.NewRegistry()
	l := newLedger(t, Options{Keep: 3, VLLM: vllm, Registry: reg, Sink: rows.Sink{Interval: 1}})
	r := rows.Row{Requests: rows.Requests{New: 3, Active: 2}, Sums: rows.Sums{Output: 41}, KV: rows.KV{Sampled: true, Max: 10, Used: 5}}
	r.Batch.Scheduled, r.Batch.CtxTokens, r.Batch.Context = rows.Some(2), rows.Some(100), rows.Some(1)
	l.Put(&r)
	var g Tokens
	g.Add([]infer.Token{{AtNS: 1}, {AtNS: 3e6}})
	l.Observe(&phase.Record{Outcome: phase.Finished, Stamps: phase.Stamps{ReceiveNS: ns(1), FirstTokenNS: ns(5e6), LastTokenNS: ns(9e6)}}, Ended{Tokens: &g})
	srv := httptest.NewServer(promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	t.Cleanup(srv.Close)
	return srv
}

func TestPromtoolFindsNothing(t *testing.T) {
	tool := installed(t, "promtool")
	res, err := http.Get(aNodesMetrics(t, false).URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	cmd := exec.CommandContext(t.Context(), tool, "check", "metrics")
	cmd.Stdin = res.Body
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
}

func TestPrometheusScrapes(t *testing.T) {
	program := installed(t, "prometheus")
	target, err := url.Parse(aNodesMetrics(t, true).URL)
	if err != nil {
		t.Fatal(err)
	}
	api := startPrometheus(t, program, target.Host)
	for query, want := range map[string]string{
		"meridian_iter_output_tokens_total":                       `"41"`,
		`{__name__="vllm:num_requests_running"}`:                  `"3"`,
		"meridian_kv_cache_utilization":                           `"0.5"`,
		"histogram_count(meridian_time_to_first_token_seconds)":   `"1"`, // native
		"meridian_inter_token_latency_seconds_count":              `"1"`,
		`meridian_inter_token_latency_seconds_bucket{le="0.005"}`: `"1"`,
	} {
		if got := ask(t, api, query); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", query, got, want)
		}
	}
}

// startPrometheus scrapes a target and waits for the first scrape.
func startPrometheus(t *testing.T, program, target string) (api string) {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 2s}\nscrape_configs:\n- job_name: node\n  static_configs: [{targets: [%q]}]\n", target)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	addr := servetest.Addr(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	cmd := exec.CommandContext(ctx, program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+addr, "--enable-feature=native-histograms")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); _ = cmd.Wait() })
	api = "http://" + addr
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if strings.Contains(ask(t, api, "up"), `"1"`) {
			return api
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("Prometheus has scraped nothing in a minute")
		}
	}
}

// ask gives the values of a query; "" while Prometheus does not answer.
func ask(t *testing.T, api, query string) string {
	t.Helper()
	res, err := http.Get(api + "/api/v1/query?query=" + url.QueryEscape(query))
	if err != nil {
		return ""
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return ""
	}
	var a struct {
		Data struct{ Result []struct{ Value []any } }
	}
	if json.Unmarshal(b, &a) != nil {
		return string(b)
	}
	out := ""
	for _, r := range a.Data.Result {
		out += fmt.Sprintf("%q ", r.Value[1])
	}
	return out
}
