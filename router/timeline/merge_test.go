package timeline

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
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

var update = flag.Bool("update", false, "write the golden files")

const (
	routerID clock.ID = "00000000000000aa.00000001"
	ctxID    clock.ID = "00000000000000bb.00000002"
	genID    clock.ID = "00000000000000cc.00000003"

	ms = int64(1_000_000)
	t0 = 1_000_000 * ms // the router's clock at receipt
	// What the local clocks show while the router's shows 0.
	ctxShift = 5_000 * ms
	genShift = -300 * ms
	bound    = 10_000 // of each node's estimate
)

// clocks knows both nodes' clocks exactly, with a bound.
func clocks() Clocks {
	return Clocks{Reference: routerID, Estimate: func(id clock.ID, ns int64) (clock.Estimate, bool) {
		shift, ok := map[clock.ID]int64{ctxID: ctxShift, genID: genShift}[id]
		return clock.Estimate{
			Reference: routerID, Local: id, OffsetNS: -shift, LowerNS: -shift - bound, UpperNS: -shift + bound, AtNS: ns, State: clock.Synced,
		}, ok
	}}
}

// rec builds a record; stamps are ms after the router's receipt, by name.
func rec(role phase.Role, stamps map[string]float64) *phase.Record {
	r := &phase.Record{
		Schema: phase.Schema, Role: role, Router: "router0", RequestID: "r1", ClientRequestID: "mine", DisaggRequestID: 1450704281600000,
		Style: styleGenFirst, Model: "tiny", Streamed: true, Outcome: phase.Finished, FinishReason: "stop",
	}
	shift := int64(0)
	switch role {
	case phase.Disagg:
		r.Node, r.Instance = "router0", routerID
		r.Decision = &phase.Decision{Policy: "least_loaded", Ctx: "ctx0", Gen: "gen0", Reason: "fewest tokens waiting"}
		r.Tokens = phase.Tokens{Prompt: 700, Output: 12}
	case phase.Ctx:
		r.Node, r.Instance, shift = "ctx0", ctxID, ctxShift
		r.Tokens = phase.Tokens{Prompt: 700, Cached: 128, Output: 1}
	case phase.Gen:
		r.Node, r.Instance, shift = "gen0", genID, genShift
		r.Tokens = phase.Tokens{Prompt: 700, Output: 11}
	}
	r.Clocks = []phase.Clock{{ID: r.Instance, Kind: "mono"}}
	at := func(v float64) int64 { return t0 + shift + int64(v*float64(ms)) }
	for _, f := range r.Stamps.All() {
		if v, ok := stamps[strings.TrimSuffix(f.Name, "_ns")]; ok {
			ns := at(v)
			*f.NS = &ns
		}
	}
	if v, ok := stamps["chunk"]; ok { // two chunks of 2 ms with a wait of 0.5 ms, then 0.25 ms of sampling
		r.Chunks = []infer.Chunk{
			{Iter: 7, Tokens: 400, KVTokens: 128, BatchSize: 1, ForwardStartNS: at(v), ForwardEndNS: at(v + 2), SampleEndNS: at(v + 2)},
			{Iter: 8, Tokens: 172, KVTokens: 528, BatchSize: 2, ForwardStartNS: at(v + 2.5), ForwardEndNS: at(v + 4.5), SampleEndNS: at(v + 4.75)},
		}
	}
	if v, ok := stamps["transfer"]; ok {
		start, last, installed := at(v), at(v+4), at(v+5)
		r.Transfer = &phase.Transfer{Peer: "peer", Bytes: 1 << 20, Frames: 9, Tokens: 572, TokensHeld: 128, StartNS: &start, LastByteNS: &last, InstalledNS: &installed, WireNS: 3 * ms, InstallNS: ms}
	}
	return r
}

// ring is a request of generation_first in which every hop takes a time of its own.
func ring() []*phase.Record {
	return []*phase.Record{
		rec(phase.Disagg, map[string]float64{"receive": 0, "parsed": 0.5, "placed": 0.6, "gen_prepare": 0.6, "gen_dispatch": 0.65, "gen_headers": 1.9, "ctx_prepare": 1.9, "ctx_dispatch": 2, "ctx_done": 12,
			"first_token": 14, "first_token_sent": 14.1, "last_token": 40, "end": 40.2}),
		rec(phase.Ctx, map[string]float64{"receive": 2.3, "parsed": 2.4, "started": 2.4, "admitted": 2.5, "queued": 2.5, "first_scheduled": 4, "chunk": 4.2, "first_token": 9.1, "end": 9.5}),
		rec(phase.Gen, map[string]float64{"receive": 0.9, "parsed": 1, "started": 1, "queued": 1.1, "admitted": 1.3, "headers_sent": 1.7, "transfer": 6, "first_token": 12, "first_token_sent": 12.2,
			"last_token": 39, "end": 39.1}),
	}
}

