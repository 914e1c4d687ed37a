package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/rows"
)

// event is one of a Chrome trace.
type event struct {
	Ph, Name, Cat, ID string
	PID, TID          int
	TS, Dur           float64 // µs
	Args              map[string]any
}

func (e *event) end() float64 { return e.TS + e.Dur }

// traceOf reads a trace as strictly as a viewer could.
func traceOf(t *testing.T, path string) []event {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var trace struct {
		DisplayTimeUnit string
		Metadata        struct {
			Complete bool
			Dropped  int
		}
		TraceEvents []event
	}
	if err := json.Unmarshal(b, &trace); err != nil || !trace.Metadata.Complete || trace.Metadata.Dropped != 0 || trace.DisplayTimeUnit != "ms" {
		t.Fatalf("%v: %+v, %q", err, trace.Metadata, trace.DisplayTimeUnit)
	}
	return trace.TraceEvents
}

// TestATraceIsWellFormed runs a load of requests that overlap, with the host a step ahead of the device.
func TestATraceIsWellFormed(t *testing.T) {
	dir := t.TempDir()
	if to := os.Getenv("MERIDIAN_TRACE_DIR"); to != "" { // to look at it
		dir = to
	}
	const steps, layers = 20, 3
	synctest.Test(t, func(t *testing.T) {
		var reads atomic.Int64 // what the host does takes time: time moves on with each look at the clock
		at := clock()
		now := func() int64 { return at() + 20*reads.Add(1) }
		d, err := sim.New(sim.Config{Now: now, Layers: layers, Cost: sim.Cost{Step: 2e6, PrefillToken: 1e5}})
		if err != nil {
			t.Fatal(err)
		}
		r := newRigOn(t, Config{Now: now, Overlap: true, MaxBatchSize: 4, Profile: &profile.Options{Name: "gen0", Dir: dir}}, d)
		defer r.stop()
		n := steps
		w, err := r.StartProfile(t.Context(), rows.ProfileRequest{NumSteps: &n, Activities: []string{profile.GPU, profile.Layers}})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 6 {
			go r.run(request(4+5*i, int32(i+1), 6+3*i))
			time.Sleep(3 * time.Millisecond)
		}
		time.Sleep(time.Second)
		r.stop()
		checkTrace(t, traceOf(t, w.Files[0]), steps, layers)
	})
}

func checkTrace(t *testing.T, events []event, steps, layers int) {
	t.Helper()
	names := map[int]string{}
	slices := map[string][]event{} // by track
	open := map[string][]event{}   // by request
	requests := 0
	for _, e := range events {
		switch e.Ph {
		case "M":
			if e.Name == "thread_name" {
				names[e.TID] = e.Args["name"].(string)
			}
		case "X":
			if e.Dur <= 0 || math.IsNaN(e.TS) || names[e.TID] == "" {
				t.Errorf("%+v", e)
			}
			slices[names[e.TID]] = append(slices[names[e.TID]], e)
		case "b":
			if s := open[e.ID]; len(s) > 0 && e.TS < s[len(s)-1].TS {
				t.Errorf("request %s: %s begins before %s", e.ID, e.Name, s[len(s)-1].Name)
			}
			if strings.HasPrefix(e.Name, "request ") {
				requests++
			}
			open[e.ID] = append(open[e.ID], e)
		case "e":
			checkEnd(t, open, e)
		default:
			t.Errorf("an event of phase %q", e.Ph)
		}
	}
	for id, s := range open {
		if len(s) != 0 {
			t.Errorf("request %s: %d slices do not end", id, len(s))
		}
	}
	if requests != 6 {
		t.Errorf("%d requests have a lifeline, want 6", requests)
	}
	for track, list := range slices {
		checkTrack(t, track, list)
	}
	iters := append(slices["iterations (even)"], slices["iterations (odd)"]...)
	for track, want := range map[string]int{"device forward": steps, "launch": steps, "device layers": steps * layers, "scheduler": 2 * steps} {
		if n := len(slices[track]); n != want {
			t.Errorf("%s has %d slices of %d", track, n, want)
		}
	}
	if len(iters) != steps {
		t.Errorf("%d iterations, want %d", len(iters), steps)
	}
	for _, it := range iters {
		checkIteration(t, it, slices)
	}
}

// checkTrack: slices of a track do not overlap.
func checkTrack(t *testing.T, track string, list []event) {
	t.Helper()
	slices.SortFunc(list, func(a, b event) int { return cmp.Compare(a.TS, b.TS) })
	for i := 1; i < len(list); i++ {
		if list[i].TS < list[i-1].end()-0.0015 { // stamps are ns, and times of three digits of µs
			t.Errorf("%s: %s begins at %.3f, %s before it ends at %.3f", track, list[i].Name, list[i].TS, list[i-1].Name, list[i-1].end())
		}
	}
}

// checkIteration: the device ran an iteration inside the host's slice of it, and its layers inside its forward.
func checkIteration(t *testing.T, it event, slices map[string][]event) {
	t.Helper()
	iter := it.Args["iter"].(float64)
	if it.Name != fmt.Sprintf("iter %d", int(iter)) {
		t.Errorf("%s has iter %v", it.Name, iter)
	}
	for _, f := range slices["device forward"] {
		if f.Args["iter"] != iter {
			continue
		}
		if f.TS < it.TS-0.0015 || f.end() > it.end()+0.0015 {
			t.Errorf("%s: the forward lies at %.3f to %.3f, the iteration at %.3f to %.3f", it.Name, f.TS, f.end(), it.TS, it.end())
		}
		for _, l := range slices["device layers"] {
			if l.Args["iter"] == iter && (l.TS < f.TS-0.0015 || l.end() > f.end()+0.0015) {
				t.Errorf("%s: %s lies at %.3f to %.3f, the forward at %.3f to %.3f", it.Name, l.Name, l.TS, l.end(), f.TS, f.end())
			}
		}
		return
	}
	t.Errorf("%s has no forward", it.Name)
}

func checkEnd(t *testing.T, open map[string][]event, e event) {
	t.Helper()
	for i, b := range open[e.ID] {
		if b.Name == e.Name {
			if e.TS < b.TS {
				t.Errorf("request %s: %s ends before it begins", e.ID, e.Name)
			}
			open[e.ID] = slices.Delete(open[e.ID], i, i+1)
			return
		}
	}
	t.Errorf("request %s: the end of %s, which did not begin", e.ID, e.Name)
}
