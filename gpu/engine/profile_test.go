package engine

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/rows"
)

func TestAProfileShowsStepsLayersAndRequests(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, Profile: &profile.Options{Name: "n", Dir: dir}}, sim.Config{Layers: 3, Cost: sim.Cost{Step: 3e6}})
		defer r.stop()
		steps := 5
		w, err := r.StartProfile(t.Context(), rows.ProfileRequest{NumSteps: &steps, StartStep: 1, Activities: []string{profile.GPU, profile.Layers}})
		if err != nil || w.StartIter != 2 || *w.StopIter != 7 {
			t.Fatalf("%+v, %v", w, err)
		}
		time.Sleep(time.Second)
		if n := r.Load().Iter; n != 0 {
			t.Errorf("the start alone ran %d steps", n)
		}
		if _, err := r.StartProfile(t.Context(), rows.ProfileRequest{}); !errors.Is(err, rows.ErrProfileBusy) {
			t.Error(err)
		}
		r.run(request(4, 1, 3))
		r.run(request(4, 2, 9))
		r.stop()
		b, err := os.ReadFile(w.Files[0])
		if err != nil || !json.Valid(b) {
			t.Fatalf("%v: %s", err, b)
		}
		for name, want := range map[string]int{
			`"name":"iter `: 5, `"name":"forward iter `: 5, `"name":"layer 2"`: 5, `"name":"request 1"`: 2, `"name":"request 2"`: 2,
		} {
			if n := strings.Count(string(b), name); n != want {
				t.Errorf("%s is there %d times, want %d", name, n, want)
			}
		}
	})
}

func TestAnEngineWithoutProfilerSaysSo(t *testing.T) {
	r := newRig(t, Config{}, sim.Config{})
	if _, err := r.StartProfile(t.Context(), rows.ProfileRequest{}); !errors.Is(err, rows.ErrProfileInvalid) {
		t.Error(err)
	}
	if _, err := r.StopProfile(t.Context()); !errors.Is(err, rows.ErrProfileNone) {
		t.Error(err)
	}
}

func TestStartOfAProfileNeedsARunningEngine(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, Config{Profile: &profile.Options{Dir: dir}}, sim.Config{})
	r.stop()
	if _, err := r.StartProfile(context.Background(), rows.ProfileRequest{}); !errors.Is(err, ErrStopped) {
		t.Error(err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 0 {
		t.Errorf("%v is left, %v", list, err)
	}
}