func parts(records []*phase.Record) (ps []Part) {
	for _, r := range records {
		ps = append(ps, Part{Record: r})
	}
	return ps
}

// shape is "name dur;..." with durations in µs.
func shape(l *Line) string {
	var b strings.Builder
	for _, s := range l.Spans {
		fmt.Fprintf(&b, "%s %d;", s.Name, s.DurNS/1000)
	}
	return b.String()
}

func TestGenerationFirstTilesTheWholeRequest(t *testing.T) {
	l := Merge(parts(ring()), clocks())
	want := "router_receive 500;router_place 100;gen_prepare 50;gen_dispatch 250;gen_parse 100;gen_admit 300;kv_open 400;gen_headers_return 200;ctx_prepare 100;ctx_dispatch 300;" +
		"ctx_parse 100;ctx_admit 100;ctx_queue 1500;device_queue 200;prefill 2000;prefill_wait 500;prefill 2000;prefill_sample 250;prefill_sync 150;kv_handover 1900;" +
		"gen_start 1000;gen_emit 200;return_network 1800;relay 100;decode 25900;finish 200;"
	if got := shape(l); got != want {
		t.Errorf("spans\n%s\nwant\n%s", got, want)
	}
	if *l.UnaccountedNS != 0 || *l.TTFTNS != 14_100_000 || *l.E2ENS != 40_200_000 || !l.Complete || l.NegativeSpans != 0 || len(l.Violations) != 0 {
		t.Errorf("unaccounted %d, ttft %d, e2e %d, complete %v, missing %v, violations %v", *l.UnaccountedNS, *l.TTFTNS, *l.E2ENS, l.Complete, l.Missing, l.Violations)
	}
	if *l.MaxBoundNS != 2*bound { // kv_handover is between two nodes that are each off by up to the bound
		t.Errorf("max bound %d, want %d", *l.MaxBoundNS, 2*bound)
	}
	if h := l.Handover; *h.DurNS != 5*ms || *h.HiddenNS != 3_100_000 || *h.VisibleNS != 1_900_000 {
		t.Errorf("handover %d, hidden %d, visible %d", *h.DurNS, *h.HiddenNS, *h.VisibleNS)
	}
}

func TestDecodeIsFromTheFirstWriteToTheLastToken(t *testing.T) {
	at := func(v float64) int64 { return t0 + int64(v*float64(ms)) }
	resume := func(cut, token float64) phase.Resume {
		return phase.Resume{Attempt: 1, Tokens: 2, CutNS: at(cut), TokenNS: at(token)}
	}
	cases := []struct {
		name                   string
		streamed               bool
		first, sent, last, end float64 // sent 0: nothing was sent on
		resumes                []phase.Resume
		want                   string
		ttft                   float64
	}{
		{"one by one", true, 14, 14.1, 40, 40.2, nil, "relay 100;decode 25900;finish 200;", 14.1},
		{"all in one write", true, 14, 14.3, 14.2, 14.4, nil, "relay 300;decode 0;finish 100;", 14.3},
		{"all in one event", true, 14, 14.3, 14, 14.4, nil, "relay 300;finish 100;", 14.3},
		{"one token", true, 14, 14.1, 14, 14.4, nil, "relay 100;finish 300;", 14.1},
		{"resumed", true, 14, 14.1, 40, 40.2, []phase.Resume{resume(20, 25)}, "relay 100;decode 5900;resume 5000;decode 15000;finish 200;", 14.1},
		{"resumed twice", true, 14, 14.1, 40, 40.2, []phase.Resume{resume(20, 25), resume(26, 30)},
			"relay 100;decode 5900;resume 5000;decode 1000;resume 4000;decode 10000;finish 200;", 14.1},
		{"cut before the first write", true, 14, 25.1, 40, 40.2, []phase.Resume{resume(20, 25)}, "relay 6000;resume 5000;relay 100;decode 14900;finish 200;", 25.1},
		{"cut before the only write", true, 14, 25.3, 25.2, 25.4, []phase.Resume{resume(20, 25)}, "relay 6000;resume 5000;relay 300;decode 0;finish 100;", 25.3},
		{"the rest of a resumed answer in one event", true, 14, 14.1, 25, 25.4, []phase.Resume{resume(20, 25)}, "relay 100;decode 5900;resume 5000;decode 0;finish 400;", 14.1},
		{"the client left before the first write", true, 14, 0, 20, 20.1, nil, "decode 6000;finish 100;", 0},
		{"not streamed", false, 14, 0, 40, 40.2, nil, "decode 26000;finish 200;", 14},
		{"not streamed, one token", false, 14, 0, 14, 40.2, nil, "finish 26200;", 14},
		{"not streamed, resumed", false, 14, 0, 40, 40.2, []phase.Resume{resume(20, 25)}, "decode 6000;resume 5000;decode 15000;finish 200;", 14},
	}
	for _, c := range cases {
		rs := ring()
		r, s := rs[0], &rs[0].Stamps
		r.Streamed, r.Resumes = c.streamed, c.resumes
		*s.FirstTokenNS, *s.FirstTokenSentNS, *s.LastTokenNS, *s.EndNS = at(c.first), at(c.sent), at(c.last), at(c.end)
		if c.sent == 0 {
			s.FirstTokenSentNS = nil
		}
		l := Merge(parts(rs), clocks())
		if got := shape(l); !strings.HasSuffix(got, "return_network 1800;"+c.want) || l.NegativeSpans != 0 || *l.UnaccountedNS != 0 {
			t.Errorf("%s: %d negative, unaccounted %d\n%s\nwant its end to be %s", c.name, l.NegativeSpans, *l.UnaccountedNS, got, c.want)
		}
		if (c.ttft == 0) != (l.TTFTNS == nil) || (c.ttft != 0 && t0+*l.TTFTNS != at(c.ttft)) {
			t.Errorf("%s: ttft %v, want %v ms", c.name, l.TTFTNS, c.ttft)
		}
	}
}

