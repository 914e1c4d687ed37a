package check

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

func ptr(v int64) *int64 { return &v }

// good is a line without fault.
func good() *timeline.Line {
	return &timeline.Line{
		RequestID: "r", Outcome: phase.Finished, Complete: true, StartNS: 1000, TTFTNS: ptr(60), E2ENS: ptr(100), UnaccountedNS: ptr(-5),
		Spans:    []timeline.Span{{Name: "a", DurNS: 65}, {Name: "b", DurNS: 40}},
		Tokens:   phase.Tokens{Prompt: 10, Output: 5},
		Attempts: []timeline.Attempt{{Role: phase.Ctx, Node: "c", Outcome: phase.Finished}, {Role: phase.Gen, Node: "g", Outcome: phase.Finished}},
		Phases: []timeline.Phase{
			{Role: phase.Disagg, Node: "r", Tokens: phase.Tokens{Output: 5}},
			{Role: phase.Ctx, Node: "c", Tokens: phase.Tokens{Prompt: 10, Cached: 4, Output: 1}, Bytes: 9, Transfer: []timeline.Stamp{{Name: "start_ns"}}},
			{Role: phase.Gen, Node: "g", Tokens: phase.Tokens{Prompt: 10, Output: 4}, Bytes: 9, Transfer: []timeline.Stamp{{Name: "start_ns"}},
				Clock: timeline.PhaseClock{OffsetNS: ptr(-500), BoundNS: ptr(1), SkewPPB: 1_000_000, AtNS: 500}, Stamps: []timeline.Stamp{{Name: "receive_ns", Raw: 11_500, Ref: ptr(10_011)}}},
		},
	}
}

