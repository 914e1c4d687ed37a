package chaos

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// bin finds the binaries, or skips the test.
func bin(t *testing.T) string {
	t.Helper()
	if os.Getenv("MERIDIAN_TEST_BIN") == "" {
		if dir, err := filepath.Abs("../../bin"); err == nil {
			t.Setenv("MERIDIAN_TEST_BIN", dir)
		}
	}
	dir, err := cluster.Binaries()
	if err != nil {
		t.Skip("the binaries are not built: make build")
	}
	return dir
}

// rig is a running cluster with a client of its first router.
type rig struct {
	*cluster.Cluster
	client *client.Client
	ctx    context.Context
}

// slowSim makes a decode step 5 ms and a prefill token 0.5 ms, so that there is time to hurt something in between.
func slowSim() []string {
	return []string{"--sim-step=5ms", "--sim-prefill-token=500us", "--sim-shallow"}
}

func start(t *testing.T, cfg cluster.Config) *rig {
	t.Helper()
	return startFor(t, cfg, 2*time.Minute)
}

// startFor starts a cluster that is used no longer than limit.
func startFor(t *testing.T, cfg cluster.Config, limit time.Duration) *rig {
	t.Helper()
	cfg.Bin, cfg.Dir, cfg.Logger = bin(t), t.TempDir(), quiet
	if cfg.Device == "" {
		cfg.Device = "sim"
	}
	if cfg.Device == "sim" && cfg.NodeArgs == nil {
		cfg.NodeArgs = slowSim()
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	c, err := cluster.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			for _, p := range c.All() {
				t.Logf("%s:\n%s", p.Name, p.LogTail(12))
			}
		}
	})
	cl := client.New(c.URL(), 64)
	t.Cleanup(cl.Close)
	return &rig{Cluster: c, client: cl, ctx: ctx}
}

// fields of a streamed greedy request with a prompt of n different tokens.
func fields(n, maxTokens int) map[string]any {
	prompt := make([]int, n)
	for i := range prompt {
		prompt[i] = 10 + (i*7+n)%1900
	}
	return map[string]any{
		"model": "meridian-tiny", "prompt": prompt, "max_tokens": maxTokens, "temperature": 0, "stream": true,
		"ignore_eos": true, "stream_options": map[string]any{"include_usage": true},
	}
}

// ok sends a short request and wants it to succeed.
func (r *rig) ok(t *testing.T, id string) {
	t.Helper()
	res, err := r.client.Do(r.ctx, client.Request{ID: id, Fields: fields(20, 5)})
	if err != nil || res.Usage == nil || res.Usage.CompletionTokens != 5 {
		t.Errorf("request %s: %v, usage %+v, want 5 tokens", id, err, res.Usage)
	}
}

// flight is a request under way.
type flight struct {
	id     string
	first  chan struct{} // closed when the first text came
	result chan error
	cancel context.CancelFunc
}

func (r *rig) send(id string, f map[string]any) *flight {
	ctx, cancel := context.WithCancel(r.ctx)
	fl := &flight{id: id, first: make(chan struct{}), result: make(chan error, 1), cancel: cancel}
	began := false
	go func() {
		_, err := r.client.Do(ctx, client.Request{ID: id, Fields: f, OnText: func(string) {
			if !began {
				began = true
				close(fl.first)
			}
		}})
		fl.result <- err
	}()
	return fl
}

// wait gives the result; the test fails if there is none within limit.
func (f *flight) wait(t *testing.T, limit time.Duration) error {
	t.Helper()
	begin := time.Now()
	select {
	case err := <-f.result:
		t.Logf("%s ended after %v: %v", f.id, time.Since(begin).Round(time.Millisecond), err)
		return err
	case <-time.After(limit):
		t.Fatalf("%s has not ended within %v", f.id, limit)
		return nil
	}
}

// nodeView is what /cluster says of a node.
type nodeView struct {
	Name     string
	Role     string
	State    string
	Reserved int // places, by the router that is asked
	Load     struct {
		Running int
		Waiting int
		KVUsed  int `json:"kv_used_blocks"`
	}
}

func (r *rig) nodes(t *testing.T) []nodeView {
	t.Helper()
	var v struct{ Nodes []nodeView }
	if err := r.client.Get(r.ctx, "/cluster", &v); err != nil {
		t.Fatal(err)
	}
	return v.Nodes
}

// busy waits until a node of a role runs something for a client, and returns its process. A router's probes reserve nothing.
func (r *rig) busy(t *testing.T, role string) *cluster.Process {
	t.Helper()
	var found *cluster.Process
	r.poll(t, 10*time.Second, "no busy "+role+" node", func() bool {
		for _, n := range r.nodes(t) {
			if n.Role == role && n.Reserved > 0 && n.Load.Running > 0 {
				found = r.Find(n.Name)
			}
		}
		return found != nil
	})
	return found
}

// idle waits until no living node holds anything.
func (r *rig) idle(t *testing.T, limit time.Duration) {
	t.Helper()
	var last string
	r.poll(t, limit, "nodes are not idle", func() bool {
		last = ""
		for _, n := range r.nodes(t) {
			if p := r.Find(n.Name); p.Running() && (n.Load.Running > 0 || n.Load.Waiting > 0 || n.Load.KVUsed > 0) {
				last += fmt.Sprintf("%s %+v ", n.Name, n.Load)
			}
		}
		return last == ""
	})
}

func (r *rig) poll(t *testing.T, limit time.Duration, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s within %v", what, limit)
		}
	}
}
