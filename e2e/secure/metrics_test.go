package secure

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"meridian.internal/e2e/cluster"
)

const docs = "../../docs/metrics.md"

// onlyWhen marks what has no series while all is well.
const onlyWhen = "; absent while "

var inQuotes = regexp.MustCompile("`([a-z0-9_]+)`")

// nodes is the heading after which the page is about nodes.
const nodes = "# Metrics of a node"

// documented gives the names in the first columns of the tables of a part of the page, and whether each is always there.
func documented(t *testing.T, part, prefix string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for line := range strings.Lines(part) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		for _, m := range inQuotes.FindAllStringSubmatch(cells[1], -1) {
			names[prefix+m[1]] = !strings.Contains(line, onlyWhen)
		}
	}
	if len(names) < 20 {
		t.Fatalf("%d names of %s in %s", len(names), prefix, docs)
	}
	return names
}

// metricsAreDocumented holds docs/metrics.md to the /metrics of routers and nodes in both directions, and has promtool read
// those of everybody.
func metricsAreDocumented(t *testing.T, c *cluster.Cluster) {
	b, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	ofRouter, ofNode, ok := strings.Cut(string(b), nodes)
	if !ok {
		t.Fatalf("%s has no %q", docs, nodes)
	}
	for _, p := range c.All() {
		if !p.Running() {
			continue
		}
		key := secret
		if p.Kind == "router" {
			key = admin
		}
		status, body := ask(t, "GET", p.URL+"/metrics", "", key)
		if status != 200 {
			t.Fatalf("%s: %d %s", p.Name, status, body)
		}
		switch p.Kind {
		case "router":
			names := documented(t, ofRouter, "meridian_router_")
			if gen := c.Find("gen0"); gen != nil && !gen.Running() {
				names["meridian_router_breaker_state"] = true
			}
			compare(t, p.Name, names, namesIn(body, "meridian_router_"))
		case "ctxnode", "gennode":
			compare(t, p.Name, documented(t, ofNode, "meridian_"), namesIn(body, "meridian_"))
		}
		promtool(t, p.Name, body)
	}
}

func namesIn(text, prefix string) map[string]bool {
	names := map[string]bool{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" && strings.HasPrefix(f[2], prefix) {
			names[f[2]] = true
		}
	}
	return names
}

func compare(t *testing.T, who string, documented, have map[string]bool) {
	for name, always := range documented {
		if always && !have[name] {
			t.Errorf("%s is documented, and not at /metrics of %s", name, who)
		}
	}
	for name := range have {
		if _, ok := documented[name]; !ok {
			t.Errorf("%s is at /metrics of %s, and not in %s", name, who, docs)
		}
	}
}

func promtool(t *testing.T, who, text string) {
	t.Run("promtool reads those of "+who, func(t *testing.T) {
		path, err := exec.LookPath("promtool")
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip("promtool is not installed")
		}
		cmd := exec.CommandContext(t.Context(), path, "check", "metrics")
		cmd.Stdin = strings.NewReader(text)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err = cmd.Run()
		bad := 0
		for line := range strings.Lines(out.String()) {
			// vLLM's names have a colon: who uses its dashboards wants them so.
			if !strings.HasPrefix(line, "vllm:") || !strings.HasSuffix(line, "should not contain ':'\n") {
				bad++
				t.Error(line)
			}
		}
		var exit *exec.ExitError
		if err != nil && (!errors.As(err, &exit) || bad == 0 && out.Len() == 0) {
			t.Error(err)
		}
	})
}