func TestEachRuleFindsItsFault(t *testing.T) {
	cases := []struct {
		name   string
		change func(*timeline.Line)
		want   string // part of the one sentence; "" if there is none
	}{
		{"nothing wrong", func(*timeline.Line) {}, ""},
		{"incomplete, and it says so", func(l *timeline.Line) { l.Complete, l.Missing = false, []string{"gen"} }, ""},
		{"failed", func(l *timeline.Line) { l.Outcome, l.Tokens.Output = phase.Failed, 0 }, ""},
		{"a leg that failed over does not count", func(l *timeline.Line) {
			l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Gen, Node: "x", Outcome: phase.Failed})
			l.Phases = append(l.Phases, timeline.Phase{Role: phase.Gen, Node: "x", Tokens: phase.Tokens{Output: 3}})
		}, ""},
		{"a prefill whose generation leg was lost, and another try", func(l *timeline.Line) {
			for i := range l.Attempts {
				l.Attempts[i].Attempt++
			}
			for i := range l.Phases {
				l.Phases[i].Attempt++
			}
			l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Ctx, Node: "y", Outcome: phase.Finished}, timeline.Attempt{Role: phase.Gen, Node: "z", Outcome: phase.Failed})
			l.Phases = append(l.Phases, timeline.Phase{Role: phase.Ctx, Node: "y", Tokens: phase.Tokens{Output: 1}})
		}, ""},
		{"two context nodes computed the prompt, and both ended well", func(l *timeline.Line) {
			l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Ctx, Node: "y", Outcome: phase.Finished})
			l.Phases = append(l.Phases, timeline.Phase{Role: phase.Ctx, Node: "y", Disagg: 2, Tokens: phase.Tokens{Prompt: 10, Output: 1}})
		}, ""},
		{"the KV came from the second context node, after a part of the first's", func(l *timeline.Line) {
			l.Phases[0].Disagg, l.Phases[1].Disagg = 2, 2
			l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Ctx, Node: "y", Outcome: phase.Failed})
			l.Phases = append(l.Phases, timeline.Phase{Role: phase.Ctx, Node: "y", Bytes: 3, Transfer: []timeline.Stamp{{Name: "start_ns"}}})
		}, ""},
		{"and the first ended well", func(l *timeline.Line) {
			l.Phases[0].Disagg, l.Phases[1].Disagg = 2, 2
			l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Ctx, Node: "y", Outcome: phase.Finished})
			l.Phases = append(l.Phases, timeline.Phase{Role: phase.Ctx, Node: "y", Bytes: 3, Tokens: phase.Tokens{Output: 1}, Transfer: []timeline.Stamp{{Name: "start_ns"}}})
		}, ""},
		{"effect before cause", func(l *timeline.Line) { l.Violations = []timeline.Violation{{Cause: "x.a", Event: "y.b", ExcessNS: 7}} }, "y.b at 0 ns lies before its cause x.a"},
		{"negative span", func(l *timeline.Line) { l.Spans[0].DurNS, l.Spans[1].DurNS, l.NegativeSpans = -5, 110, 1 }, "span a of  lasts -5 ns"},
		{"negative, within its bound", func(l *timeline.Line) {
			l.Spans[0].DurNS, l.Spans[0].BoundNS, l.Spans[1].DurNS, l.NegativeSpans = -5, 5, 110, 1
		}, ""},
		{"negative, beyond its bound", func(l *timeline.Line) {
			l.Spans[0].DurNS, l.Spans[0].BoundNS, l.Spans[1].DurNS, l.NegativeSpans = -5, 4, 110, 1
		}, "lasts -5 ns, which its bound of 4 ns does not explain"},
		{"each message explained, all together not", func(l *timeline.Line) {
			l.Violations = []timeline.Violation{{Cause: "clocks", Event: "clocks", ExcessNS: 7}}
		}, "together contradict the clock bounds by 7 ns"},
		{"negative spans miscounted", func(l *timeline.Line) { l.NegativeSpans = 2 }, "negative_spans says 2"},
		{"sum does not close", func(l *timeline.Line) { l.Spans[0].DurNS++ }, "sum to 101 ns"},
		{"first token after the end", func(l *timeline.Line) { l.TTFTNS = ptr(101) }, "ttft_ns 101 is more than e2e_ns 100"},
		{"finished without an end", func(l *timeline.Line) { l.E2ENS = nil }, "has no e2e_ns"},
		{"complete with something missing", func(l *timeline.Line) { l.Missing = []string{"gen"} }, "says complete"},
		{"incomplete with nothing missing", func(l *timeline.Line) { l.Complete = false }, "says incomplete"},
		{"a token lost", func(l *timeline.Line) { l.Phases[2].Tokens.Output-- }, "produced 4 tokens, the client got 5"},
		{"more reused than there is", func(l *timeline.Line) { l.Phases[1].Tokens.Cached = 11 }, "reused 11 of 10"},
		{"bytes lost", func(l *timeline.Line) { l.Phases[2].Bytes-- }, "sent 9 bytes of KV, g received 8"},
		{"a conversion that does not follow", func(l *timeline.Line) { l.Phases[2].Stamps[0].Ref = ptr(10_000) }, "is converted to 10000"},
		{"no id", func(l *timeline.Line) { l.RequestID = "" }, "no request_id"},
	}
	for _, c := range cases {
		l := good()
		c.change(l)
		got := New().Line(l, "f:1")
		switch {
		case c.want == "" && len(got) > 0:
			t.Errorf("%s: %q", c.name, got)
		case c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)):
			t.Errorf("%s: %q, want one sentence with %q", c.name, got, c.want)
		}
	}
}

func TestARequestHasOneLine(t *testing.T) {
	c := New()
	c.Line(good(), "f:1")
	if got := c.Line(good(), "f:2"); len(got) != 1 || !strings.Contains(got[0], "the first is at f:1") {
		t.Errorf("%q", got)
	}
	if c.Lines != 2 || c.Incomplete != 0 {
		t.Errorf("%d lines, %d incomplete", c.Lines, c.Incomplete)
	}
}

func TestACheckerKeepsNoTextOfItsLines(t *testing.T) {
	const lines, each = 200, 64 << 10
	c, before := New(), liveHeap()
	for i := range lines {
		l := good()
		l.Schema, l.RequestID, l.ClientRequestID = timeline.Schema, fmt.Sprintf("req-%d", i), strings.Repeat("x", each)
		parsed, err := timeline.Parse(timeline.Append(nil, l))
		if err != nil {
			t.Fatal(err)
		}
		c.Line(parsed, "f:1")
	}
	if kept := liveHeap() - before; kept > lines*each/4 {
		t.Errorf("%d bytes of %d lines are kept", kept, lines)
	}
	if n := len(c.Line(&timeline.Line{RequestID: "req-0"}, "f:2")); n == 0 {
		t.Error("a second line of a request is not noticed")
	}
}

func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
