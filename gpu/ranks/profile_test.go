package ranks

import (
	"os"
	"slices"
	"strings"
	"testing"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// TestEachRankLeavesATraceOfEachWindow: one CPU profile, rank 0's, and no file of the window before is named again.
func TestEachRankLeavesATraceOfEachWindow(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, 2, Options{Engine: engine.Config{Profile: &profile.Options{Name: "n", Dir: dir}}}, sim.Config{})
	defer r.stop()
	seen := map[string]bool{}
	for _, acts := range [][]string{{profile.GPU}, {profile.CPU}, {profile.CPU, profile.GPU}} {
		w, err := r.StartProfile(t.Context(), rows.ProfileRequest{Activities: acts})
		if err != nil {
			t.Fatal(err)
		}
		s, err := r.Submit(infer.Request{ID: 1, Prompt: []int32{1, 2, 3}, MaxTokens: 4, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := finish(s); err != nil {
			t.Fatal(err)
		}
		got, err := r.StopProfile(t.Context())
		if err != nil || !slices.Equal(got.Files, w.Files) {
			t.Errorf("%v: %v, %v, granted %v", acts, got.Files, err, w.Files)
		}
		ends := map[string]int{}
		for _, f := range got.Files {
			if _, err := os.Stat(f); err != nil || seen[f] {
				t.Errorf("%v: %s: seen before %v, %v", acts, f, seen[f], err)
			}
			seen[f] = true
			ends[f[strings.LastIndex(f, "-")+1:]]++
		}
		want := 2
		if slices.Contains(acts, profile.CPU) {
			want = 3
		}
		if len(got.Files) != want || ends["0.json"] != 1 || ends["1.json"] != 1 || ends["0.pprof"] != want-2 {
			t.Errorf("%v left %v", acts, got.Files)
		}
	}
}