func TestContextFirstTilesTheWholeRequest(t *testing.T) {
	rs := []*phase.Record{
		rec(phase.Disagg, map[string]float64{"receive": 0, "parsed": 0.5, "placed": 0.6, "ctx_prepare": 0.6, "ctx_dispatch": 0.7, "ctx_done": 9, "gen_prepare": 9, "gen_dispatch": 9.1, "gen_headers": 9.8, "first_token": 14,
			"first_token_sent": 14.1, "last_token": 40, "end": 40.2}),
		rec(phase.Ctx, map[string]float64{"receive": 1, "parsed": 1.1, "started": 1.1, "queued": 1.2, "first_scheduled": 2, "chunk": 2, "first_token": 7, "end": 7.5}),
		rec(phase.Gen, map[string]float64{"receive": 9.2, "parsed": 9.3, "admitted": 9.5, "headers_sent": 9.6, "transfer": 6.5, "first_token": 12, "first_token_sent": 12.2, "end": 39.1}),
	}
	for _, r := range rs {
		r.Style = styleCtxFirst
	}
	l := Merge(parts(rs), clocks())
	want := "router_receive 500;router_place 100;ctx_prepare 100;ctx_dispatch 300;ctx_parse 100;ctx_admit 100;ctx_queue 800;device_queue 0;prefill 2000;prefill_wait 500;prefill 2000;prefill_sample 250;" +
		"prefill_sync 250;ctx_emit 500;ctx_return 1500;gen_prepare 100;gen_dispatch 100;gen_parse 100;gen_admit 200;kv_handover 2000;gen_start 500;gen_emit 200;return_network 1800;relay 100;decode 25900;finish 200;"
	if got := shape(l); got != want || *l.UnaccountedNS != 0 || !l.Complete {
		t.Errorf("spans\n%s\nwant\n%s\nunaccounted %d, missing %v", got, want, *l.UnaccountedNS, l.Missing)
	}
}

func TestAggregatedTilesTheWholeRequest(t *testing.T) {
	rs := []*phase.Record{
		rec(phase.Disagg, map[string]float64{"receive": 0, "parsed": 0.5, "placed": 0.6, "gen_prepare": 0.6, "gen_dispatch": 0.7, "gen_headers": 3, "first_token": 14, "last_token": 40, "end": 40.2}),
		rec(phase.Gen, map[string]float64{"receive": 1, "parsed": 1.1, "started": 1.1, "queued": 1.2, "first_scheduled": 2, "chunk": 2, "first_token": 7, "first_token_sent": 7.5, "end": 39}),
	}
	for _, r := range rs {
		r.Style, r.Streamed = styleAggregated, false
	}
	rs[0].Decision.Ctx = ""
	l := Merge(parts(rs), clocks())
	want := "router_receive 500;router_place 100;prepare 100;dispatch 300;parse 100;admit 100;queue 800;device_queue 0;prefill 2000;prefill_wait 500;prefill 2000;prefill_sample 250;prefill_sync 250;emit 500;" +
		"return_network 6500;decode 26000;finish 200;"
	if got := shape(l); got != want || *l.UnaccountedNS != 0 || !l.Complete || *l.TTFTNS != 14*ms {
		t.Errorf("spans\n%s\nwant\n%s\nunaccounted %d, missing %v, ttft %d", got, want, *l.UnaccountedNS, l.Missing, *l.TTFTNS)
	}
}

