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

// namesOf gives the names in the first column of the table, and whether each is always there.
func namesOf(t *testing.T) map[string]bool {
	t.Helper()
	b, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		for _, m := range inQuotes.FindAllStringSubmatch(cells[1], -1) {
			names["meridian_router_"+m[1]] = !strings.Contains(line, onlyWhen)
		}
	}
	if len(names) < 20 {
		t.Fatalf("%d names in %s", len(names), docs)
	}
	return names
}

// documented holds docs/metrics.md to the router's /metrics in both directions, and has promtool read those of everybody.
func documented(t *testing.T, c *cluster.Cluster) {
	var text string
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
		if p.Kind == "router" {
			text = body
		}
		promtool(t, p.Name, body)
	}
	have := map[string]bool{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" && strings.HasPrefix(f[2], "meridian_router_") {
			have[f[2]] = true
		}
	}
	for name, always := range namesOf(t) {
		if !have[name] && (always || c.Find("gen0") != nil && !c.Find("gen0").Running() && strings.HasSuffix(name, "_breaker_state")) {
			t.Errorf("%s is documented, and not at /metrics", name)
		}
		delete(have, name)
	}
	for name := range have {
		t.Errorf("%s is at /metrics, and not in %s", name, docs)
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
