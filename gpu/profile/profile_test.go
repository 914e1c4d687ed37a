package profile

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"

	"meridian.internal/shared/rows"
)

func TestRangesAreRead(t *testing.T) {
	for _, tt := range []struct {
		text string
		want []Range
		bad  bool
	}{
		{"", nil, false}, {"10-20,30", []Range{{10, 20}, {30, 30}}, false}, {" 1 - 2 , 3", []Range{{1, 2}, {3, 3}}, false},
		{"20-10", nil, true}, {"5,5", nil, true}, {"10-20,15", nil, true}, {"x", nil, true}, {"0", nil, true}, {"1,", nil, true}, {"-3", nil, true},
	} {
		got, err := ParseRanges(tt.text)
		if (err != nil) != tt.bad || !slices.Equal(got, tt.want) {
			t.Errorf("%q: %v, %v", tt.text, got, err)
		}
	}
}

func FuzzParseRanges(f *testing.F) {
	f.Add("10-20,30")
	f.Add("1-9223372036854775807")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := ParseRanges(text)
		for i, r := range list {
			if err != nil || r.First < 1 || r.Last < r.First || i > 0 && r.First <= list[i-1].Last {
				t.Fatalf("%q gave %v, %v", text, list, err)
			}
		}
	})
}

// engine is a loop that builds and collects iterations as told.
type engine struct {
	*Profiler
	mu      sync.Mutex
	built   int64
	ended   int64
	stamped []int64
}

func (e *engine) loop(_ context.Context, f func(int64, bool)) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(e.built+1, e.built > e.ended)
	return nil
}

func (e *engine) build(n int) {
	for range n {
		e.built++
		if !e.Planning() {
			continue
		}
		if on, _ := e.Built(e.built); on {
			e.stamped = append(e.stamped, e.built)
		}
	}
}

func (e *engine) collect(n int) {
	for range n {
		e.ended++
		if slices.Contains(e.stamped, e.ended) {
			at := e.ended * 1000
			e.Collected(Step{Iter: e.ended, PlanNS: at, BuiltNS: at + 10, SubmitNS: at + 20, ForwardStartNS: at + 30, ForwardEndNS: at + 500,
				SampleEndNS: at + 600, CollectNS: at + 700, EndNS: at + 800, LayerNS: []int64{at + 100, at + 500}})
		}
	}
}

func (e *engine) run(n int) {
	for range n {
		e.build(1)
		e.collect(1)
	}
}

func newEngine(t *testing.T, o Options) *engine {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return &engine{Profiler: p}
}

func steps(n int) rows.ProfileRequest {
	return rows.ProfileRequest{NumSteps: &n, StartStep: 2, Activities: []string{GPU}}
}

// names lists the folder.
func names(t *testing.T, e *engine) []string {
	t.Helper()
	list, err := os.ReadDir(e.o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, n := range list {
		out = append(out, n.Name())
	}
	return out
}

// iters are the iterations of a trace.
func iters(t *testing.T, path string) []string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var trace struct {
		Metadata    struct{ Complete bool }
		TraceEvents []struct {
			Ph, Name string
			Ts, Dur  float64
		}
	}
	if err := json.Unmarshal(b, &trace); err != nil || !trace.Metadata.Complete {
		t.Fatalf("%v: %s", err, b)
	}
	var out []string
	for _, e := range trace.TraceEvents {
		if e.Ph == "X" && strings.HasPrefix(e.Name, "iter ") {
			out = append(out, strings.TrimPrefix(e.Name, "iter "))
		}
	}
	return out
}

func TestAWindowHoldsItsIterations(t *testing.T) {
	e := newEngine(t, Options{})
	e.run(5)
	w, err := e.Start(t.Context(), steps(3), e.loop)
	if err != nil || w.StartIter != 8 || *w.StopIter != 11 || len(w.Files) != 1 {
		t.Fatalf("%+v, %v", w, err)
	}
	if got := names(t, e); len(got) != 1 || !strings.HasSuffix(got[0], ".json.partial") {
		t.Errorf("while it waits: %v", got)
	}
	e.build(1)
	for range 8 { // two in flight
		e.build(1)
		e.collect(1)
	}
	e.Close()
	if got := strings.Join(iters(t, w.Files[0]), " "); got != "8 9 10" {
		t.Errorf("iterations %s", got)
	}
	if got := names(t, e); len(got) != 1 || e.Planning() {
		t.Errorf("afterwards: %v, planning %v", got, e.Planning())
	}
}

