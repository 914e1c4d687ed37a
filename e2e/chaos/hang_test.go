package chaos

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// gone waits until a process has ended by itself, which is a failure, and wants its log to say why.
func (r *rig) gone(t *testing.T, p *cluster.Process, why string) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatalf("%s still runs %v after its device began to hang", p.Name, patience)
	}
	if log := p.LogTail(40); !strings.Contains(log, why) {
		t.Errorf("%s does not say %q:\n%s", p.Name, why, log)
	}
}

// TestADeviceThatHangsIsGivenUp: the back end of a node never returns from a step. Its streams go on at another node, it leaves, and
// its records say why.
func TestADeviceThatHangsIsGivenUp(t *testing.T) {
	const n, tokens = 8, 300
	hang := []string{"--sim-fault-hang-at=150", "--step-deadline=1s"}
	for _, c := range []struct {
		name string
		node string
		args []string
		what string
	}{
		{"a generation node", "gen0", hang, "step "},
		{"a context node", "ctx0", []string{"--sim-fault-hang-at=8", "--step-deadline=1s", "--max-batch-size=1"}, "step "}, // a step for each prompt
		{"a node of ranks", "gen0", append(hang, "--ranks=2"), "step "},
		{"a node of ranks that are processes", "gen0", append(hang, "--ranks=2", "--rank-processes"), "step "},
		{"a node of stages", "gen0", append(hang, "--pp=2"), "step "},
		{"a generation node, in a copy of KV", "gen0", []string{"--sim-fault-hang-copy-at=12", "--step-deadline=1s"}, "a copy of KV"},
		{"a context node, in a copy of KV", "ctx0", []string{"--sim-fault-hang-copy-at=12", "--step-deadline=1s"}, "a copy of KV"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 2, Gen: 2, NoClocksync: true, RouterArgs: []string{"--policy=round_robin", "--schedule=generation_first"}, Places: map[string]cluster.Place{c.node: {Args: c.args}}})
			var flights []*flight
			send := func() *flight {
				flights = append(flights, r.send(fmt.Sprintf("hurt-%d", len(flights)), fields(30+len(flights), tokens)))
				return flights[len(flights)-1]
			}
			for range n {
				send()
			}
			for i, f := range flights {
				if err := f.wait(t); err != nil {
					t.Errorf("request %d: %v", i, err)
				}
			}
			for until := time.Now().Add(patience); r.Find(c.node).Running() && time.Now().Before(until); { // its pairs were proven late
				if err := send().wait(t); err != nil {
					t.Errorf("request %d: %v", len(flights)-1, err)
				}
			}
			r.gone(t, r.Find(c.node), "the device hangs: "+c.what)
			for _, v := range r.nodes(t) {
				if v.Name == c.node && v.State == "ready" {
					t.Errorf("%s is still ready", v.Name)
				}
			}
			told := 0
			for i := range flights {
				var l struct {
					Outcome  string
					Attempts []struct {
						Node  string
						Error *struct{ Message string }
					}
				}
				id := fmt.Sprintf("hurt-%d", i)
				if _, err := r.client.Whole(r.ctx, id); err != nil {
					t.Fatal(err)
				}
				if err := r.client.Get(r.ctx, "/timelines/"+id, &l); err != nil || l.Outcome != "finished" {
					t.Errorf("%s: outcome %s, %v", id, l.Outcome, err)
				}
				for _, a := range l.Attempts {
					if a.Node == c.node && a.Error != nil && strings.Contains(a.Error.Message, "the device hangs") {
						told++
					}
				}
			}
			if told == 0 {
				t.Error("no record says that the device hangs")
			}
			r.idleAmongTheLiving(t, r.Find(c.node))
		})
	}
}

// TestEveryDeviceHangs: nobody is left who could do the work, so that the client is told, long before its deadline.
func TestEveryDeviceHangs(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NoClocksync: true, NodeArgs: append(slowSim(), "--sim-fault-hang-at=100", "--step-deadline=1s")})
	f := r.send("hurt", fields(30, 500))
	err := f.wait(t)
	var status *client.StatusError
	if !errors.As(err, &status) || !status.Retryable || status.Stage == "" {
		t.Errorf("the client got %v, want an error that names a stage and may be tried again", err)
	}
	for _, p := range r.Nodes { // the context node has gone on with the answer
		r.gone(t, p, "the device hangs: step 100 of 1 sequences")
	}
}
