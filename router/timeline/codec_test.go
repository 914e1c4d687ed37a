package timeline

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// drifting are clocks that run fast and slow by what no quartz does, so that every rounding occurs.
func drifting() Clocks {
	exact := clocks()
	return Clocks{Reference: routerID, Estimate: func(id clock.ID, ns int64) (clock.Estimate, bool) {
		e, ok := exact.Estimate(id, ns)
		e.SkewPPB, e.AtNS = map[clock.ID]int64{ctxID: 123_456_789, genID: -234_567_891}[id], ns-987_654_321
		return e, ok
	}}
}

// full has a different value in every field that a merge of ring does not set.
func full() *Line {
	l := Merge(withSteps(), clocks())
	l.Amends, l.WallNS, l.Traceparent, l.Missing, l.Error = true, 5, "00-a-b-01", []string{"x"}, &phase.Error{Stage: "kv", Type: "t", Message: "m", Retryable: true}
	l.Violations, l.CriticalSpan = []Violation{{"a", "b", 1, 2, 3, 4}}, "prefill"
	l.Decode = &Decode{Steps: 1, ComputeNS: 2, SampleNS: 3, WaitNS: 4, PreemptedNS: 5}
	one, two, three := int64(1), int64(2), int64(3)
	l.Handover.OpenNS, l.Handover.AllocateNS, l.Handover.NotifyNS = &one, &two, &three
	l.Attempts[0].Given, l.Attempts[1].ReleasedNS = 6, &three
	l.Resumes = []phase.Resume{{Sub: 1, Attempt: 2, Tokens: 3, CutNS: 4, TokenNS: 5}}
	l.Decision.MatchedTokens, l.Decision.LocalNS, l.Decision.RemoteNS = &one, &two, &three
	l.Decision.Candidates = []phase.Candidate{
		{Node: "ctx0", Score: 1.5, Running: 2, Waiting: 3, LoadAgeNS: &one, QueuedTokens: 4, Reserved: 5, MatchedTokens: &two}, {Node: "gen0"},
	}
	p := &l.Phases[0]
	p.EnergyJ, p.PushedNS = new(float64), new(int64)
	rank := 6
	p.DPRank = &rank
	p.Sub, p.Attempt, p.Preemptions, p.PreemptedNS, p.StepMessages = 1, 2, 3, 4, 5
	p.Iters, p.KV = &phase.Iters{First: 1, Last: 2}, &infer.KVCounts{AllocTotalBlocks: 1, AllocNewBlocks: 2, ReusedBlocks: 3, PartialBlocks: 4, MissedBlocks: 5}
	return l
}

func TestALineSurvivesARoundTrip(t *testing.T) {
	with := func(change func(l *Line)) *Line {
		l := full()
		change(l)
		return l
	}
	cases := map[string]*Line{
		"everything":         full(),
		"drifting clocks":    Merge(withSteps(), drifting()),
		"stages":             Merge(withStages(), drifting()),
		"no clocks":          Merge(withSteps(), Clocks{}),
		"a node of no leg":   with(func(l *Line) { l.Spans[3].Node, l.Spans[4].Node = "router0>elsewhere", "elsewhere" }),
		"another id":         with(func(l *Line) { l.Phases[1].Disagg, l.Phases[2].Disagg = 77, 0 }),
		"another peer":       with(func(l *Line) { l.Phases[2].Peer, l.Phases[2].Bytes = "third", 0 }),
		"the peer as usual":  with(func(l *Line) { l.Phases[2].Peer = "ctx0" }),
		"no peer":            with(func(l *Line) { l.Phases[2].Peer = "" }),
		"tokens of a peer":   with(func(l *Line) { l.Phases[1].Fetched = 96 }),
		"a peer, no stamps":  with(func(l *Line) { l.Phases[1].Peer, l.Phases[1].Bytes = "gen0", 9 }),
		"raw is not derived": with(func(l *Line) { l.Phases[1].Stamps[2].Raw += 3 }),
		"steps as chunks":    with(func(l *Line) { l.Phases[1].Iters = &phase.Iters{First: 7, Last: 8} }),
		"steps of its own":   with(func(l *Line) { l.Phases[1].Iters = &phase.Iters{First: 7, Last: 9} }),
		"tokens of its own":  with(func(l *Line) { l.Phases[0].Tokens.Cached++ }),
		"overlapping spans":  with(func(l *Line) { l.Spans[5].StartNS -= 7 }),
		"a bound on a node":  with(func(l *Line) { l.Spans[0].BoundNS = 3 }),
		"a gap at the end":   with(func(l *Line) { l.Spans[len(l.Spans)-1].StartNS += 7 }),
		"pushed, not known":  with(func(l *Line) { l.Phases[1].PushedNS, l.Phases[2].PushedNS = new(int64), nil }),
		"by way of another":  with(func(l *Line) { l.Phases[1].Clock.Via = "ctx1" }),
		"nothing":            {Schema: Schema, Violations: []Violation{}, Spans: []Span{}, Attempts: []Attempt{}, Phases: []Phase{}},
	}
	for name, l := range cases {
		got, err := Parse(Append(nil, l))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !reflect.DeepEqual(got, l) {
			t.Errorf("%s: %s\nwant\n%s", name, Append(nil, got), Append(nil, l))
		}
	}
}