func TestOneOfTwoStartsIsRefusedByName(t *testing.T) {
	e := newEngine(t, Options{})
	errs := make([]error, 2)
	var both sync.WaitGroup
	for i := range errs {
		both.Go(func() { _, errs[i] = e.Start(context.Background(), steps(4), e.loop) })
	}
	both.Wait()
	if (errs[0] == nil) == (errs[1] == nil) {
		t.Fatalf("%v, %v", errs[0], errs[1])
	}
	if err := errors.Join(errs...); !errors.Is(err, rows.ErrProfileBusy) {
		t.Error(err)
	}
	if _, err := e.Start(t.Context(), steps(1), e.loop); err == nil || !strings.Contains(err.Error(), "iterations 3 to 6, scheduled") {
		t.Error(err)
	}
}

func TestAFailureGivesTheClaimBack(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	zero, one := 0, 1
	e := newEngine(t, Options{})
	gone := func(context.Context, func(int64, bool)) error { return context.Canceled }
	for _, tt := range []struct {
		name string
		req  rows.ProfileRequest
		loop Loop
		want error
	}{
		{"no steps", rows.ProfileRequest{NumSteps: &zero}, e.loop, rows.ErrProfileInvalid},
		{"a negative start", rows.ProfileRequest{NumSteps: &one, StartStep: -1}, e.loop, rows.ErrProfileInvalid},
		{"an unknown activity", rows.ProfileRequest{Activities: []string{"CUDA_PROFILER"}}, e.loop, rows.ErrProfileInvalid},
		{"no activity", rows.ProfileRequest{Activities: []string{}}, e.loop, rows.ErrProfileInvalid},
		{"a folder that cannot be", rows.ProfileRequest{OutputDir: filepath.Join(file, "x")}, e.loop, rows.ErrProfileInvalid},
		{"an engine that does not answer", steps(1), gone, context.Canceled},
	} {
		if _, err := e.Start(t.Context(), tt.req, tt.loop); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if e.w.state != idle || e.Planning() || len(names(t, e)) != 0 {
			t.Errorf("%s: state %v, files %v", tt.name, e.w.state, names(t, e))
		}
	}
	if _, err := e.Start(t.Context(), steps(1), e.loop); err != nil {
		t.Error(err)
	}
}

// TestACallerThatLeavesLate: the engine has taken the window, and may be in it, when the caller's context ends.
func TestACallerThatLeavesLate(t *testing.T) {
	e := newEngine(t, Options{})
	late := func(ctx context.Context, f func(int64, bool)) error {
		_ = e.loop(ctx, f)
		e.run(3) // the window begins with the third
		return context.Canceled
	}
	req := steps(2)
	req.Activities = []string{CPU, GPU}
	w, err := e.Start(t.Context(), req, late)
	if err != nil || w.StartIter != 3 {
		t.Fatalf("%+v, %v", w, err)
	}
	e.run(3)
	if got, err := e.Stop(t.Context(), e.loop); err != nil || len(got.Files) != 2 || len(iters(t, got.Files[0])) != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	if err := pprof.StartCPUProfile(io.Discard); err != nil {
		t.Errorf("the window's CPU profile goes on: %v", err)
	}
	pprof.StopCPUProfile()
}

func TestAStartWhileOneIsPreparedHearsWhere(t *testing.T) {
	e := newEngine(t, Options{})
	dir := t.TempDir()
	preparing := func(ctx context.Context, f func(int64, bool)) error {
		if _, err := e.Start(ctx, steps(1), e.loop); !errors.Is(err, rows.ErrProfileBusy) || !strings.Contains(err.Error(), dir) {
			t.Errorf("the other start: %v", err)
		}
		return e.loop(ctx, f)
	}
	if _, err := e.Start(t.Context(), rows.ProfileRequest{OutputDir: dir, Activities: []string{GPU}}, preparing); err != nil {
		t.Error(err)
	}
	e.Close()
}

