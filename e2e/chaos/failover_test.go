package chaos

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/serve/servetest"
)

const (
	cutStreams     = 40 // in make test; MERIDIAN_CUT_STREAMS for more
	cutTokens      = 60
	cutConcurrency = 4
)

// TestCutStreamsSayWhatUndisturbedOnesSay: the connection to a generation node breaks at random places, and the client
// gets the text, the end and the usage of a request that nothing happened to.
func TestCutStreamsSayWhatUndisturbedOnesSay(t *testing.T) {
	n := number(t, "MERIDIAN_CUT_STREAMS", cutStreams)
	r := start(t, cluster.Config{Ctx: 2, Gen: 2, Device: "cpu", NoClocksync: true})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute+time.Duration(n)*3*time.Second)
	defer cancel()
	r.ctx = ctx
	for _, schedule := range []string{"generation_first", "context_first", "aggregated"} {
		t.Run(schedule, func(t *testing.T) {
			a := newCutter(t, r.Find("gen0").URL, cutTokens, 1)
			b := newCutter(t, r.Find("gen1").URL, cutTokens, 2)
			hurt := r.routerOver(t, schedule, a.url(), b.url())
			var all sync.WaitGroup
			queue := make(chan int, n)
			for i := range n {
				queue <- i
			}
			close(queue)
			for range cutConcurrency {
				all.Go(func() {
					for i := range queue {
						r.compare(t, hurt, i)
					}
				})
			}
			all.Wait()
			hurt.Close()
			a.close()
			b.close()
			cuts := a.cuts.Load() + b.cuts.Load()
			t.Logf("%d streams, %d cuts", n, cuts)
			if cuts < int64(n)/3 {
				t.Errorf("only %d cuts: the test tries nothing", cuts)
			}
		})
	}
	r.idle(t)
}

// routerOver starts a router that reaches the generation nodes only at the given addresses.
func (r *rig) routerOver(t *testing.T, schedule string, gens ...string) *client.Client {
	t.Helper()
	dir := t.TempDir()
	args := []string{"--name", "hurt", "--listen", servetest.Addr(t), "--traces", dir, "--schedule", schedule, "--policy", "round_robin"}
	url := "http://" + args[3]
	for _, p := range r.Nodes {
		if p.Kind == "ctxnode" && schedule != "aggregated" { // which would serve there, undisturbed
			args = append(args, "--ctx", p.URL)
		}
	}
	for _, g := range gens {
		args = append(args, "--gen", g)
	}
	cmd := exec.CommandContext(r.ctx, filepath.Join(os.Getenv("MERIDIAN_TEST_BIN"), "router"), args...)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("router:\n%s", b[max(0, len(b)-4000):])
		}
	})
	c := client.New(url, 64)
	r.poll(t, patience, "the router is not ready", func() bool {
		var ready any
		return c.Get(r.ctx, "/readyz", &ready) == nil
	})
	return c
}

// compare sends one request twice: undisturbed, and through the cutters.
func (r *rig) compare(t *testing.T, hurt *client.Client, i int) {
	f := cutRequest(i)
	want, err := r.client.Do(r.ctx, client.Request{Fields: f})
	if err != nil {
		t.Errorf("request %d undisturbed: %v", i, err)
		return
	}
	if i%3 == 2 && len(want.Text) > 12 { // a stop string that is met, in most cases behind the cut
		runes := []rune(want.Text)
		at := len(runes) * 3 / 4
		f["stop"] = []string{string(runes[at:min(at+3, len(runes))])}
		if want, err = r.client.Do(r.ctx, client.Request{Fields: f}); err != nil {
			t.Errorf("request %d undisturbed with stop: %v", i, err)
			return
		}
	}
	got, err := hurt.Do(r.ctx, client.Request{ID: fmt.Sprintf("cut-%d", i), Fields: f})
	if err != nil {
		t.Errorf("request %d: %v", i, err)
		return
	}
	if got.Text != want.Text || got.FinishReason != want.FinishReason || got.Usage == nil || got.Usage.PromptTokens != want.Usage.PromptTokens || got.Usage.CompletionTokens != want.Usage.CompletionTokens {
		t.Errorf("request %d: cut it says\n%q %s %+v, undisturbed\n%q %s %+v", i, got.Text, got.FinishReason, got.Usage, want.Text, want.FinishReason, want.Usage)
	}
}

// cutRequest makes requests of all kinds: greedy and seeded, with and without penalties, streamed and not.
func cutRequest(i int) map[string]any {
	f := fields(10+i%50, cutTokens)
	if i%2 == 1 {
		f["temperature"], f["seed"], f["top_p"] = 1.0, i, 0.95
	}
	if i%4 >= 2 {
		f["frequency_penalty"], f["repetition_penalty"] = 0.5, 1.1
	}
	if i%5 == 4 {
		f["stream"] = false
		delete(f, "stream_options")
	}
	return f
}
