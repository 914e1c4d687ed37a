package waterfall

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

var update = flag.Bool("update", false, "write the golden files")

func ptr(v int64) *int64 { return &v }

const ms = 1_000_000

// full is a line with everything that can be drawn.
func full() *timeline.Line {
	span := func(name, node string, start, dur, bound int64) timeline.Span {
		return timeline.Span{Name: name, Node: node, StartNS: start, DurNS: dur, BoundNS: bound}
	}
	return &timeline.Line{
		Schema: timeline.Schema, RequestID: "req-1", ClientRequestID: "mine\x1b[31m", Router: "router0", Model: "tiny", Style: "generation_first", WallNS: 1795975770303476405,
		Outcome: phase.Finished, FinishReason: "stop", Complete: true, Streamed: true, TTFTNS: ptr(14 * ms), E2ENS: ptr(40 * ms), UnaccountedNS: ptr(120_000), MaxBoundNS: ptr(700_000),
		Tokens: phase.Tokens{Prompt: 1700, Cached: 128, Output: 4},
		Spans: []timeline.Span{
			span("router_receive", "router0", 0, ms, 0), span("ctx_dispatch", "router0>ctx0", ms, ms, 700_000), span("ctx_queue", "ctx0", 2*ms, 100, 0),
			span("prefill", "ctx0", 3*ms, 3*ms, 0), span("prefill_wait", "ctx0", 6*ms, ms, 0), span("prefill", "ctx0", 7*ms, 3*ms, 0), span("prefill_sample", "ctx0", 10*ms, ms, 0),
			span("kv_handover", "ctx0>gen0", 11*ms, 2*ms, 700_000), span("return_network", "gen0>router0", 13*ms+200_000, -200_000, 1000), span("relay", "router0", 13*ms, ms, 0),
			span("decode", "router0", 14*ms, 25*ms, 0), span("finish", "router0", 39*ms, ms, 0),
		},
		NegativeSpans: 1, Violations: []timeline.Violation{{Cause: "gen0.first_token_sent_ns", Event: "router0.first_token_ns", CauseNS: 13*ms + 200_000, EventNS: 13 * ms, BoundNS: 1000, ExcessNS: 199_000}},
		CriticalSpan: "prefill", Decode: &timeline.Decode{Steps: 3, ComputeNS: 20_000_000, SampleNS: 1_000_000, WaitNS: 5_000_000, PreemptedNS: 2_000_000},
		Handover: &timeline.Handover{WireNS: 3_000_000, InstallNS: 1_000_000, Bytes: 3 << 20, Frames: 1234, Tokens: 1572, TokensHeld: 128, DurNS: ptr(8 * ms), HiddenNS: ptr(6 * ms), VisibleNS: ptr(2 * ms)},
		Attempts: []timeline.Attempt{
			{Role: phase.Gen, Node: "gen1", Outcome: phase.Failed, Error: &phase.Error{Stage: "gen", Message: "connection refused"}}, {Role: phase.Gen, Node: "gen0", Attempt: 1, Outcome: phase.Finished},
		},
		Phases: []timeline.Phase{
			{Role: phase.Disagg, Node: "router0"},
			{Role: phase.Ctx, Node: "ctx0", Clock: timeline.PhaseClock{State: "identity", OffsetNS: ptr(0), BoundNS: ptr(1300)}},
			{Role: phase.Gen, Node: "gen0", Clock: timeline.PhaseClock{State: "synced", OffsetNS: ptr(-5 * ms), BoundNS: ptr(700_000), SkewPPB: 1234, Via: "clocksync"},
				Steps: &timeline.Columns{Names: []string{"token_ns", "batch_size"}, Values: [][]int64{{20 * ms, 25 * ms, 39 * ms}, {1, 4, 2}}}},
			{Role: phase.Gen, Node: "gen2", Clock: timeline.PhaseClock{State: "none"}},
		},
		Missing:  []string{"gen gen1 sub 0 attempt 0"},
		Decision: &phase.Decision{Policy: "least_loaded", Reason: "fewest tokens waiting"},
	}
}