func TestStopEndsWhatIsThere(t *testing.T) {
	open := rows.ProfileRequest{Activities: []string{GPU, Layers, CPU}}
	t.Run("nothing", func(t *testing.T) {
		e := newEngine(t, Options{})
		if _, err := e.Stop(t.Context(), e.loop); !errors.Is(err, rows.ErrProfileNone) {
			t.Error(err)
		}
	})
	t.Run("a window that has not begun leaves no file", func(t *testing.T) {
		e := newEngine(t, Options{})
		if _, err := e.Start(t.Context(), open, e.loop); err != nil {
			t.Fatal(err)
		}
		got, err := e.Stop(t.Context(), e.loop)
		if files := got.Files; err != nil || files != nil || len(names(t, e)) != 0 || e.w.state != idle {
			t.Errorf("%v, %v, %v, %v", got, err, names(t, e), e.w.state)
		}
	})
	t.Run("an idle engine is enough", func(t *testing.T) {
		e := newEngine(t, Options{})
		w, err := e.Start(t.Context(), open, e.loop)
		if err != nil || w.StopIter != nil {
			t.Fatalf("%+v, %v", w, err)
		}
		e.run(3)
		got, err := e.Stop(t.Context(), e.loop)
		files := got.Files
		if err != nil || !slices.Equal(files, w.Files) || len(iters(t, files[0])) != 3 || len(names(t, e)) != 2 {
			t.Errorf("%v, %v, %v", files, err, names(t, e))
		}
	})
	t.Run("a window that has ended by itself is told, as often as it is asked for", func(t *testing.T) {
		e := newEngine(t, Options{})
		w, err := e.Start(t.Context(), steps(2), e.loop)
		if err != nil {
			t.Fatal(err)
		}
		e.run(5)
		for range 2 {
			got, err := e.Stop(t.Context(), e.loop)
			if err != nil || got.StartIter != w.StartIter || got.StopIter == nil || *got.StopIter != *w.StopIter || !slices.Equal(got.Files, w.Files) || len(iters(t, got.Files[0])) != 2 {
				t.Errorf("%+v, %v, started %+v", got, err, w)
			}
		}
	})
	t.Run("a CPU profile that another one keeps from running is not named", func(t *testing.T) {
		if err := pprof.StartCPUProfile(io.Discard); err != nil {
			t.Skip(err)
		}
		defer pprof.StopCPUProfile()
		e := newEngine(t, Options{})
		if _, err := e.Start(t.Context(), open, e.loop); err != nil {
			t.Fatal(err)
		}
		e.run(2)
		got, err := e.Stop(t.Context(), e.loop)
		if err != nil || len(got.Files) != 1 || len(names(t, e)) != 1 || len(iters(t, got.Files[0])) != 2 {
			t.Errorf("%+v, %v, %v", got, err, names(t, e))
		}
	})
	t.Run("files that could not be written are no success", func(t *testing.T) {
		e := newEngine(t, Options{})
		w, err := e.Start(t.Context(), rows.ProfileRequest{Activities: []string{GPU}}, e.loop)
		if err != nil {
			t.Fatal(err)
		}
		e.run(2)
		if err := os.RemoveAll(filepath.Dir(w.Files[0])); err != nil {
			t.Fatal(err)
		}
		if got, err := e.Stop(t.Context(), e.loop); err == nil || got.Files != nil {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("the iterations in flight are waited for", func(t *testing.T) {
		e := newEngine(t, Options{})
		w, err := e.Start(t.Context(), open, e.loop)
		if err != nil {
			t.Fatal(err)
		}
		e.run(1)
		e.build(2)
		halted := make(chan struct{})
		stopped := make(chan error)
		go func() {
			_, err := e.Stop(context.Background(), func(ctx context.Context, f func(int64, bool)) error {
				defer close(halted)
				return e.loop(ctx, f)
			})
			stopped <- err
		}()
		<-halted
		e.build(1)
		e.collect(2)
		if err := <-stopped; err != nil || len(iters(t, w.Files[0])) != 3 {
			t.Errorf("%v, %v", err, iters(t, w.Files[0]))
		}
	})
	t.Run("the end of the engine closes an open window", func(t *testing.T) {
		e := newEngine(t, Options{Lives: func() []Life { return []Life{{ID: 7, QueuedNS: 1, EndNS: 9000, Reason: "running"}} }})
		w, err := e.Start(t.Context(), open, e.loop)
		if err != nil {
			t.Fatal(err)
		}
		e.run(2)
		e.Ended(Life{ID: 5, QueuedNS: 1000, ScheduledNS: 1010, FirstTokenNS: 1700, EndNS: 2700, Reason: "stop"})
		e.Close()
		if b, err := os.ReadFile(w.Files[0]); err != nil || !strings.Contains(string(b), `"request 7"`) || !strings.Contains(string(b), `"request 5"`) || !strings.Contains(string(b), `"layer 1"`) {
			t.Errorf("%v: %s", err, b)
		}
	})
}

func TestWindowsOfTheConfigurationOpenByThemselves(t *testing.T) {
	e := newEngine(t, Options{Windows: "2-3,5"})
	e.run(4)
	if !slices.Equal(e.stamped, []int64{2, 3}) || !e.Planning() {
		t.Errorf("stamped %v, planning %v", e.stamped, e.Planning())
	}
	<-e.Profiler.done
	if _, err := New(Options{Windows: "x"}); err == nil {
		t.Error("a bad window is accepted")
	}
}
