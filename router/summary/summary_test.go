package summary

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

func ptr(v int64) *int64 { return &v }

func line(id string, ttft, e2e int64) *timeline.Line {
	return &timeline.Line{
		RequestID: id, Outcome: phase.Finished, Style: "generation_first", Complete: true, TTFTNS: &ttft, E2ENS: &e2e, UnaccountedNS: ptr(-5), MaxBoundNS: ptr(100), WallNS: 1795975770303476405,
		Tokens: phase.Tokens{Prompt: 10, Cached: 4, Output: 3}, Handover: &timeline.Handover{Bytes: 7, DurNS: ptr(10), HiddenNS: ptr(5)},
		Spans: []timeline.Span{{Name: "prefill", Node: "ctx0", DurNS: ttft / 2}, {Name: "prefill_wait", Node: "ctx0", DurNS: 1}, {Name: "prefill", Node: "ctx0", DurNS: ttft / 4},
			{Name: "decode", Node: "r", DurNS: e2e - ttft}},
		Attempts: []timeline.Attempt{{Role: phase.Ctx, Node: "ctx0"}, {Role: phase.Gen, Node: "gen0"}},
	}
}

func span(name string, ns int64) timeline.Span {
	return timeline.Span{Name: name, Node: "n", DurNS: ns}
}

func TestQuantilesAreWithinHalfAPercent(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var h histogram
	var exact []int64
	for range 20_000 {
		v := int64(math.Exp(rng.NormFloat64()*2 + 14))
		h.add(v)
		exact = append(exact, v)
	}
	slices.Sort(exact)
	q := h.quantiles()
	for _, c := range []struct {
		at  float64
		got int64
	}{{0.5, q.P50}, {0.9, q.P90}, {0.99, q.P99}, {0.999, q.P999}} {
		want := exact[int(math.Ceil(c.at*20_000))-1]
		if e := math.Abs(float64(c.got-want)) / float64(want); e > 0.0051 {
			t.Errorf("quantile %v: %d, exact %d: off by %.2f %%", c.at, c.got, want, 100*e)
		}
	}
	if q.Min != exact[0] || q.Max != exact[len(exact)-1] || q.N != 20_000 {
		t.Errorf("%+v", q)
	}
}

func TestNegativeAndZeroDurationsKeepTheirPlace(t *testing.T) {
	var h histogram
	for _, v := range []int64{-1000, 0, 1000} {
		h.add(v)
	}
	if q := h.quantiles(); q.Min != -1000 || q.P50 != 0 || q.Max != 1000 || q.Mean != 0 {
		t.Errorf("%+v", q)
	}
	if (&histogram{}).quantiles().N != 0 {
		t.Error("an empty histogram has values")
	}
}

func TestWhatWasSlowIsOfTheTimeToTheFirstToken(t *testing.T) {
	s := New(1)
	l := line("r", 100, 900)
	l.Spans = []timeline.Span{span("ctx_queue", 30), span("prefill", 25), span("prefill_wait", 1), span("prefill", 25), span("relay", 2), span("decode", 100), span("resume", 600), span("decode", 100)}
	s.Add(l)
	if got := s.Result().Slowest[0]; got.Span != "prefill" || got.SpanNS != 50 {
		t.Errorf("%+v", got)
	}
}

func TestALineIsCountedWhereItBelongs(t *testing.T) {
	s := New(2)
	for i := range 10 {
		s.Add(line(fmt.Sprint(i), int64(i+1)*1000, 20_000))
	}
	failed := line("bad", 99_000_000, 99_000_000)
	failed.Outcome, failed.Complete, failed.NegativeSpans, failed.Amends = phase.Failed, false, 2, true
	failed.Violations = make([]timeline.Violation, 3)
	s.Add(failed)
	r := s.Result()
	if r.Requests != 11 || r.Complete != 10 || r.Incomplete != 1 || r.Negative != 2 || r.Violations != 3 || r.Amended != 1 || r.Outcomes["finished"] != 10 || *r.MaxBoundNS != 100 {
		t.Errorf("counts %+v", r.Counts)
	}
	if r.TTFT.N != 10 || r.TTFT.Max != 10_000 || r.PromptTokens != 110 || r.CachedTokens != 44 || r.KVBytes != 77 || *r.HiddenShare != 0.5 {
		t.Errorf("what failed enters the latencies, or tokens are lost: %+v %+v", r.TTFT, r.Counts)
	}
	if len(r.Spans) != 3 || r.Spans[0].Name != "prefill" || r.Spans[0].N != 10 || r.Spans[0].Max != 7500 {
		t.Errorf("spans %+v: the chunks of a request are one prefill", r.Spans)
	}
	if len(r.Slowest) != 2 || r.Slowest[0].RequestID != "9" || r.Slowest[1].RequestID != "8" || r.Slowest[0].Span != "prefill" {
		t.Errorf("slowest %+v", r.Slowest)
	}
	if len(r.Pairs) != 1 || r.Pairs[0].Name != "ctx0 → gen0" || len(r.Hours) != 1 || len(r.Nodes) != 3 {
		t.Errorf("pairs %+v, hours %+v, nodes %+v", r.Pairs, r.Hours, r.Nodes)
	}
}

