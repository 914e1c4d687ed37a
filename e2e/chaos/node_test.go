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

// noticed is how long a client may wait for the error of a node that is gone.
const noticed = 2 * time.Second

// slack is for a loaded machine: the tests tell late from never, and log what they measured.
const slack = 3 * time.Second

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
				<-f.first
			}
			if err := victim.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			if err := f.wait(t, noticed+slack+time.Duration(2*prompt+20*tokens)*time.Millisecond); err != nil {
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
			<-victim.Done()
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
	r.poll(t, 10*time.Second, "nodes that live are not idle", func() bool {
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
			f := r.send("hurt", fields(1000, 500))
			victim := r.busy(t, role)
			if err := victim.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			<-victim.Done()
			if err := f.wait(t, noticed+slack); err == nil {
				t.Error("the request succeeded without its node")
			}
			if err := r.Restart(r.ctx, victim); err != nil {
				t.Fatal(err)
			}
			r.poll(t, 10*time.Second, "the node that came back gets no request", func() bool {
				_, err := r.client.Do(r.ctx, client.Request{Fields: fields(20, 5)})
				return err == nil
			})
			r.idle(t, 10*time.Second)
		})
	}
}

func TestSIGTERMDrains(t *testing.T) {
	for _, name := range []string{"gen0", "ctx0", "router", "clocksync"} {
		t.Run(name, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 1, Gen: 1})
			f := r.send("drained", fields(100, 200))
			<-f.first
			if err := r.Find(name).Terminate(15 * time.Second); err != nil {
				t.Error(err)
			}
			if err := f.wait(t, 10*time.Second); err != nil {
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
			r := start(t, cluster.Config{Ctx: 2, Gen: 2})
			prompt, tokens := 20, 300
			if role == "ctx" {
				prompt, tokens = 1800, 5
			}
			f := r.send("running", fields(prompt, tokens))
			node := r.busy(t, role)
			if role == "gen" {
				<-f.first
			}
			ended := make(chan error, 1)
			go func() { ended <- node.Terminate(20 * time.Second) }()
			r.poll(t, 5*time.Second, node.Name+" does not say that it drains", func() bool {
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
				if l, err := r.client.Timeline(r.ctx, id); err != nil || l.Node(role) == node.Name {
					t.Errorf("%s ran on %s, which drains: %v", id, l.Node(role), err)
				}
			}
			if err := f.wait(t, 10*time.Second+slack); err != nil {
				t.Errorf("what ran on it ended with %v", err)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
			r.poll(t, 5*time.Second, node.Name+" is still in the registry", func() bool {
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

func TestAClientThatLeavesFreesEverything(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1})
	for i, after := range []time.Duration{0, 20, 60, 150, 400, 700, 1000} {
		f := r.send(fmt.Sprintf("left-%d", i), fields(900, 500))
		r.pause(after * time.Millisecond)
		f.cancel()
		if err := f.wait(t, slack); err == nil {
			t.Error("the request ended well though its client left")
		}
		r.idle(t, time.Second+slack)
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
