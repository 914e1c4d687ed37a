package chaos

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

func TestANodeKilledUnderLoadHurtsOnlyItsOwnRequests(t *testing.T) {
	for _, victim := range []string{"gen0", "ctx0"} {
		t.Run(victim, func(t *testing.T) {
			const n = 24
			r := start(t, cluster.Config{Ctx: 2, Gen: 2, NoClocksync: true})
			var flights [n]*flight
			for i := range flights {
				flights[i] = r.send(fmt.Sprintf("load-%d", i), fields(30+i, 60))
			}
			flights[0].begins(t)
			p := r.Find(victim)
			if err := p.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			ended(t, p)
			failed := 0
			for _, f := range flights {
				if r.judge(t, f, victim) {
					failed++
				}
			}
			t.Logf("%d of %d requests failed", failed, n)
			if failed == n {
				t.Error("the other node saved no request")
			}
			for i := range 4 {
				r.ok(t, fmt.Sprintf("after-%d", i))
			}
			r.idleAmongTheLiving(t, p)
		})
	}
}

// judge wants a request to end well, or with an error that its timeline repeats. It says whether it failed.
func (r *rig) judge(t *testing.T, f *flight, victim string) bool {
	t.Helper()
	err := f.wait(t)
	l, lineErr := r.client.Timeline(r.ctx, f.id)
	if lineErr != nil {
		t.Fatal(lineErr)
	}
	if err == nil {
		if l.Outcome != "finished" {
			t.Errorf("%s ended well, its timeline says %s", f.id, l.Outcome)
		}
		return false
	}
	var status *client.StatusError
	if !errors.As(err, &status) || status.Stage == "" || l.Outcome != "failed" || l.Error == nil || l.Error.Stage != status.Stage {
		t.Errorf("%s: client saw %v; timeline: outcome %s, error %+v; want failed in the same stage", f.id, err, l.Outcome, l.Error)
	}
	if l.Node(victim[:3]) != victim {
		t.Errorf("%s failed on %s, not on the node that was killed: %v", f.id, l.Node(victim[:3]), err)
	}
	return true
}

func TestTheOnlyContextNodesHostVanishes(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NoClocksync: true, RouterArgs: []string{"--schedule", "generation_first"}})
	f := r.send("hurt", fields(1800, 5))
	victim := r.busy(t, "ctx")
	if err := victim.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	err := f.wait(t)
	if err == nil {
		t.Error("the request ended well without its context node")
	}
	checkEnd(t, err, "only ctx", []string{"ctx", "kv"})
	l, lineErr := r.client.Timeline(r.ctx, "hurt")
	if lineErr != nil || l.Outcome != "failed" || l.Error == nil || l.Complete || len(l.Missing) == 0 {
		t.Errorf("timeline %+v, %v; want failed, with the record of the node that vanished missing", l, lineErr)
	}
	r.idleAmongTheLiving(t, victim)
	if err := victim.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := r.WaitReady(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.ok(t, "after") // the host is back
	r.idle(t)
}