func draw(t *testing.T, l *timeline.Line, o Options) string {
	t.Helper()
	var b bytes.Buffer
	if err := Render(&b, l, o); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestGoldenDrawings(t *testing.T) {
	cases := map[string]Options{"plain": {Width: 110}, "narrow": {Width: 70}, "color": {Width: 110, Color: true}}
	for name, o := range cases {
		got := draw(t, full(), o)
		path := filepath.Join("testdata", name+".txt")
		if *update {
			os.MkdirAll("testdata", 0o755)
			os.WriteFile(path, []byte(got), 0o644)
		}
		want, err := os.ReadFile(path)
		if err != nil || got != string(want) {
			t.Errorf("%s: %v\n%s\nwant\n%s", name, err, got, want)
		}
	}
}

func TestTextOfOthersCannotSteerTheTerminal(t *testing.T) {
	l := full()
	evil := "\x1b]0;title\x07\x9b31m\u202eabc\r\n" + strings.Repeat("x", 5000)
	l.RequestID, l.Model, l.Router, l.Missing, l.FinishReason, l.Style = evil, evil, evil, []string{evil}, evil, evil
	l.Error = &phase.Error{Stage: evil, Message: evil, Type: evil}
	l.Spans[0].Name, l.Spans[0].Node, l.Phases[1].Node, l.Attempts[0].Node, l.Decision.Reason = evil, evil, evil, evil, evil
	rank := 0
	l.Phases[1].Clock.State, l.Phases[2].DPRank, l.Phases[2].Rank = evil, &rank, &timeline.RankClock{State: evil}
	got := draw(t, l, Options{})
	if strings.ContainsAny(got, "\x1b\x07\r\u202e\u009b") {
		t.Errorf("control characters get through: %q", got)
	}
	if len(got) > 20_000 {
		t.Errorf("%d bytes for one request", len(got))
	}
}

func TestNothingOfALineIsNeeded(t *testing.T) {
	for _, l := range []*timeline.Line{{}, {TTFTNS: ptr(0), E2ENS: ptr(0)}, {TTFTNS: ptr(-5), E2ENS: ptr(-5), Spans: []timeline.Span{{Name: "a", DurNS: -5}}},
		{TTFTNS: ptr(1), Spans: []timeline.Span{{Name: "far", StartNS: 1 << 60, DurNS: 1 << 60, BoundNS: 1 << 60}}}} {
		if got := draw(t, l, Options{Width: 80}); got == "" {
			t.Error("nothing drawn")
		}
	}
}

func TestRowsFitTheWidth(t *testing.T) {
	for _, width := range []int{60, 80, 100, 150} {
		for _, row := range strings.Split(draw(t, full(), Options{Width: width}), "\n") {
			if strings.Contains(row, "router_receive") && utf8.RuneCountInString(row) > width {
				t.Errorf("width %d: %d columns: %q", width, utf8.RuneCountInString(row), row)
			}
		}
	}
}

func TestNumbersForPeople(t *testing.T) {
	cases := []struct{ got, want string }{
		{Duration(0), "0 ns"}, {Duration(999), "999 ns"}, {Duration(1000), "1.00 µs"}, {Duration(-1500), "-1.50 µs"}, {Duration(999_499), "999 µs"}, {Duration(999_500), "1.00 ms"},
		{Duration(14_100_000), "14.1 ms"}, {Duration(2_050_000_000), "2.05 s"}, {Bytes(12), "12 B"}, {Bytes(3 << 20), "3.00 MiB"}, {Bytes(1500), "1.46 KiB"}, {Bytes(5 << 30), "5.00 GiB"},
		{Count(0), "0"}, {Count(1234567), "1,234,567"}, {Count(-1234), "-1,234"}, {Count(999), "999"}, {Clean("abcdef", 4), "abc…"}, {Spark([]int64{0, 4, 8}, 3), "▁▅█"}, {Spark(nil, 3), ""},
		{Spark([]int64{1, 1, 1, 8}, 2), "▂█"},
	}
	for _, c := range cases {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestRankAndStagesAreNamed(t *testing.T) {
	l := full()
	rank := 2
	p := &l.Phases[2]
	p.DPRank = &rank
	p.Steps.Names = append(p.Steps.Names, "forward_start_ns", "forward_end_ns", "stage0_end_ns", "stage1_start_ns")
	p.Steps.Values = append(p.Steps.Values, []int64{0, 10 * ms, 20 * ms}, []int64{5 * ms, 15 * ms, 26 * ms}, []int64{2 * ms, 12 * ms, 21 * ms}, []int64{3 * ms, 12 * ms, 22 * ms})
	if got := draw(t, l, Options{Width: 100}); !strings.Contains(got, "rank 2, 2 stages, p50 2.00 ms, 3.00 ms\n") {
		t.Errorf("drawn:\n%s", got)
	}
}

func TestClocksOfRanksAreNamed(t *testing.T) {
	for _, c := range []struct {
		rank timeline.RankClock
		want string
	}{
		{timeline.RankClock{State: "identity", BoundNS: 450}, "  of its rank 2     the node's own clock, read within ±450 ns\n"},
		{timeline.RankClock{State: "synced", OffsetNS: -3 * ms, BoundNS: 9000}, "  of its rank 2     offset to the node's -3.00 ms ±9.00 µs, synced\n"},
		{timeline.RankClock{State: "none"}, "  of its rank 2     not aligned: no estimate was valid; the stamps of its engine are left out\n"},
	} {
		l := full()
		rank := 2
		p := &l.Phases[2]
		p.DPRank, p.Rank = &rank, &c.rank
		l.Phases = append(l.Phases, *p) // a second leg of the same rank says nothing new
		if got := draw(t, l, Options{Width: 100}); strings.Count(got, c.want) != 1 || strings.Count(got, "clock gen0") != 1 {
			t.Errorf("want once %q of:\n%s", c.want, got)
		}
	}
}
