package chaos

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

var quiet = slog.New(slog.DiscardHandler)

// rig is a running cluster with a client of its first router.
type rig struct {
	*cluster.Cluster
	client *client.Client
	ctx    context.Context
}

// patience is how long the tests wait for what must happen on a loaded machine: they tell late from never, and log what they
// measured.
const patience = 30 * time.Second

// slowSim makes a decode step 5 ms and a prefill token 2 ms, so that there is time to hurt something in between.
func slowSim() []string {
	return []string{"--sim-step=5ms", "--sim-prefill-token=2ms", "--sim-shallow"}
}

func start(t *testing.T, cfg cluster.Config) *rig {
	t.Helper()
	return startFor(t, cfg, 5*time.Minute)
}

// startFor starts a cluster that is used no longer than limit.
func startFor(t *testing.T, cfg cluster.Config, limit time.Duration) *rig {
	t.Helper()
	if cfg.Device == "" {
		cfg.Device = "sim"
	}
	if cfg.Device == "sim" && cfg.NodeArgs == nil {
		cfg.NodeArgs = slowSim()
	}
	c, ctx := clustertest.Start(t, cfg, limit)
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

// begins waits for the first text.
func (f *flight) begins(t *testing.T) {
	t.Helper()
	select {
	case <-f.first:
	case err := <-f.result:
		t.Fatalf("%s ended before its first text: %v", f.id, err)
	case <-time.After(patience):
		t.Fatalf("%s has no text after %v", f.id, patience)
	}
}

// ended waits for the end of a process that was killed.
func ended(t *testing.T, p *cluster.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatalf("%s has not ended %v after it was killed", p.Name, patience)
	}
}

// wait gives the result.
func (f *flight) wait(t *testing.T) error {
	t.Helper()
	begin := time.Now()
	select {
	case err := <-f.result:
		t.Logf("%s ended after %v: %v", f.id, time.Since(begin).Round(time.Millisecond), err)
		return err
	case <-time.After(patience):
		t.Fatalf("%s has not ended within %v", f.id, patience)
		return nil
	}
}

// nodeView is what /cluster says of a node.
type nodeView struct {
	Name      string
	Role      string
	State     string
	Reserved  int // places, by the router that is asked
	Others    int `json:"others_reserved"` // by others, that the load does not hold yet
	Qualified bool
	Load      nodeLoad
}

type nodeLoad struct {
	Running       int
	Waiting       int
	WaitingTokens int `json:"waiting_tokens"`
	KVUsed        int `json:"kv_used_blocks"`
}

// prefills says that a long prompt is under way: a probe of the pair, which may be reported late, has a few tokens only.
func (l nodeLoad) prefills() bool { return l.Running == 1 && l.WaitingTokens > 100 }

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
	r.poll(t, patience, "no busy "+role+" node", func() bool {
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
func (r *rig) idle(t *testing.T) {
	t.Helper()
	var last string
	r.poll(t, patience, "nodes are not idle", func() bool {
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
