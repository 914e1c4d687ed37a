package deploy

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

const (
	dashboard = "../../deploy/grafana/meridian.json"
	alerts    = "../../deploy/prometheus/alerts.yml"
)

var metricName = regexp.MustCompile(`\b(?:meridian_[a-z0-9_]+|vllm:[a-z0-9_]+)`)

// question is what a panel asks Prometheus, and how it names the answers.
type question struct {
	Expr         string
	LegendFormat string
}

// questions are all that Grafana would ask Prometheus.
func questions(t *testing.T) []question {
	t.Helper()
	b, err := os.ReadFile(dashboard)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Type    string
			GridPos struct{ X, Y, W, H int }
			Targets []question
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatalf("%s: %v", dashboard, err)
	}
	var out []question
	for _, p := range d.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", p.Title)
		}
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q is wider than the dashboard", p.Title)
		}
		out = append(out, p.Targets...)
	}
	return out
}

// exposed are the names under which the processes of a cluster have metrics, after a few requests, and the series of each process.
func exposed(t *testing.T) (names map[string]bool, processes [][]series) {
	t.Helper()
	bin := clustertest.Binaries(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cluster.Config{Bin: bin, Dir: t.TempDir(), Ctx: 1, Gen: 1, NodeArgs: []string{"--ranks=2"}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	}()
	cl := client.New(c.URL(), 2)
	defer cl.Close()
	for range 3 {
		if _, err := cl.Do(ctx, client.Request{Fields: map[string]any{"model": "meridian-tiny", "prompt": "Once upon a time", "max_tokens": 8, "stream": true}}); err != nil {
			t.Fatal(err)
		}
	}
	names = map[string]bool{}
	for { // a line is written up to a second after its request has ended
		processes = nil
		references := map[string]bool{} // that clocks are held against: the router's and clocksync's
		for _, p := range c.All() {
			of := scrape(ctx, t, p.URL+"/metrics", names)
			processes = append(processes, of)
			for _, s := range of {
				if s.name == "meridian_clock_bound_seconds" {
					references[s.labels["reference"]] = true
				}
			}
		}
		if names["meridian_span_seconds"] && len(references) == 2 {
			return names, processes
		}
		select {
		case <-ctx.Done():
			t.Fatal("no timeline or no clock has been measured in time")
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// series is a metric's name and its labels.
type series struct {
	name   string
	labels map[string]string
}

var (
	sample = regexp.MustCompile(`^([a-z0-9_:]+)(?:\{(.*)\})? `)
	label  = regexp.MustCompile(`([a-z_]+)="((?:[^"\\]|\\.)*)"`)
)

func scrape(ctx context.Context, t *testing.T, url string, into map[string]bool) (all []series) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	sc := bufio.NewScanner(io.LimitReader(res.Body, 16<<20))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) == 4 && f[0] == "#" && f[1] == "TYPE" {
			into[f[2]] = true
			if f[3] == "histogram" {
				into[f[2]+"_bucket"], into[f[2]+"_sum"], into[f[2]+"_count"] = true, true, true
			}
		}
		if m := sample.FindStringSubmatch(sc.Text()); m != nil {
			one := series{m[1], map[string]string{}}
			for _, l := range label.FindAllStringSubmatch(m[2], -1) {
				one.labels[l[1]] = l[2]
			}
			all = append(all, one)
		}
	}
	return all
}

func TestTheDashboardAndTheAlertsNameMetricsThatExist(t *testing.T) {
	rules, err := os.ReadFile(alerts)
	if err != nil {
		t.Fatal(err)
	}
	asked := []string{string(rules)}
	for _, q := range questions(t) {
		asked = append(asked, q.Expr)
	}
	have, processes := exposed(t)
	for _, p := range processes {
		checkLegends(t, p)
	}
	for _, q := range asked {
		for _, name := range metricName.FindAllString(q, -1) {
			if !have[name] {
				t.Errorf("%s is asked for, but no process has it", name)
			}
		}
	}
}

var placeholder = regexp.MustCompile(`\{\{([a-z_]+)\}\}`)

// checkLegends wants each line of a panel to have a name of its own: those of one process whose expression joins no series.
func checkLegends(t *testing.T, process []series) {
	t.Helper()
	for _, q := range questions(t) {
		if strings.Contains(q.Expr, " by (") || strings.HasPrefix(q.Expr, "sum(") {
			continue
		}
		for _, name := range metricName.FindAllString(q.Expr, -1) {
			shown := map[string]bool{}
			for _, s := range process {
				if s.name != name {
					continue
				}
				line := placeholder.ReplaceAllStringFunc(q.LegendFormat, func(p string) string { return s.labels[strings.Trim(p, "{}")] })
				if shown[line] {
					t.Errorf("%s has several lines of the name %q: of what is %v?", name, q.LegendFormat, s.labels)
				}
				shown[line] = true
			}
		}
	}
}

func TestPrometheusTakesTheRules(t *testing.T) {
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skip("promtool is not installed")
	}
	if out, err := exec.Command("promtool", "check", "config", "../../deploy/prometheus/prometheus.yml").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := exec.Command("promtool", "test", "rules", "testdata/alerts.yml").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	// The dashboard's expressions as rules: promtool has no other way to parse them.
	var b strings.Builder
	b.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for _, q := range questions(t) {
		q, _ := json.Marshal(strings.ReplaceAll(q.Expr, "$__rate_interval", "1m"))
		b.WriteString("  - record: a:b\n    expr: " + string(q) + "\n")
	}
	path := filepath.Join(t.TempDir(), "rules.yml")
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("promtool", "check", "rules", "--lint=none", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
