package timeline

import (
	"reflect"
	"testing"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

const (
	rankID    clock.ID = "00000000000000dd.00000004"
	rankShift          = 77_000 * ms // what the rank's clock shows while its node's shows 0
	rankBound          = 70
)

// onRank moves the engine's stamps of a record to the clock of a rank, of which the node knew the estimate that edit leaves.
func onRank(r *phase.Record, edit func(*clock.Estimate)) *phase.Record {
	e := clock.Estimate{Reference: r.Instance, Local: rankID, OffsetNS: -rankShift, LowerNS: -rankShift - rankBound, UpperNS: -rankShift + rankBound, State: clock.Synced}
	if edit != nil {
		edit(&e)
	}
	r.Stamps.EngineClock, r.Clocks = 1, append(r.Clocks, phase.Clock{ID: rankID, Kind: "rank", Estimate: &e})
	for _, at := range r.Stamps.Engine() {
		if *at != nil {
			ns := **at + rankShift
			*at = &ns
		}
	}
	for i := range r.Chunks {
		c := &r.Chunks[i]
		c.ForwardStartNS, c.ForwardEndNS, c.SampleEndNS = c.ForwardStartNS+rankShift, c.ForwardEndNS+rankShift, c.SampleEndNS+rankShift
	}
	return r
}

func TestWhatARankStampsIsPlacedByItsOwnClock(t *testing.T) {
	want := Merge(parts(ring()), clocks())
	rs := ring()
	onRank(rs[1], nil)
	onRank(rs[2], nil)
	before := *rs[1].Stamps.FirstTokenNS
	l := Merge(parts(rs), clocks())
	if got, want := shape(l), shape(want); got != want {
		t.Errorf("spans\n%s\nwant\n%s", got, want)
	}
	if *rs[1].Stamps.FirstTokenNS != before || rs[1].Stamps.EngineClock != 1 {
		t.Error("the record was changed")
	}
	if l.NegativeSpans != 0 || len(l.Violations) != 0 || !l.Complete {
		t.Errorf("%d negative spans, violations %v", l.NegativeSpans, l.Violations)
	}
	if *l.MaxBoundNS != 2*(bound+rankBound) { // what the ranks may be off by counts too
		t.Errorf("max bound %d, want %d", *l.MaxBoundNS, 2*(bound+rankBound))
	}
	for _, s := range l.Spans {
		if s.Name == "ctx_queue" && s.BoundNS != rankBound {
			t.Errorf("from the node's stamp to the rank's: bound %d, want %d", s.BoundNS, rankBound)
		}
		if s.Name == "relay" && s.BoundNS != 0 {
			t.Errorf("between two stamps of the router: bound %d", s.BoundNS)
		}
	}
	if k := l.Phases[1].Rank; k == nil || *k != (RankClock{rankID, clock.Synced, -rankShift, rankBound}) || l.Phases[0].Rank != nil {
		t.Errorf("the rank's clock is %+v, the router's %+v", k, l.Phases[0].Rank)
	}
	back, err := Parse(Append(nil, l))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back.Phases[1], l.Phases[1]) {
		t.Errorf("the phase came back as %+v, was %+v", back.Phases[1], l.Phases[1])
	}
	var again []Part
	for i := range back.Phases {
		again = append(again, back.Part(&back.Phases[i]))
	}
	if got := again[1].Record; *got.Stamps.FirstTokenNS != before || !reflect.DeepEqual(got.Chunks, rs[1].Chunks) {
		t.Errorf("the record came back with the first token at %d, was %d", *got.Stamps.FirstTokenNS, before)
	}
	if got := Merge(again, clocks()); shape(got) != shape(want) || !reflect.DeepEqual(got.Phases[1].Rank, l.Phases[1].Rank) {
		t.Errorf("merged again it has %s and %+v", shape(got), got.Phases[1].Rank)
	}
}

func TestStepsOfARankAreMovedTooAndSkewCounts(t *testing.T) {
	r := onRank(ring()[2], func(e *clock.Estimate) { e.SkewPPB, e.AtNS = 1_000_000, rankShift })
	at := rankShift + 1000*ms
	list := func() []int64 { return []int64{at, at + ms} }
	steps := &infer.Steps{
		Step: []int32{0, 1}, Iter: []int64{7, 8}, ForwardStartNS: list(), ForwardEndNS: list(), SampleEndNS: list(), TokenNS: list(),
		KVTokens: []int32{1, 2}, BatchSize: []int32{1, 1}, Tokens: []int32{1, 1}, StageNS: [][]int64{list()},
	}
	p, k := onNodeClock(Part{Record: r, Steps: steps})
	want := []int64{1000*ms + ms, 1000*ms + ms + ms + 1000} // 0.1 % fast
	for name, got := range map[string][]int64{"start": p.Steps.ForwardStartNS, "end": p.Steps.ForwardEndNS, "sample": p.Steps.SampleEndNS, "token": p.Steps.TokenNS, "stage": p.Steps.StageNS[0]} {
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if steps.TokenNS[0] != at || k.BoundNS < rankBound {
		t.Errorf("the steps were changed to %v; bound %d", steps.TokenNS, k.BoundNS)
	}
}

// TestAClockThatNobodyKnowsPlacesNothing: what a rank stamped then has no place, and says so.
func TestAClockThatNobodyKnowsPlacesNothing(t *testing.T) {
	for name, edit := range map[string]func(*clock.Estimate){
		"too few exchanges":  func(e *clock.Estimate) { e.State = clock.Joining },
		"of another process": func(e *clock.Estimate) { e.Reference = "00000000000000ee.00000009" },
		"of another rank":    func(e *clock.Estimate) { e.Local = "00000000000000ee.00000009" },
		"too old":            func(e *clock.Estimate) { e.VoidAfterNS = 1 },
		"too old for some":   func(e *clock.Estimate) { e.VoidAfterNS = t0 + ctxShift + rankShift + 5*ms }, // between the first batch and the first token
	} {
		rs := ring()
		onRank(rs[1], edit)
		l := Merge(parts(rs), clocks())
		p := &l.Phases[1]
		_, began := p.At("first_scheduled_ns")
		if _, ok := p.At("first_token_ns"); ok || began || p.Chunks != nil || p.Rank == nil || p.Rank.State != stateNone {
			t.Errorf("%s: placed %+v by %+v", name, p.Stamps, p.Rank)
		}
		if _, ok := p.At("receive_ns"); !ok {
			t.Errorf("%s: the node's own stamps are lost", name)
		}
		back, err := Parse(Append(nil, l))
		if err != nil || !reflect.DeepEqual(back.Phases[1], *p) {
			t.Errorf("%s: it came back as %+v, %v", name, back.Phases[1], err)
		}
	}
}
