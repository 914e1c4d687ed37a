package chaos

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// TestANodeThatIsGoneMidRequest: another takes over, and the client sees a gap at most.
func TestANodeThatIsGoneMidRequest(t *testing.T) {
	cases := []struct {
		name string
		role string
		sig  syscall.Signal
	}{
		{"gennode killed while it decodes", "gen", syscall.SIGKILL},
		{"gennode's host vanished while it decodes", "gen", syscall.SIGSTOP},
		{"ctxnode killed while it prefills", "ctx", syscall.SIGKILL},
		{"ctxnode's host vanished while it prefills", "ctx", syscall.SIGSTOP},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 2, Gen: 2})
			prompt, tokens := 20, 600
			if c.role == "ctx" {
				prompt, tokens = 1800, 5
			}
			f := r.send("hurt", fields(prompt, tokens))
			victim := r.busy(t, c.role)
			if c.role == "gen" {
				f.begins(t)
			}
			if err := victim.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			if err := f.wait(t); err != nil {
				t.Errorf("no other node took over: %v", err)
			}
			for i := range 4 {
				r.ok(t, fmt.Sprintf("after-%d", i))
			}
			l, lineErr := r.client.Timeline(r.ctx, "hurt")
			if lineErr != nil {
				t.Fatal(lineErr)
			}
			if l.Outcome != "finished" || l.Error != nil {
				t.Errorf("timeline has outcome %s, error %+v, want finished", l.Outcome, l.Error)
			}
			if c.role == "ctx" && c.sig == syscall.SIGKILL && (attempts(l, "gen") != 1 || attempts(l, "ctx") != 2 || l.NegativeSpans > 0 || len(l.Violations) > 0) {
				t.Errorf("attempts %+v, %d negative spans, violations %v: want two prefills for one admission", l.Attempts, l.NegativeSpans, l.Violations)
			}
			r.idleAmongTheLiving(t, victim)
			_ = victim.Signal(syscall.SIGKILL) // a stopped one would not drain
			ended(t, victim)
		})
	}
}

// attempts counts the legs of a role.
func attempts(l client.Line, role string) (n int) {
	for _, a := range l.Attempts {
		if a.Role == role {
			n++
		}
	}
	return n
}

// checkEnd wants an error that names the stage; a prefill that was lost before any byte may have been tried again.
func checkEnd(t *testing.T, err error, role string, stages []string) {
	t.Helper()
	if err == nil && role == "ctx" {
		return
	}
	var status *client.StatusError
	if !errors.As(err, &status) {
		t.Errorf("error %v, want an error object", err)
		return
	}
	for _, s := range stages {
		if status.Stage == s {
			return
		}
	}
	t.Errorf("error names stage %q (%v), want one of %v", status.Stage, err, stages)
}

func (r *rig) idleAmongTheLiving(t *testing.T, victim *cluster.Process) {
	t.Helper()
	r.poll(t, patience, "nodes that live are not idle", func() bool {
		for _, n := range r.nodes(t) {
			if n.Name != victim.Name && (n.Load.Running > 0 || n.Load.KVUsed > 0) {
				return false
			}
		}
		return true
	})
}

func TestTheOnlyNodeIsKilledAndComesBack(t *testing.T) {
	for _, role := range []string{"ctx", "gen"} {
		t.Run(role, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 1, Gen: 1, RouterArgs: []string{"--schedule", "generation_first"}})
			f := r.send("hurt", fields(1000, 1000))
			victim := r.busy(t, role)
			if err := victim.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			ended(t, victim)
			if err := f.wait(t); err == nil {
				t.Error("the request succeeded without its node")
			}
			if err := r.Restart(r.ctx, victim); err != nil {
				t.Fatal(err)
			}
			r.poll(t, patience, "the node that came back gets no request", func() bool {
				_, err := r.client.Do(r.ctx, client.Request{Fields: fields(20, 5)})
				return err == nil
			})
			r.idle(t)
		})
	}
}

func TestSIGTERMDrains(t *testing.T) {
	for _, name := range []string{"gen0", "ctx0", "router", "clocksync"} {
		t.Run(name, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 1, Gen: 1, Grace: patience})
			f := r.send("drained", fields(100, 200))
			f.begins(t)
			if err := r.Find(name).Terminate(2 * patience); err != nil {
				t.Error(err)
			}
			if err := f.wait(t); err != nil {
				t.Errorf("the running request ended with %v", err)
			}
		})
	}
}

// TestADrainingNodeGetsNoNewWorkAndLeaves: what runs on it ends there, what comes meanwhile goes elsewhere, and it leaves the
// registry.
func TestADrainingNodeGetsNoNewWorkAndLeaves(t *testing.T) {
	for _, role := range []string{"ctx", "gen"} {
		t.Run(role, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 2, Gen: 2, Grace: patience, RouterArgs: []string{"--policy=round_robin"}}) // by load the other would have it anyway
			prompt, tokens := 20, 600
			if role == "ctx" {
				prompt, tokens = 1800, 5
			}
			f := r.send("running", fields(prompt, tokens))
			node := r.busy(t, role)
			if role == "gen" {
				f.begins(t)
			}
			left := make(chan error, 1)
			go func() { left <- node.Terminate(2 * patience) }()
			r.poll(t, patience, node.Name+" does not say that it drains", func() bool {
				for _, n := range r.nodes(t) {
					if n.Name == node.Name {
						return n.State != "ready"
					}
				}
				return true
			})
			for i := range 6 {
				id := fmt.Sprintf("meanwhile-%d", i)
				r.ok(t, id)
				if l, err := r.client.Timeline(r.ctx, id); err != nil || l.Node(role) == node.Name || attempts(l, role) != 1 {
					t.Errorf("%s ran on %s and %s drains: %v, attempts %+v: want one, elsewhere", id, l.Node(role), node.Name, err, l.Attempts)
				}
			}
			if err := f.wait(t); err != nil {
				t.Errorf("what ran on it ended with %v", err)
			}
			if err := <-left; err != nil {
				t.Error(err)
			}
			r.poll(t, patience, node.Name+" is still in the registry", func() bool {
				for _, n := range r.nodes(t) {
					if n.Name == node.Name {
						return false
					}
				}
				return true
			})
			if l, err := r.client.Timeline(r.ctx, "running"); err != nil || attempts(l, role) != 1 {
				t.Errorf("attempts %+v, %v: want one on the node that drained", l.Attempts, err)
			}
		})
	}
}

// keepsKV lets the context node hold KV for longer than the tests wait: what is free then was freed by the one who left.
func keepsKV() map[string]cluster.Place {
	return map[string]cluster.Place{"ctx0": {Args: []string{"--kv-lease=2m"}}}
}

func TestAClientThatLeavesFreesEverything(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, Places: keepsKV()})
	for i, after := range []time.Duration{0, 20, 60, 150, 400, 700, 1000} {
		f := r.send(fmt.Sprintf("left-%d", i), fields(200, 1500))
		r.pause(after * time.Millisecond)
		f.cancel()
		if err := f.wait(t); err == nil {
			t.Error("the request ended well though its client left")
		}
		r.idle(t)
	}
	r.ok(t, "after")
}

// pause lets the cluster run for a while: which moment of the request that meets is left to chance.
func (r *rig) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-r.ctx.Done():
	}
}
