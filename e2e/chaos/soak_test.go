package chaos

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

const (
	soakStreams  = 64   // at the same time
	soakRequests = 1000 // in all
	// soakGrowth bounds the goroutines more than before: kept connections differ by a few, a leak would be one a request.
	soakGrowth = 100
)

func TestAThousandRequestsLeaveNothingBehind(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 2, Gen: 2, NodeArgs: []string{"--sim-step=500us", "--sim-prefill-token=1us", "--sim-decode=1us", "--sim-shallow"}})
	r.soak(t, "warm", 2*soakStreams) // opens the connections that stay
	r.idle(t)
	before := r.goroutines(t)
	r.soak(t, "soak", soakRequests)
	r.idle(t)
	var bad map[string]string
	defer func() {
		for id, why := range bad {
			t.Logf("timeline of %s: %s", id, why)
		}
	}()
	r.poll(t, patience, "not every request has the timeline that it should", func() bool { // a late record amends a line
		bad = map[string]string{}
		return r.readLines(t, "soak-", bad) == soakRequests && len(bad) == 0
	})
	var grown string
	r.poll(t, patience, "goroutines are not back", func() bool {
		grown = ""
		for name, n := range r.goroutines(t) {
			if n > before[name]+soakGrowth {
				grown += fmt.Sprintf("%s: %d, were %d; ", name, n, before[name])
			}
		}
		return grown == ""
	})
}

// soak sends n requests, soakStreams at a time, and wants each answered in full.
func (r *rig) soak(t *testing.T, name string, n int) {
	t.Helper()
	var next atomic.Int64
	var all sync.WaitGroup
	for range soakStreams {
		all.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || r.ctx.Err() != nil {
					return
				}
				want := 1 + i%8
				res, err := r.client.Do(r.ctx, client.Request{ID: fmt.Sprintf("%s-%d", name, i), Fields: fields(5+i%90, want)})
				if err != nil || res.Usage == nil || res.Usage.CompletionTokens != want {
					t.Errorf("request %s-%d: %v, usage %+v, want %d tokens", name, i, err, res.Usage, want)
				}
			}
		})
	}
	all.Wait()
	r.client.Close()
}

// goroutines of each process, from its metrics.
func (r *rig) goroutines(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, p := range r.All() {
		for line := range strings.Lines(r.metrics(t, p)) {
			if text, ok := strings.CutPrefix(line, "go_goroutines "); ok {
				n, err := strconv.Atoi(strings.TrimSpace(text))
				if err != nil {
					t.Fatalf("%s: %q", p.Name, line)
				}
				out[p.Name] = n
			}
		}
	}
	return out
}

// readLines counts the requests with a prefix in the timeline files, and says of which the line, amended if it was, is not as it
// should be.
func (r *rig) readLines(t *testing.T, prefix string, bad map[string]string) int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(r.Traces(), "timeline-*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	amended, _ := filepath.Glob(filepath.Join(r.Traces(), "timeline-*.amend.ndjson")) // the pattern is a good one
	files = append(files, amended...)
	seen := map[string]bool{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			var l struct {
				client.Line
				Client string `json:"client_request_id"`
			}
			if json.Unmarshal(lines.Bytes(), &l) != nil || !strings.HasPrefix(l.Client, prefix) {
				continue // the open file's last line may be torn
			}
			seen[l.Client] = true
			delete(bad, l.Client)
			if !l.Complete || l.Outcome != "finished" || l.NegativeSpans > 0 || len(l.Violations) > 0 {
				bad[l.Client] = fmt.Sprintf("outcome %s, complete %v, missing %v, %d negative spans, violations %+v", l.Outcome, l.Complete, l.Missing, l.NegativeSpans, l.Violations)
			}
		}
	}
	return len(seen)
}