// delay makes everything from a stamp on late by d, as if the code had waited just before it.
func delay(rs []*phase.Record, from string, d int64) {
	l := Merge(parts(rs), clocks())
	var at int64
	for i := range l.Phases {
		if role, name, _ := strings.Cut(from, "."); string(l.Phases[i].Role) == role {
			at, _ = l.Phases[i].At(name)
		}
	}
	shift := map[phase.Role]int64{phase.Ctx: ctxShift, phase.Gen: genShift}
	for _, r := range rs {
		role, name, _ := strings.Cut(from, ".")
		late := func(ns *int64, field string) {
			if ns == nil {
				return
			}
			t := *ns - t0 - shift[r.Role]
			// Of stamps at the same moment those that are taken before it stay.
			if t > at || (t == at && string(r.Role) == role && field == name) {
				*ns += d
			}
		}
		for _, f := range r.Stamps.All() {
			late(*f.NS, f.Name)
		}
		for i := range r.Chunks {
			c := &r.Chunks[i]
			late(&c.ForwardStartNS, "")
			late(&c.ForwardEndNS, "")
			late(&c.SampleEndNS, "")
		}
		if tr := r.Transfer; tr != nil {
			late(tr.StartNS, "")
			late(tr.LastByteNS, "")
			late(tr.InstalledNS, "")
		}
	}
}

func TestTimeBetweenTwoStagesIsUnaccounted(t *testing.T) {
	for _, stamp := range []string{"disagg.gen_prepare_ns", "disagg.ctx_prepare_ns", "ctx.started_ns", "gen.started_ns"} {
		rs := ring()
		before := shape(Merge(parts(rs), clocks()))
		delay(rs, stamp, 5*ms)
		if l := Merge(parts(rs), clocks()); *l.UnaccountedNS != 5*ms || shape(l) != before {
			t.Errorf("5 ms before %s: unaccounted %d, want 5 ms in no span\n%s\n%s", stamp, *l.UnaccountedNS, shape(l), before)
		}
	}
	for _, c := range []struct{ stamp, span string }{
		{"disagg.gen_dispatch_ns", "gen_prepare 5050;"}, {"ctx.queued_ns", "ctx_admit 5100;"}, {"ctx.first_scheduled_ns", "ctx_queue 6500;"},
		{"gen.first_token_ns", "gen_start 6000;"}, {"disagg.first_token_ns", "return_network 6800;"},
	} {
		rs := ring()
		delay(rs, c.stamp, 5*ms)
		if l := Merge(parts(rs), clocks()); *l.UnaccountedNS != 0 || !strings.Contains(shape(l), c.span) {
			t.Errorf("5 ms of work before %s: unaccounted %d, want it in %s\n%s", c.stamp, *l.UnaccountedNS, c.span, shape(l))
		}
	}
}

func TestDecodeIsSplitByItsSteps(t *testing.T) {
	ps := withSteps()
	ps[2].Steps.Truncated, ps[2].Record.PreemptedNS = 0, 7
	l := Merge(ps, clocks())
	if want := (Decode{Steps: 2, ComputeNS: 2 * ms, WaitNS: 25 * ms, PreemptedNS: 7}); l.Decode == nil || *l.Decode != want {
		t.Errorf("decode %+v, want %+v", l.Decode, want)
	}
	ps[2].Steps.Truncated = 1
	if l := Merge(ps, clocks()); l.Decode != nil {
		t.Errorf("steps are missing, decode is %+v", l.Decode)
	}
	if l.CriticalSpan != "prefill" {
		t.Errorf("critical span %q, want prefill", l.CriticalSpan)
	}
}

func TestColumnsEndWhereTheEstimateDoes(t *testing.T) {
	ps, c := withSteps(), clocks()
	every := c.Estimate
	c.Estimate = func(id clock.ID, ns int64) (clock.Estimate, bool) {
		e, ok := every(id, ns)
		switch id {
		case genID:
			e.VoidAfterNS = ps[2].Steps.TokenNS[0]
		case ctxID:
			e.VoidAfterNS = ps[1].Record.Chunks[0].SampleEndNS
		}
		return e, ok
	}
	l := Merge(ps, c)
	for i, name := range []string{1: "chunks", 2: "steps"} {
		p := &l.Phases[i]
		for _, cols := range []*Columns{p.Chunks, p.Steps} {
			if ends := cols.Column("sample_end_ns"); cols != nil && (len(ends) != 1 || ends[0] < 0 || ends[0] > 40*ms) {
				t.Errorf("%s end at %v", name, ends)
			}
		}
	}
	if n := l.Phases[2].Truncated; n != 2 {
		t.Errorf("%d steps are left out, want the one that the node did not keep and the one that cannot be placed", n)
	}
}

