package chaos

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/load"
)

const (
	longStreams = 500
	// longGrowth bounds the router's memory at the end against that after a fifth of the time: a leak grows with the time.
	longGrowth = 1.2
)

// long starts a cluster for a run of the duration in an environment variable; without it the test is skipped.
func long(t *testing.T, name string, args ...string) (*rig, time.Duration) {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		t.Skipf("%s is not set: want a duration, like 30m (make soak, make overload)", name)
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		t.Fatalf("%s=%q: want a duration, like 30m", name, v)
	}
	r := start(t, cluster.Config{Ctx: 1, Gen: 2, NoClocksync: true, NodeArgs: args})
	ctx, cancel := context.WithTimeout(context.Background(), 2*d+5*time.Minute)
	t.Cleanup(cancel)
	r.ctx = ctx
	return r, d
}

func dist(t *testing.T, text string) load.Dist {
	t.Helper()
	d, err := load.ParseDist(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (r *rig) plan(t *testing.T, concurrency int, d time.Duration) load.Plan {
	return load.Plan{
		URL: r.URL(), Model: "meridian-tiny", Duration: d, Concurrency: concurrency, Prompt: dist(t, "uniform:16:64"),
		Output: dist(t, "uniform:50:150"), Vocab: 2000, Stream: true, IgnoreEOS: true, Seed: 1, Timeout: 2 * time.Minute,
	}
}

// TestSoak holds 500 streams for a long time: memory, goroutines and descriptors must not grow.
func TestSoak(t *testing.T) {
	r, d := long(t, "MERIDIAN_SOAK", "--sim-step=250ms", "--sim-prefill-token=1us", "--sim-shallow", "--max-batch-size=256", "--max-num-tokens=4096", "--kv-blocks=20000")
	before := r.held(t)
	type sample struct {
		at       time.Duration
		kib, fds int
		threads  int
	}
	var samples []sample
	done := make(chan load.Summary, 1)
	began := time.Now()
	go func() {
		sum, err := load.Run(r.ctx, r.plan(t, longStreams, d), nil)
		if err != nil {
			t.Error(err)
		}
		done <- sum
	}()
	tick := time.NewTicker(max(d/30, time.Second))
	defer tick.Stop()
	var sum load.Summary
	for running := true; running; {
		select {
		case <-tick.C:
			h := r.held(t)
			s := sample{time.Since(began).Round(time.Second), r.memoryKiB(t), h["router descriptors"], h["router go_goroutines"]}
			t.Logf("%v: router %d KiB, %d goroutines, %d descriptors", s.at, s.kib, s.threads, s.fds)
			samples = append(samples, s)
		case sum = <-done:
			running = false
		}
	}
	t.Logf("%d requests, %d ok, errors %v, %.0f tokens/s", sum.Requests, sum.OK, sum.Errors, sum.OutputPerS)
	if sum.OK != sum.Requests || len(samples) < 10 {
		t.Errorf("%d of %d requests ended well, %d samples", sum.OK, sum.Requests, len(samples))
		return
	}
	first, last := samples[len(samples)/5], samples[len(samples)-2] // the very last may be after the load
	if float64(last.kib) > longGrowth*float64(first.kib) || last.threads > first.threads+endsGrowth || last.fds > first.fds+endsGrowth {
		t.Errorf("grown from %+v to %+v", first, last)
	}
	r.idle(t)
	r.poll(t, time.Minute, "not everything is back", func() bool { return grownSince(before, r.held(t)) == "" })
}

// memoryKiB is what the router has in memory.
func (r *rig) memoryKiB(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.Routers[0].PID()))
	if err != nil {
		t.Skip("no /proc: memory cannot be read")
	}
	kib := 0
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if _, err := fmt.Sscan(rest, &kib); err != nil {
				t.Fatal(err)
			}
		}
	}
	return kib
}

// TestOverload sends twice what the cluster can do: what it does must stay within a tenth of the most, and whoever is
// refused is told when to come back.
func TestOverload(t *testing.T) {
	args := []string{"--sim-step=20ms", "--sim-prefill-token=1us", "--sim-shallow", "--max-batch-size=16", "--max-num-tokens=2048", "--kv-blocks=5000"}
	r, d := long(t, "MERIDIAN_OVERLOAD", args...)
	before := r.held(t)
	most, err := load.Run(r.ctx, r.plan(t, 64, max(d/5, 10*time.Second)), nil) // closed loop: always something waits
	if err != nil || most.OK != most.Requests {
		t.Fatalf("the most that it can do: %+v, %v", most.Errors, err)
	}
	p := r.plan(t, 100_000, d)
	p.Rate, p.Timeout = 2*most.RequestsPerS, 30*time.Second
	sum, err := load.Run(r.ctx, p, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("most: %.1f requests/s, %.0f tokens/s; at twice that, for %v: %.1f requests/s, %.0f tokens/s, %d of %d ok, errors %v, %d with Retry-After",
		most.RequestsPerS, most.OutputPerS, d, sum.RequestsPerS, sum.OutputPerS, sum.OK, sum.Requests, sum.Errors, sum.RetryAfter)
	if sum.OutputPerS < 0.9*most.OutputPerS {
		t.Errorf("goodput %.0f tokens/s is below nine tenths of %.0f", sum.OutputPerS, most.OutputPerS)
	}
	refused := sum.Errors["status_429_queue"] + sum.Errors["status_503_queue"]
	if refused == 0 || refused != sum.Requests-sum.OK || sum.RetryAfter != refused {
		t.Errorf("%d refused, %d of them with Retry-After, %d not ok: want all the same, and some", refused, sum.RetryAfter, sum.Requests-sum.OK)
	}
	r.idle(t)
	r.poll(t, time.Minute, "not everything is back", func() bool { return grownSince(before, r.held(t)) == "" })
}
