package engine

import (
	"testing"

	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

func TestTextDoesNotDependOnHowItIsComputed(t *testing.T) {
	plain := newRig(t, Config{MaxNumTokens: 4096}, sim.Config{})
	want := plain.run(request(100, 1, 40))
	if want.done.Reason != infer.FinishLength || len(want.ids) != 40 || want.done.Report.OutputTokens != 40 {
		t.Fatalf("%d tokens, done %+v", len(want.ids), want.done)
	}
	tests := []struct {
		name string
		cfg  Config
		dev  sim.Config
	}{
		{"overlap", Config{Overlap: true}, sim.Config{}},
		{"small chunks", Config{Overlap: true, MaxBatchSize: 4, MaxNumTokens: 7}, sim.Config{}},
		{"other blocks", Config{Overlap: true, PrefixReuse: true}, sim.Config{TokensPerBlock: 5}},
		{"just enough blocks", Config{Overlap: true, PrefixReuse: true}, sim.Config{TokensPerBlock: 10, KVBlocks: 14}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, tt.cfg, tt.dev)
			sameText(t, "first run", r.run(request(100, 1, 40)).ids, want.ids)
			again := r.run(request(100, 1, 40))
			sameText(t, "second run", again.ids, want.ids)
			if tt.cfg.PrefixReuse != (again.done.Report.CachedTokens > 0) {
				t.Errorf("reuse %v, but %d cached tokens", tt.cfg.PrefixReuse, again.done.Report.CachedTokens)
			}
		})
	}
}

func TestHandOverGivesTheSameText(t *testing.T) {
	ctx := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 8, MaxNumTokens: 16}, sim.Config{})
	gen := newRig(t, Config{Overlap: true, PrefixReuse: true}, sim.Config{})
	want := newRig(t, Config{}, sim.Config{}).run(request(100, 1, 40))
	for i := range 3 {
		got, err := ctx.disaggregated(gen, request(100, 1, 40))
		if err != nil {
			t.Fatal(err)
		}
		sameText(t, "disaggregated", got.ids, want.ids)
		if cached := got.done.Report.CachedTokens; (i > 0) != (cached == 96) {
			t.Errorf("run %d: %d tokens were here already", i, cached)
		}
	}
}