func TestTheHandoverIsSplit(t *testing.T) {
	rs := ring()
	asked, heard := t0+genShift+1_200_000, t0+ctxShift+1_250_000
	rs[2].Transfer.RequestedNS = &asked
	rs[1].Transfer = &phase.Transfer{RequestedNS: &heard}
	h := Merge(parts(rs), clocks()).Handover
	if *h.OpenNS != 100_000 || *h.AllocateNS != 100_000 || *h.NotifyNS != 50_000 {
		t.Errorf("open %d, allocate %d, notify %d", *h.OpenNS, *h.AllocateNS, *h.NotifyNS)
	}
}

func TestTheOrderAndTheNumberOfCopiesDoNotMatter(t *testing.T) {
	want := string(Append(nil, Merge(parts(ring()), clocks())))
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		ps := slices.Concat(parts(ring()), parts(ring())[:rng.IntN(4)])
		rng.Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
		if got := string(Append(nil, Merge(ps, clocks()))); got != want {
			t.Fatalf("seed %d:\n%s\nwant\n%s", seed, got, want)
		}
	}
}

func TestNothingIsHidden(t *testing.T) {
	cases := []struct {
		name       string
		change     func([]*phase.Record)
		negative   int
		violations []string
	}{
		{"a node that receives before the router sends, within the bound: negative, no violation",
			func(rs []*phase.Record) { *rs[2].Stamps.ReceiveNS = t0 + genShift + 650_000 - 5_000 }, 1, nil},
		{"beyond the bound: a violation too",
			func(rs []*phase.Record) { *rs[2].Stamps.ReceiveNS = t0 + genShift + 650_000 - 15_000 }, 1, []string{"router0.gen_dispatch_ns > gen0.receive_ns by 5000"}},
		{"the router reads a token before the node gave it",
			func(rs []*phase.Record) { *rs[0].Stamps.FirstTokenNS = t0 + 12_100_000 }, 1, []string{"gen0.first_token_sent_ns > router0.first_token_ns by 90000"}},
		{"decode begins before prefill ended",
			func(rs []*phase.Record) {
				*rs[2].Stamps.FirstTokenNS = t0 + genShift + 8*ms
				*rs[2].Transfer.InstalledNS = t0 + genShift + 7*ms
			}, 1, []string{"ctx0.first_token_ns > gen0.first_token_ns by 1080000"}},
	}
	for _, c := range cases {
		rs := ring()
		c.change(rs)
		l := Merge(parts(rs), clocks())
		var got []string
		for _, v := range l.Violations {
			got = append(got, fmt.Sprintf("%s > %s by %d", v.Cause, v.Event, v.ExcessNS))
		}
		if l.NegativeSpans != c.negative || !slices.Equal(got, c.violations) {
			t.Errorf("%s: %d negative, violations %q", c.name, l.NegativeSpans, got)
		}
		if *l.UnaccountedNS != 0 {
			t.Errorf("%s: unaccounted %d: a negative span must keep the sum", c.name, *l.UnaccountedNS)
		}
	}
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	legs := []phase.Leg{{Role: phase.Ctx, Node: "ctx0", Records: true}, {Role: phase.Gen, Node: "gen0", Records: true}, {Role: phase.Gen, Node: "foreign"}}
	cases := []struct {
		name   string
		keep   []int
		change func([]*phase.Record)
		want   []string
	}{
		{"all there", []int{0, 1, 2}, nil, nil},
		{"no ctx", []int{0, 2}, nil, []string{"ctx ctx0 sub 0 attempt 0"}},
		{"neither node", []int{0}, nil, []string{"ctx ctx0 sub 0 attempt 0", "gen gen0 sub 0 attempt 0"}},
		{"no router", []int{1, 2}, nil, []string{"disagg"}},
		{"legs that keep no records are not waited for", []int{0, 1, 2}, func(rs []*phase.Record) { rs[0].Legs = legs }, nil},
		{"an attempt that failed over is waited for", []int{0, 1, 2}, func(rs []*phase.Record) {
			rs[0].Legs = append(slices.Clone(legs), phase.Leg{Role: phase.Gen, Node: "gen1", Attempt: 1, Records: true})
		}, []string{"gen gen1 sub 0 attempt 1"}},
		{"a request that was refused at once needs nobody", []int{0}, func(rs []*phase.Record) { rs[0].Decision, rs[0].Outcome = nil, phase.Rejected }, nil},
		{"announced steps are waited for", []int{0, 1, 2}, func(rs []*phase.Record) { rs[2].StepMessages = 1 }, []string{"steps of gen gen0 sub 0 attempt 0"}},
	}
	for _, c := range cases {
		all := ring()
		if c.change != nil {
			c.change(all)
		}
		var rs []*phase.Record
		for _, i := range c.keep {
			rs = append(rs, all[i])
		}
		l := Merge(parts(rs), clocks())
		if !slices.Equal(l.Missing, c.want) || l.Complete != (len(c.want) == 0) {
			t.Errorf("%s: missing %q, complete %v", c.name, l.Missing, l.Complete)
		}
	}
}