// before is a line as it was written while clocks, chunks and candidates had names, and every span a gap and a bound.
func before(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "before_columns.json"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLinesOfBeforeAreReadAsThoseOfNow(t *testing.T) {
	old, err := Parse(before(t))
	if err != nil {
		t.Fatal(err)
	}
	now := Append(nil, old)
	if len(now) > len(before(t))-350 {
		t.Errorf("%d B became %d", len(before(t)), len(now))
	}
	again, err := Parse(now)
	if err != nil || !reflect.DeepEqual(again, old) {
		t.Errorf("%v\n%s\nwant\n%s", err, Append(nil, again), now)
	}
	// What the forms tell differently, each once.
	ctx, d := old.Phases[1], old.Decision
	if c := ctx.Clock; c.ID != "00000000000000bb.00000002" || c.State != "synced" || *c.OffsetNS != -5_000_000_000 || *c.BoundNS != 10_000 || *ctx.PushedNS != -4_999_999_999 {
		t.Errorf("clock %+v", c)
	}
	if got := ctx.Chunks.Column("kv_tokens"); !slices.Equal(got, []int64{128, 528}) {
		t.Errorf("chunks %v", got)
	}
	if c := d.Candidates[1]; c.Node != "gen0" || c.Score != 2.5 || c.Running != 4 || c.Waiting != 6 || *c.LoadAgeNS != 8 || c.QueuedTokens != 10 || c.Reserved != 12 || *c.MatchedTokens != 14 {
		t.Errorf("candidate %+v", c)
	}
	if s := old.Spans[3]; s.Name != "gen_dispatch" || s.BoundNS != 10_000 || s.StartNS != 650_000 {
		t.Errorf("span %+v", s)
	}
}

func TestRawStampsFollowFromConvertedOnes(t *testing.T) {
	text := string(Append(nil, Merge(withSteps(), drifting())))
	if n := strings.Count(text, `_ns":[[`); n > 2 || strings.Contains(text, "raw") {
		t.Errorf("%d rows begin with a pair: %s", n, text)
	}
}

func TestParseRefusesNodesThatAreNot(t *testing.T) {
	for _, node := range []string{"1", "-1", "[0,3]", "[0]", "[0,1,2]", "true"} {
		text := `{"schema":"meridian.timeline/1","spans":{"name":["x"],"node":[` + node + `]},"attempts":[]}`
		if l, err := Parse([]byte(text)); err == nil {
			t.Errorf("node %s is read as %q", node, l.Spans[0].Node)
		}
	}
}

func TestAConvertedStampNeedsAnOffset(t *testing.T) {
	if _, err := Parse([]byte(`{"schema":"meridian.timeline/1","phases":[{"clock":{"state":"none","offset_ns":null},"stamps_ns":[5]}]}`)); err == nil {
		t.Error("a stamp that cannot be told from its conversion was read")
	}
}

// A router that is restarted has of its own record what the line kept.
func TestALateRecordCompletesALineThatWasReadBack(t *testing.T) {
	ps := parts(ring())
	given, released := 4, t0+3*ms
	ps[0].Record.Legs = []phase.Leg{
		{Role: phase.Gen, Node: "gen9", Attempt: 3, Outcome: phase.Failed},
		{Role: phase.Ctx, Node: "ctx0", Records: true, Given: given, ReleasedNS: &released},
		{Role: phase.Gen, Node: "gen0", Records: true, Given: given},
	}
	want := Merge(ps, clocks())
	early, err := Parse(Append(nil, Merge(ps[:2], clocks())))
	if err != nil || early.Complete {
		t.Fatal(err, early.Complete)
	}
	var back []Part
	for i := range early.Phases {
		back = append(back, early.Part(&early.Phases[i]))
	}
	late := Merge(append(back, ps[2]), clocks())
	if !late.Complete || len(late.Attempts) != len(want.Attempts) {
		t.Fatalf("complete %v, missing %v, attempts %+v", late.Complete, late.Missing, late.Attempts)
	}
	for _, w := range want.Attempts {
		if !slices.ContainsFunc(late.Attempts, func(a Attempt) bool { return reflect.DeepEqual(a, w) }) {
			t.Errorf("%+v lacks %+v", late.Attempts, w)
		}
	}
}

func TestChunksComeBackAsTheNodeMeasuredThem(t *testing.T) {
	for name, c := range map[string]Clocks{"exact": clocks(), "none": {}} {
		ps := withStages()
		l, err := Parse(Append(nil, Merge(ps, c)))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := l.Part(&l.Phases[1]).Record.Chunks, ps[1].Record.Chunks; !reflect.DeepEqual(got, want) {
			t.Errorf("%s clocks: %+v, want %+v", name, got, want)
		}
	}
}
