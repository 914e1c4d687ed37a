package chaos

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/phase"
)

// cancelled is what the timeline of a request says of how its legs ended.
type cancelled struct {
	Outcome  string
	Attempts []struct{ Role, Outcome string }
	Start    int64 `json:"start_ns"`
	Phases   []struct {
		Role   string
		Stamps []json.RawMessage `json:"stamps_ns"` // after Start, in the order of phase.Stamps
	}
}

// TestACancelReachesBothLegsAtEveryStage: the client leaves in each stage of a request with nodes of ours. Both nodes end their
// legs and say so in their records, and nothing is held. The times from the client's leaving to the end of each leg are logged:
// the step and the copy in flight are in them. All processes read one clock here.
func TestACancelReachesBothLegsAtEveryStage(t *testing.T) {
	const times = 8
	args := []string{"--sim-step=5ms", "--sim-prefill-token=2ms", "--sim-shallow", "--max-num-tokens=32", "--max-batch-size=2"}
	for _, s := range []struct {
		name     string
		router   []string
		blockers int // requests that go on meanwhile
		prompt   int
		at       func(t *testing.T, r *rig, f *flight)
		roles    []string // whose legs were under way
	}{
		{"the door", []string{"--max-running=2"}, 2, 20, func(t *testing.T, r *rig, _ *flight) {
			r.poll(t, patience, "nobody waits at the door", func() bool {
				return strings.Contains(r.metrics(t, r.Routers[0]), "meridian_router_admission{state=\"waiting\"} 1")
			})
		}, nil},
		{"admission at the generation node", nil, 2, 20, func(t *testing.T, r *rig, _ *flight) {
			r.poll(t, patience, "nobody waits at the generation node", func() bool { return r.load(t, "gen0").Waiting == 1 })
		}, []string{"gen"}},
		{"prefill", nil, 0, 1800, func(t *testing.T, r *rig, _ *flight) {
			r.poll(t, patience, "nothing is prefilled", func() bool { return r.load(t, "ctx0").prefills() })
		}, []string{"ctx", "gen"}},
		{"decode", nil, 0, 20, func(t *testing.T, _ *rig, f *flight) { f.begins(t) }, []string{"gen"}},
		{"prefill, context first", []string{"--schedule=context_first"}, 0, 1800, func(t *testing.T, r *rig, _ *flight) {
			r.poll(t, patience, "nothing is prefilled", func() bool { return r.load(t, "ctx0").prefills() })
		}, []string{"ctx"}},
		{"decode, aggregated", []string{"--schedule=aggregated"}, 0, 20, func(t *testing.T, _ *rig, f *flight) { f.begins(t) }, []string{"gen"}},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := start(t, cluster.Config{Ctx: 1, Gen: 1, NodeArgs: args, RouterArgs: s.router, Places: keepsKV()})
			took := map[string][]float64{}
			for i := range times {
				// What was reported of the probe of the pair, or of the request before, must not be taken for what comes now.
				r.poll(t, patience, "a node still reports work", func() bool {
					return !slices.ContainsFunc(r.nodes(t), func(n nodeView) bool { return n.Load.Running+n.Load.Waiting > 0 })
				})
				var blockers []*flight
				for j := range s.blockers {
					b := r.send(fmt.Sprintf("blocks-%d-%d", i, j), fields(20+j, 1900))
					b.begins(t)
					blockers = append(blockers, b)
				}
				id := fmt.Sprintf("leaves-%d", i)
				f := r.send(id, fields(s.prompt+i, min(1500, 2000-s.prompt))) // never the same prompt: prefill is not skipped
				s.at(t, r, f)
				left := steadyNS(t)
				f.cancel()
				if f.wait(t) == nil {
					t.Error("the request ended well though its client left")
				}
				for _, b := range blockers {
					b.cancel()
					_ = b.wait(t)
				}
				r.idle(t)
				r.ends(t, id, left, s.roles, took)
			}
			for role, ms := range took {
				slices.Sort(ms)
				t.Logf("from the client's leaving to the end of the %s leg: p50 %.1f ms, max %.1f ms of %d", role, ms[len(ms)/2], ms[len(ms)-1], len(ms))
			}
		})
	}
}

// ends reads how long after left each leg of a request ended, and wants it cancelled.
func (r *rig) ends(t *testing.T, id string, left int64, roles []string, took map[string][]float64) {
	t.Helper()
	if _, err := r.client.Timeline(r.ctx, id); err != nil {
		t.Fatal(err)
	}
	var l cancelled
	if err := r.client.Get(r.ctx, "/timelines/"+id, &l); err != nil {
		t.Fatal(err)
	}
	for _, role := range roles {
		said := slices.ContainsFunc(l.Attempts, func(a struct{ Role, Outcome string }) bool { return a.Role == role && a.Outcome == "cancelled" })
		if l.Outcome != "cancelled" || !said {
			t.Errorf("%s: outcome %s, attempts %+v: want a cancelled %s leg", id, l.Outcome, l.Attempts, role)
		}
	}
	at := -1
	for i, s := range (&phase.Stamps{}).All() {
		if s.Name == "end_ns" {
			at = i
		}
	}
	for _, p := range l.Phases {
		var end int64
		if len(p.Stamps) <= at || json.Unmarshal(p.Stamps[at], &end) != nil {
			t.Errorf("%s: the %s record has no end on the router's clock", id, p.Role)
			continue
		}
		if end += l.Start; end < left {
			continue // it was over before
		}
		took[p.Role] = append(took[p.Role], float64(end-left)/1e6)
	}
}

// steadyNS is the clock of all steady stamps on this machine.
func steadyNS(t *testing.T) int64 {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		t.Skip("no monotonic clock: " + err.Error())
	}
	return ts.Nano()
}

func (r *rig) load(t *testing.T, name string) (load nodeLoad) {
	t.Helper()
	for _, n := range r.nodes(t) {
		if n.Name == name {
			load = n.Load
		}
	}
	return load
}