func TestWithoutAnEstimateNothingIsAligned(t *testing.T) {
	l := Merge(parts(ring()), Clocks{Reference: routerID})
	want := "router_receive 500;router_place 100;gen_prepare 50;gen_leg 1250;ctx_prepare 100;remote 12000;relay 100;decode 25900;finish 200;"
	if got := shape(l); got != want || *l.UnaccountedNS != 0 {
		t.Errorf("spans %s\nwant %s", got, want)
	}
	for _, p := range l.Phases[1:] {
		if p.Clock.State != stateNone || p.Clock.OffsetNS != nil || p.Stamps[0].Ref != nil {
			t.Errorf("%s is aligned: %+v", p.Node, p.Clock)
		}
	}
}

func TestEstimateThatIsUsed(t *testing.T) {
	known := func(state string, local, ref clock.ID) *clock.Estimate {
		return &clock.Estimate{Reference: ref, Local: local, OffsetNS: 7, LowerNS: 5, UpperNS: 9, State: state}
	}
	sameKernel := clock.ID("00000000000000aa.00000009")
	cases := []struct {
		name   string
		clocks Clocks
		from   phase.Clock
		want   int64
		ok     bool
	}{
		{"the merge's own before the record's", clocks(), phase.Clock{ID: ctxID, Estimate: known(clock.Synced, ctxID, routerID)}, -ctxShift, true},
		{"the record's when the merge has none", Clocks{}, phase.Clock{ID: ctxID, Estimate: known(clock.Synced, ctxID, routerID)}, 7, true},
		{"not one of another reference", Clocks{}, phase.Clock{ID: ctxID, Estimate: known(clock.Synced, ctxID, genID)}, 0, false},
		{"not one that is void", Clocks{}, phase.Clock{ID: ctxID, Estimate: known(clock.Void, ctxID, routerID)}, 0, false},
		{"equal epochs prove nothing", Clocks{}, phase.Clock{ID: sameKernel}, 0, false},
		{"the process itself", Clocks{}, phase.Clock{ID: routerID}, 0, true},
		{"no clock id: none", Clocks{}, phase.Clock{}, 0, false},
	}
	for _, c := range cases {
		e, ok := c.clocks.estimate(routerID, c.from, 100)
		if ok != c.ok || e.OffsetNS != c.want {
			t.Errorf("%s: offset %d, ok %v", c.name, e.OffsetNS, ok)
		}
		if ok && c.from.ID != routerID && e.BoundNS() == 0 {
			t.Errorf("%s: the bound of another process's clock is 0", c.name)
		}
	}
}

func TestTheLastAttemptCountsAndTheTimeBeforeItIsRetry(t *testing.T) {
	rs := ring()
	fault := &phase.Error{Stage: "gen", Type: "server_error", Message: "gone", Retryable: true}
	for _, r := range rs {
		r.Attempt = 1
	}
	rs[0].Legs = []phase.Leg{{Role: phase.Gen, Node: "gen1", Records: true}, {Role: phase.Ctx, Node: "ctx0", Attempt: 1, Records: true}, {Role: phase.Gen, Node: "gen0", Attempt: 1, Records: true}}
	failed := rec(phase.Gen, map[string]float64{"receive": 0.52, "end": 0.57})
	failed.Node, failed.Outcome, failed.Error = "gen1", phase.Failed, fault
	l := Merge(parts(append(rs, failed)), clocks())
	if !strings.Contains(shape(l), "router_receive 500;retry 100;gen_prepare 50;gen_dispatch 250;") || *l.UnaccountedNS != 0 || l.Outcome != phase.Finished || !l.Complete {
		t.Errorf("%s\nunaccounted %d, outcome %s, missing %q", shape(l), *l.UnaccountedNS, l.Outcome, l.Missing)
	}
	if l = Merge(parts(rs), clocks()); len(l.Attempts) != 3 || l.Attempts[0].Node != "gen1" || !slices.Equal(l.Missing, []string{"gen gen1 sub 0 attempt 0"}) {
		t.Errorf("attempts %+v, missing %q", l.Attempts, l.Missing)
	}
}