func TestThePairIsTheOneThatBeganTheAnswer(t *testing.T) {
	ctx := func(node string, attempt int, o phase.Outcome) timeline.Attempt {
		return timeline.Attempt{Role: phase.Ctx, Node: node, Attempt: attempt, Outcome: o}
	}
	gen := func(node string, sub, attempt, given int) timeline.Attempt {
		return timeline.Attempt{Role: phase.Gen, Node: node, Sub: sub, Attempt: attempt, Given: given, Outcome: phase.Finished}
	}
	for _, c := range []struct {
		name     string
		attempts []timeline.Attempt
		want     string
	}{
		{"one try", []timeline.Attempt{ctx("c0", 0, phase.Finished), gen("g0", 0, 0, 0)}, "c0 → g0"},
		{"the second try, whose context node has no record", []timeline.Attempt{ctx("c1", 1, phase.Finished), ctx("c0", 0, phase.Failed), gen("g0", 0, 0, 0), gen("g1", 0, 1, 0)}, "c1 → g1"},
		{"another one goes on with the answer", []timeline.Attempt{ctx("c0", 0, phase.Finished), gen("g0", 0, 0, 0), gen("g1", 0, 1, 7)}, "c0 → g0"},
		{"a second context node was begun and was slower", []timeline.Attempt{ctx("c0", 0, phase.Finished), ctx("c1", 0, phase.Cancelled), gen("g0", 0, 0, 0)}, "c0 → g0"},
		{"two choices", []timeline.Attempt{ctx("c0", 0, phase.Finished), gen("g0", 0, 0, 0), gen("g1", 1, 0, 0)}, "c0 → g0"},
		{"one node", []timeline.Attempt{gen("g0", 0, 0, 0)}, "g0"},
	} {
		if got := pair(&timeline.Line{Attempts: c.attempts}); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestTheTimePerTokenIsOfOneAnswer(t *testing.T) {
	s := New(0)
	s.Add(line("a", 1_000_000, 21_000_000)) // 3 tokens
	l := line("b", 1_000_000, 21_000_000)
	l.Tokens.Output = 400 // of two choices at the same time
	l.Attempts = append(l.Attempts, timeline.Attempt{Role: phase.Gen, Node: "gen0", Sub: 1})
	s.Add(l)
	if got := s.Result().PerToken; got.N != 1 || got.Max != 10_000_000 {
		t.Errorf("%+v", got)
	}
}

func TestPartsThatAreMergedSayWhatTheWholeSays(t *testing.T) {
	whole, a, b := New(3), New(3), New(3)
	for i := range 200 {
		l := line(fmt.Sprint(i), int64(i+1)*1000, 900_000)
		whole.Add(l)
		if i%3 == 0 {
			a.Add(l)
		} else {
			b.Add(l)
		}
	}
	a.Merge(b)
	a.Merge(New(3))
	x, y := a.Result(), whole.Result()
	if x.TTFT != y.TTFT || x.Requests != y.Requests || !slices.Equal(x.Spans, y.Spans) || !slices.Equal(x.Slowest, y.Slowest) {
		t.Errorf("%+v\nwant\n%+v", x, y)
	}
}

func TestThePageNamesWhatMatters(t *testing.T) {
	s := New(3)
	s.Add(line("a", 1_000_000, 4_000_000))
	other := line("b\x1b[1m", 2_000_000, 5_000_000)
	other.Attempts[0].Node = "ctx1"
	s.Add(other)
	var b bytes.Buffer
	if err := s.Result().Write(&b, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2 requests", "2 complete", "0 negative spans", "time to first token", "prefill", "ctx1 → gen0", "ctx0 prefill", "slowest", "1.00 ms", "5.00 ms", "50 % of its time behind prefill"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not on the page:\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "\x1b") {
		t.Error("a control character is on the page")
	}
	orphan := line("c", 1, 2)
	orphan.Outcome, orphan.Style = "", ""
	s.Add(orphan)
	if err := s.Result().Write(&b, false); err != nil || !strings.Contains(b.String(), "1 of unknown outcome") || !strings.Contains(b.String(), "of unknown style") {
		t.Errorf("%v: a line without the router's record:\n%s", err, b.String())
	}
	if New(1).Result().Write(&b, true) != nil {
		t.Error("an empty summary cannot be written")
	}
}

func TestThePageIsBoundedHoweverManyNodesAndHoursThereAre(t *testing.T) {
	s := New(3)
	for i := range 200 {
		l := line(fmt.Sprint(i), 1_000_000, 4_000_000)
		l.WallNS = int64(i+1) * 3600e9
		l.Attempts[0].Node = fmt.Sprintf("context-node-with-a-long-name-%d", i)
		for j := range l.Spans {
			if l.Spans[j].Node == "ctx0" {
				l.Spans[j].Node = l.Attempts[0].Node
			}
		}
		s.Add(l)
	}
	var b bytes.Buffer
	if err := s.Result().Write(&b, false); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(b.String(), "\n"); n > 120 || strings.Count(b.String(), "more: --json") != 3 {
		t.Errorf("%d lines:\n%s", n, b.String())
	}
	for row := range strings.Lines(b.String()) {
		if !strings.Contains(row, "prefill on") && strings.Contains(row, "context-node") && utf8.RuneCountInString(row) > 110 {
			t.Errorf("a row of %d columns: %s", utf8.RuneCountInString(row), row)
		}
	}
	if !strings.Contains(b.String(), "1970-01-09 08:00") || strings.Contains(b.String(), "1970-01-01 01:00") {
		t.Errorf("the newest hours are not on the page:\n%s", b.String())
	}
}

func TestABarStaysInItsColumnsWhereAClockIsWrong(t *testing.T) {
	s, l := New(3), line("a", 400_000, 1_000_000)
	l.Spans = []timeline.Span{span("ctx_queue", 3600e9), span("ctx_return", -3600e9)}
	s.Add(l)
	var b bytes.Buffer
	if err := s.Result().Write(&b, false); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 10_000 {
		t.Fatalf("a page of %d bytes", b.Len())
	}
}

func BenchmarkAdd(b *testing.B) {
	s, l := New(5), line("a", 1_000_000, 4_000_000)
	for b.Loop() {
		s.Add(l)
	}
}