func TestASeamSplitsDecode(t *testing.T) {
	rs := ring()
	s := &rs[0].Stamps
	first := max(*s.FirstTokenNS, *s.FirstTokenSentNS)
	cut := first + (*s.LastTokenNS-first)/4
	rs[0].Resumes = []phase.Resume{{Attempt: 1, Tokens: 2, CutNS: cut, TokenNS: cut + 1000}, {Sub: 1, Attempt: 1, CutNS: cut, TokenNS: cut + 1}}
	rs[0].Legs = []phase.Leg{
		{Role: phase.Ctx, Node: "ctx0", Records: true}, {Role: phase.Gen, Node: "gen0", Records: true, Outcome: phase.Failed},
		{Role: phase.Gen, Node: "gen9", Attempt: 1, Given: 2, Outcome: phase.Cancelled},
	}
	l := Merge(parts(rs), clocks())
	if names := shape(l); !strings.Contains(names, "resume 1;decode ") || *l.UnaccountedNS != 0 || l.NegativeSpans != 0 {
		t.Errorf("%s\nunaccounted %d", names, *l.UnaccountedNS)
	}
	if a := l.Attempts[slices.IndexFunc(l.Attempts, func(a Attempt) bool { return a.Attempt == 1 })]; a.Node != "gen9" || a.Given != 2 || a.Outcome != phase.Cancelled || len(l.Resumes) != 2 {
		t.Errorf("attempt %+v, resumes %+v", a, l.Resumes)
	}
	back, err := Parse(Append(nil, l))
	if err != nil {
		t.Fatal(err)
	}
	if r := back.Part(&back.Phases[0]).Record; !slices.Equal(r.Resumes, rs[0].Resumes) {
		t.Errorf("resumes %+v come back as %+v", rs[0].Resumes, r.Resumes)
	}
}

func TestARequestOfSeveralChoicesWaitsForTheLegsOfAll(t *testing.T) {
	first, second := ring(), ring()[1:]
	legs := []phase.Leg{{Role: phase.Ctx, Node: "ctx0", Records: true}, {Role: phase.Gen, Node: "gen0", Records: true}}
	for i, r := range second {
		r.Sub = 1
		legs = append(legs, legs[i])
		legs[i+2].Sub = 1
	}
	first[0].Legs = legs
	if l := Merge(parts(first), clocks()); !slices.Equal(l.Missing, []string{"ctx ctx0 sub 1 attempt 0", "gen gen0 sub 1 attempt 0"}) {
		t.Errorf("missing %q", l.Missing)
	}
	if l := Merge(parts(append(first, second...)), clocks()); !l.Complete || len(l.Attempts) != 4 || *l.UnaccountedNS != 0 || l.Tokens.Output != 12 {
		t.Errorf("complete %v, attempts %d, tokens %+v", l.Complete, len(l.Attempts), l.Tokens)
	}
}

func withSteps() []Part {
	ps := parts(ring())
	ps[2].Record.StepMessages = 1
	at := t0 + genShift
	ps[2].Steps = &infer.Steps{
		Step: []int32{0, 1}, Iter: []int64{90, 92}, ForwardStartNS: []int64{at + 13*ms, at + 15*ms}, ForwardEndNS: []int64{at + 14*ms, at + 16*ms},
		SampleEndNS: []int64{at + 14*ms, at + 16*ms}, TokenNS: []int64{at + 14*ms, at + 16*ms}, KVTokens: []int32{701, 702}, BatchSize: []int32{3, 4}, Truncated: 1,
	}
	return ps
}

// withStages are those of nodes whose devices are pipelines: of two stages and of three.
func withStages() []Part {
	ps := withSteps()
	for i := range ps[1].Record.Chunks {
		c := &ps[1].Record.Chunks[i]
		c.StageNS = []int64{c.ForwardStartNS + ms, c.ForwardStartNS + ms + 10}
	}
	at := t0 + genShift
	ps[2].Steps.StageNS = [][]int64{{at + 13*ms + 1, at + 15*ms + 1}, {at + 13*ms + 3, at + 15*ms + 4}, {at + 13*ms + 5, at + 15*ms + 6}, {at + 13*ms + 8, at + 15*ms + 9}}
	return ps
}

func TestStepsSayWhenEachStageRanThem(t *testing.T) {
	l := Merge(withStages(), clocks())
	start := l.Phases[2].Steps.Column("forward_start_ns")[1]
	want := []Stage{
		{StartNS: []int64{start - 2*ms, start}, EndNS: []int64{start - 2*ms + 1, start + 1}}, {StartNS: []int64{start - 2*ms + 3, start + 4}, EndNS: []int64{start - 2*ms + 5, start + 6}},
		{StartNS: []int64{start - 2*ms + 8, start + 9}, EndNS: []int64{start - ms, start + ms}},
	}
	if got := l.Phases[2].Steps.Stages(); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := l.Phases[1].Chunks.Stages(); len(got) != 2 || got[1].StartNS[0] != got[0].EndNS[0]+10 || got[1].EndNS[0]-got[0].StartNS[0] != 2*ms {
		t.Errorf("chunks: %v", got)
	}
	if got := Merge(withSteps(), clocks()).Phases[2].Steps.Stages(); len(got) != 1 || len(got[0].EndNS) != 2 {
		t.Errorf("no pipeline: %v", got)
	}
	uneven := withStages()
	uneven[1].Record.Chunks[0].StageNS = nil
	if got := Merge(uneven, clocks()).Phases[1].Chunks.Stages(); len(got) != 1 {
		t.Errorf("chunks of which one has no stages: %v", got)
	}
}

// Chunks of one prompt follow each other through the stages of a pipeline: their spans tile the time all the same.
func TestPrefillOfAPipelineHasNoNegativeSpans(t *testing.T) {
	ps := withStages()
	c := ps[1].Record.Chunks
	c[1].ForwardStartNS = c[0].ForwardEndNS - ms
	l := Merge(ps, clocks())
	var got []string
	for _, s := range l.Spans {
		if strings.HasPrefix(s.Name, "prefill") {
			got = append(got, fmt.Sprint(s.Name, " ", s.DurNS/1000))
		}
	}
	if want := []string{"prefill 2000", "prefill 2500", "prefill_sample 250", "prefill_sync 150"}; !slices.Equal(got, want) || l.NegativeSpans != 0 {
		t.Errorf("%q and %d negative spans, want %q", got, l.NegativeSpans, want)
	}
	c[1].StageNS = nil // one device runs one step at a time
	if l := Merge(ps, clocks()); l.NegativeSpans != 1 {
		t.Errorf("%d negative spans where a device ran two steps at the same time", l.NegativeSpans)
	}
}

func TestGoldenLine(t *testing.T) {
	line := append(Append(nil, Merge(withSteps(), clocks())), '\n')
	if !json.Valid(line) {
		t.Fatalf("no JSON: %s", line)
	}
	path := filepath.Join("testdata", "generation_first.json")
	if *update {
		os.MkdirAll("testdata", 0o755)
		os.WriteFile(path, line, 0o644)
	}
	want, err := os.ReadFile(path)
	if err != nil || string(line) != string(want) {
		t.Errorf("%v\n%s\nwant\n%s", err, line, want)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Append(nil, Merge(withSteps(), clocks())))
	f.Add(Append(nil, Merge(withSteps(), drifting())))
	f.Add(before(f))
	f.Add([]byte(`{"schema":"meridian.timeline/1","phases":[null,{"clock":{"state":"none"},"stamps_ns":[[null,3],null,[1,2,3]],"tokens":[1],"chunks":{"a":[1,2],"b":[]}},{"clock":["a.b","synced",1,2,null,3,4,"x",5],"chunks":[[1],[2],[3],[4],[5],[6],[7,8],[9]]},{"clock":["a.b","none"]}]}`))
	f.Add([]byte(`{"schema":"meridian.timeline/1","spans":{"node":[0,[1,0],"a>b"],"name":["x","y","z","w"],"gap_ns":[-1,0,9]},"attempts":[{}],"decision":{"candidates":{"score":[1,2],"node":["a"],"load_age_ns":[null]}}}`))
	f.Add([]byte(`{"schema":"meridian.timeline/1","router":"r","spans":{"node":[0,[1,0],"a>b"],"name":["x","y","z"],"dur_ns":[1,2,3],"gap_ns":[0,7],"bound_ns":[4,5]},"attempts":[{}],"decision":{"candidates":[["a","b"],[1,0.5],[1,2],[3,4],[null,5],[],[6,7],[8,null],[9]]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrBadLine) && !errors.Is(err, ErrSchema) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		once := Append(nil, l)
		again, err := Parse(once)
		if err != nil {
			t.Fatalf("no round trip: %v", err)
		}
		if twice := Append(nil, again); string(twice) != string(once) {
			t.Errorf("%s\nbecame\n%s", once, twice)
		}
	})
}

func BenchmarkMerge(b *testing.B) {
	ps := parts(ring())
	c := clocks()
	b.Run("merge", func(b *testing.B) {
		for b.Loop() {
			Merge(ps, c)
		}
	})
	l := Merge(ps, c)
	var buf []byte
	b.Run("append", func(b *testing.B) {
		for b.Loop() {
			buf = Append(buf[:0], l)
		}
		b.ReportMetric(float64(len(buf)), "B/line")
	})
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			Parse(buf)
		}
	})
}
