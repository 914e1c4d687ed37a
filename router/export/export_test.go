package export

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"google.golang.org/protobuf/encoding/protowire"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

func ptr(v int64) *int64 { return &v }

const (
	ms   = 1_000_000
	wall = int64(1795975770303476405)
)

// vector is TensorRT-LLM's acceptance vector: its span k lasts k ms, from 1000.000 s.
func vector() *timeline.Line {
	at := func(list ...any) (out []timeline.Stamp) {
		for i := 0; i < len(list); i += 2 {
			v := int64(list[i+1].(int)) * ms
			out = append(out, timeline.Stamp{Name: list[i].(string), Raw: v, Ref: &v})
		}
		return out
	}
	off := ptr(0)
	return &timeline.Line{
		Schema: timeline.Schema, RequestID: "req-1", ClientRequestID: "=mine", Router: "router0", Model: "tiny", Style: "context_first", StartNS: 1000_000_000_000, WallNS: wall,
		Outcome: phase.Finished, FinishReason: "stop", Complete: true, Streamed: true, TTFTNS: ptr(78 * ms), E2ENS: ptr(200 * ms), UnaccountedNS: ptr(0), MaxBoundNS: ptr(900),
		Tokens: phase.Tokens{Prompt: 7, Cached: 2, Output: 3}, Handover: &timeline.Handover{Bytes: 99},
		Spans: []timeline.Span{
			{Name: "router_receive", Node: "router0", DurNS: ms}, {Name: "ctx_dispatch", Node: "router0>ctx0", StartNS: ms, DurNS: 2 * ms, BoundNS: 900},
			{Name: "prefill", Node: "ctx0", StartNS: 3 * ms, DurNS: 4 * ms}, {Name: "prefill", Node: "ctx0", StartNS: 7 * ms, DurNS: 5 * ms}, {Name: "relay", Node: "router0", StartNS: 12 * ms, DurNS: -5},
		},
		Phases: []timeline.Phase{
			{Role: phase.Disagg, Node: "router0", Stamps: at("receive_ns", 0, "first_token_ns", 78)},
			{Role: phase.Ctx, Node: "ctx0", Disagg: 1450704281600000, Stamps: at("receive_ns", 1, "queued_ns", 3, "first_scheduled_ns", 6, "first_token_ns", 10, "end_ns", 15)},
			{Role: phase.Gen, Node: "gen0", Disagg: 1450704281600000, Bytes: 99, Clock: timeline.PhaseClock{OffsetNS: off, BoundNS: off},
				Stamps:   at("receive_ns", 21, "admitted_ns", 28, "first_scheduled_ns", 55, "first_token_ns", 66, "first_token_sent_ns", 66, "last_token_ns", 200),
				Transfer: at("start_ns", 36, "installed_ns", 45),
				Steps:    &timeline.Columns{Names: []string{"iter", "forward_start_ns", "sample_end_ns", "batch_size"}, Values: [][]int64{{5, 6}, {70 * ms, 80 * ms}, {75 * ms, 85 * ms}, {3, 4}}}},
		},
	}
}

func export(t *testing.T, format string, lines ...*timeline.Line) string {
	t.Helper()
	var b bytes.Buffer
	e, err := New(format, &b)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if err := e.Line(l); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTheTwelveSpansOfTheAcceptanceVector(t *testing.T) {
	got := Breakdown(vector())
	for k, name := range spanNames {
		if got[name] != int64(k+1)*ms {
			t.Errorf("%s lasts %d ns, want %d ms", name, got[name], k+1)
		}
	}
	if len(got) != 12 {
		t.Errorf("%d spans", len(got))
	}
	l := vector()
	l.Phases[1].Stamps[0].Ref = nil
	if _, ok := Breakdown(l)["disagg_preprocessing"]; ok {
		t.Error("a span is given whose end is not aligned")
	}
}

func TestTheRecordThatTheBreakdownToolReads(t *testing.T) {
	var r struct {
		CtxServer string      `json:"ctx_server"`
		Arrival   json.Number `json:"disagg_server_arrival_time"`
		First     json.Number `json:"disagg_server_first_token_time"`
		ID        int64       `json:"disagg_request_id"`
		Gen       struct {
			PerfMetrics struct {
				Timing map[string]json.Number `json:"timing_metrics"`
			} `json:"perf_metrics"`
		} `json:"gen_perf_metrics"`
	}
	if err := json.Unmarshal([]byte(export(t, "trtllm", vector())), &r); err != nil {
		t.Fatal(err)
	}
	tm := r.Gen.PerfMetrics.Timing
	if r.CtxServer != "ctx0" || r.Arrival != "1000.000000000" || r.First != "1000.078000000" || r.ID != 1450704281600000 || tm["server_arrival_time"] != "1000.021000000" ||
		tm["kv_cache_transfer_end"] != "1000.045000000" || tm["server_first_token_time"] != "1000.066000000" || tm["kv_cache_size"] != "99" {
		t.Errorf("%+v", r)
	}
	failed := vector()
	failed.Outcome = phase.Failed
	if got := export(t, "trtllm", failed); got != "" {
		t.Errorf("a failed request is written: %s", got)
	}
}

func TestTheBreakdownIsOfTheLegsThatBeganTheAnswer(t *testing.T) {
	l := vector()
	l.Phases[0].Disagg, l.Phases[1].Disagg = 2, 2
	beside := l.Phases[1] // a context node that was begun first, and did not serve
	beside.Node, beside.Disagg, beside.Stamps = "ctx9", 1, nil
	resumed := l.Phases[2] // a generation node that went on with the answer
	resumed.Node, resumed.Attempt, resumed.Stamps = "gen9", 1, nil
	l.Phases = []timeline.Phase{l.Phases[0], beside, l.Phases[1], l.Phases[2], resumed}
	for _, p := range l.Phases[1:] {
		l.Attempts = append(l.Attempts, timeline.Attempt{Role: p.Role, Node: p.Node, Attempt: p.Attempt, Outcome: phase.Finished})
	}
	if got := Breakdown(l); len(got) != 12 {
		t.Errorf("%v", got)
	}
	if got := export(t, "trtllm", l); !strings.Contains(got, `"ctx_server":"ctx0","gen_server":"gen0"`) {
		t.Errorf("%s", got)
	}
}

func TestChromeEventsAreJSONWithExactTimes(t *testing.T) {
	other := vector()
	other.RequestID = `re"q-2`
	var f struct {
		Events []struct {
			Ph, Name string
			Pid, Tid int
			Ts, Dur  json.Number
			Args     map[string]any
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal([]byte(export(t, "chrome", vector(), other)), &f); err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, e := range f.Events {
		count[e.Ph]++
		count[e.Ph+" "+e.Name]++
		if e.Ph == "X" && e.Name == "ctx_dispatch" && (e.Ts != "1795975770304476.405" || e.Dur != "2000.000" || e.Args["hop"] != "router0>ctx0") {
			t.Errorf("%+v", e)
		}
		if e.Ph == "X" && e.Name == "relay" && (e.Dur != "0.000" || e.Args["negative_dur_ns"] != -5.0) {
			t.Errorf("a negative span: %+v", e)
		}
	}
	// Iterations are shared by the requests of a batch; three arrows a request: to the network, to ctx0, and back.
	if count["X decode step"] != 2 || count["X"] != 12 || count["s"] != 6 || count["f"] != 6 || count["M process_name"] != 4 {
		t.Errorf("%v", count)
	}
	if err := json.Unmarshal([]byte(withRows(t, "chrome")), &f); err != nil {
		t.Fatal(err)
	}
	var counts []string
	for _, e := range f.Events {
		if e.Ph == "C" {
			ts, err := e.Ts.Float64()
			if err != nil {
				t.Fatal(err)
			}
			counts = append(counts, fmt.Sprintf("%s %.0f: %v", e.Name, (ts-float64(wall)/1e3)/1e3, e.Args["value"]))
		}
	}
	if !reflect.DeepEqual(counts, counted) {
		t.Errorf("counters %q, want %q", counts, counted)
	}
	if !json.Valid([]byte(export(t, "chrome"))) {
		t.Error("no requests make no JSON")
	}
}

func TestEachStageOfEachRankHasATrack(t *testing.T) {
	one, two := vector(), vector()
	for rank, l := range []*timeline.Line{one, two} {
		p := &l.Phases[2]
		p.DPRank = &rank
		p.Steps.Names = append(p.Steps.Names, "forward_end_ns", "stage0_end_ns", "stage1_start_ns")
		p.Steps.Values = append(p.Steps.Values, []int64{74 * ms, 84 * ms}, []int64{72 * ms, 82 * ms}, []int64{73 * ms, 83 * ms})
	}
	var y layout
	var got []string
	for _, s := range append(y.slices(one), y.slices(two)...) {
		if strings.HasPrefix(s.track, "engine") {
			got = append(got, fmt.Sprintf("%s %s %d+%d", s.process, s.track, (s.start-wall)/ms, s.dur/ms))
		}
	}
	var want []string
	for rank := range 2 { // the same iterations, and others: they are another rank's
		for _, at := range []int{70, 80} {
			want = append(want, fmt.Sprintf("gen0 engine rank %d stage 0 %d+2", rank, at), fmt.Sprintf("gen0 engine rank %d stage 1 %d+2", rank, at+3))
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestTheIterationsOfAProcessThatBeganAnewAreDrawn(t *testing.T) {
	before, after := vector(), vector()
	before.Phases[2].Clock.ID, after.Phases[2].Clock.ID = "gen.1", "gen.2"
	var y layout
	y.slices(before)
	drawn := 0
	for _, s := range y.slices(after) {
		if s.track == "engine" {
			drawn++
		}
	}
	if drawn != 2 {
		t.Errorf("%d iterations are drawn of a process whose numbers another had before, want 2", drawn)
	}
}

func TestAnExportKeepsNoTextOfItsLines(t *testing.T) {
	const lines, each = 200, 64 << 10
	for _, format := range Formats() {
		x, err := New(format, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		before := liveHeap()
		for i := range lines {
			l := vector()
			l.RequestID, l.ClientRequestID, l.Phases[2].Steps.Values[0][0] = fmt.Sprintf("req-%d", i), strings.Repeat("x", each), int64(10*i)
			parsed, err := timeline.Parse(timeline.Append(nil, l))
			if err != nil {
				t.Fatal(err)
			}
			parsed.ClientRequestID = ""
			if err := x.Line(parsed); err != nil {
				t.Fatal(err)
			}
		}
		if kept := liveHeap() - before; kept > lines*each/4 {
			t.Errorf("%s keeps %d bytes of %d lines", format, kept, lines)
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// fields parses one message into field number -> values.
func fields(t *testing.T, b []byte) map[protowire.Number][]any {
	t.Helper()
	out := map[protowire.Number][]any{}
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		b = b[n:]
		var v any
		switch typ {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			v, n = protowire.ConsumeFixed64(b)
		case protowire.BytesType:
			v, n = protowire.ConsumeBytes(b)
		default:
			t.Fatalf("wire type %d", typ)
		}
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		out[num] = append(out[num], v)
		b = b[n:]
	}
	return out
}

// counted is what withRows tells in numbers, at ms after the request's start.
var counted = []string{"clock bound (ns) 21: 0", "batch 70: 3", "batch 80: 4", "KV blocks used 30: 7", "requests waiting 30: 2", "requests running 30: 3"}

// withRows exports the vector and a row of gen0, of a moment 30 ms after the request's start by the router's clock.
func withRows(t *testing.T, format string) string {
	t.Helper()
	var b strings.Builder
	x, err := New(format, &b)
	if err != nil {
		t.Fatal(err)
	}
	l := vector()
	l.Phases[2].Clock.ID, l.Phases[2].Clock.OffsetNS = "gen.1", ptr(-5*ms)
	if err := x.Line(l); err != nil {
		t.Fatal(err)
	}
	at := l.StartNS + 30*ms - *l.Phases[2].Clock.OffsetNS
	for _, clockID := range []string{string(l.Phases[2].Clock.ID), "of no line"} {
		r := rows.Row{StartNS: at, Requests: rows.Requests{Active: 3, Queued: 2}, KV: rows.KV{Sampled: true, Used: 7}}
		if err := x.(Joiner).Row(&rows.Static{Node: "gen0", ClockID: clockID}, &r); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestRowsAndWindowsOfARankAreOnItsOwnClock: the rank is a process, of whose clock the node's own says nothing.
func TestRowsAndWindowsOfARankAreOnItsOwnClock(t *testing.T) {
	l := vector()
	p := &l.Phases[2]
	p.Clock.ID, p.Clock.OffsetNS, p.Clock.BoundNS, p.Clock.SkewPPB = "gen.1", ptr(-5*ms), ptr(700), 1000
	p.Clock.AtNS = l.StartNS
	p.Rank = &timeline.RankClock{ID: "rank.1", State: clock.Synced, OffsetNS: -77_000 * ms, BoundNS: 70}
	const later = 30 * ms
	node := p.Clock.AtNS + 5*ms + later // what the node's clock shows, but for the skew
	var y layout
	y.slices(l)
	want := base(l) + later + (later+5*ms)/1_000_000
	for _, id := range []string{"rank.1", ""} {
		r := rows.Row{StartNS: node, RankClock: id}
		if id != "" {
			r.StartNS -= p.Rank.OffsetNS
		}
		list := y.row(&rows.Static{Node: "gen0", ClockID: "gen.1"}, &r)
		if len(list) == 0 || list[0].at != want {
			t.Errorf("clock %q: %+v, want them %d later", id, list, want-base(l))
		}
	}
	got, err := y.window(&Window{Node: "gen0", Clock: "rank.1", slices: []windowSlice{{startNS: node - p.Rank.OffsetNS}}})
	if err != nil || got[0].start != want || got[0].bound != 770 {
		t.Errorf("%+v, %v", got, err)
	}
	p.Rank.State = "none"
	y = layout{}
	y.slices(l)
	if list := y.row(&rows.Static{Node: "gen0", ClockID: "gen.1"}, &rows.Row{StartNS: node, RankClock: "rank.1"}); len(list) > 0 {
		t.Errorf("placed without an estimate: %+v", list)
	}
}

// aWindow is the trace of a profile window of gen0, whose forward began 40 ms after the request by the router's clock.
func aWindow(clockID string, at int64) string {
	return fmt.Sprintf(`{"displayTimeUnit":"ms","metadata":{"complete":true,"schema":"meridian.trace/1","node":"gen0","rank":0,"clock_id":%q},"traceEvents":[
{"ph":"M","pid":0,"tid":5,"name":"thread_name","args":{"name":"device forward"}},
{"ph":"b","cat":"request","pid":0,"id":"1","name":"request 1","ts":1,"args":{}},
{"ph":"X","pid":0,"tid":5,"name":"forward iter 9","ts":%d.%03d,"dur":1.5,"args":{"iter":9,"batch":3}}]}`, clockID, at/1000, at%1000)
}

func TestAProfileWindowIsDrawnInTheClustersTime(t *testing.T) {
	l := vector()
	clk := &l.Phases[2].Clock
	clk.ID, clk.OffsetNS, clk.BoundNS = "gen.1", ptr(-5*ms), ptr(700)
	at := l.StartNS + 40*ms + 7 - *clk.OffsetNS
	for _, format := range []string{"chrome", "perfetto"} {
		var b strings.Builder
		x, err := New(format, &b)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Line(l); err != nil {
			t.Fatal(err)
		}
		w, err := ReadWindow(strings.NewReader(aWindow("gen.1", at)))
		if err != nil {
			t.Fatal(err)
		}
		before := b.Len()
		if err := x.(Joiner).Window(w); err != nil {
			t.Fatal(err)
		}
		unknown, err := ReadWindow(strings.NewReader(aWindow("of.no.line", at)))
		if err != nil {
			t.Fatal(err)
		}
		if err := x.(Joiner).Window(unknown); !errors.Is(err, ErrClock) {
			t.Errorf("%s, a clock of no line: %v", format, err)
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		if got := b.String()[before:]; !strings.Contains(got, "profile: device forward") || !strings.Contains(got, "forward iter 9") || strings.Contains(got, "request 1") {
			t.Errorf("%s: %s", format, got)
		}
		if want := fmt.Sprintf(`"ts":%d.%03d,"dur":1.500`, (wall+40*ms+7)/1000, (wall+40*ms+7)%1000); format == "chrome" && !strings.Contains(b.String(), want) {
			t.Errorf("not at %s: %s", want, b.String())
		}
	}
	for name, text := range map[string]string{
		"no JSON": "{", "another trace": `{"traceEvents":[]}`, "no clock": aWindow("", at), "a time that is none": strings.Replace(aWindow("c", at), `"dur":1.5`, `"dur":1e300`, 1),
		"an end before its start": strings.Replace(aWindow("c", at), `"dur":1.5`, `"dur":-1`, 1),
	} {
		if _, err := ReadWindow(strings.NewReader(text)); !errors.Is(err, ErrWindow) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadWindow(f *testing.F) {
	f.Add(aWindow("gen.1", 1000_000_000_007))
	f.Fuzz(func(t *testing.T, text string) {
		w, err := ReadWindow(strings.NewReader(text))
		if err != nil {
			if !errors.Is(err, ErrWindow) {
				t.Fatal(err)
			}
			return
		}
		l := vector()
		l.Phases[2].Clock.ID = w.Clock
		x, _ := New("chrome", io.Discard)
		if err := errors.Join(x.Line(l), x.(Joiner).Window(w), x.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestPerfettoPacketsParseBack(t *testing.T) {
	tracks := map[uint64]string{}
	open := map[uint64]int{}
	flows := map[uint64]int{}
	var names, counts []string
	for _, raw := range fields(t, []byte(withRows(t, "perfetto")))[tracePacket] {
		p := fields(t, raw.([]byte))
		if d := p[packetDescriptor]; d != nil {
			f := fields(t, d[0].([]byte))
			name := ""
			if f[trackName] != nil {
				name = string(f[trackName][0].([]byte))
			}
			tracks[f[trackUUID][0].(uint64)] = name
			continue
		}
		e := fields(t, p[packetTrackEvent][0].([]byte))
		track := e[eventTrack][0].(uint64)
		if _, ok := tracks[track]; !ok {
			t.Error("an event on a track that was not declared before")
		}
		switch e[eventType][0].(uint64) {
		case sliceEnd:
			open[track]--
			continue
		case countEvent:
			counts = append(counts, fmt.Sprintf("%s %d: %d", tracks[track], (p[packetTimestamp][0].(uint64)-uint64(wall))/uint64(ms), e[eventCounter][0]))
			continue
		}
		open[track]++
		names = append(names, string(e[eventName][0].([]byte)))
		for _, f := range e[eventFlows] {
			flows[f.(uint64)]++
		}
		if names[len(names)-1] == "ctx_dispatch" && p[packetTimestamp][0].(uint64) != uint64(wall+ms) {
			t.Errorf("timestamp %v", p[packetTimestamp])
		}
	}
	for track, n := range open {
		if n != 0 {
			t.Errorf("track %q has %d slices that do not end", tracks[track], n)
		}
	}
	for id, n := range flows {
		if n != 2 {
			t.Errorf("flow %d has %d ends, want 2", id, n)
		}
	}
	if want := counted; !reflect.DeepEqual(counts, want) {
		t.Errorf("counters %q, want %q", counts, want)
	}
	if want := "router_receive ctx_dispatch prefill prefill relay decode step decode step"; strings.Join(names, " ") != want || len(flows) != 3 {
		t.Errorf("slices %v, %d flows", names, len(flows))
	}
}

// TestArrowsOfManyRequestsAreApart takes two requests whose arrows share 31 bits.
func TestArrowsOfManyRequestsAreApart(t *testing.T) {
	seen, a, b := map[uint64]string{}, vector(), vector()
	for i := 0; ; i++ {
		id := fmt.Sprint("req-", i)
		h := hash(id, a.Spans[0].Name) & 0x7fffffff
		if first, ok := seen[h]; ok {
			a.RequestID, b.RequestID = first, id
			break
		}
		seen[h] = id
	}
	var f struct {
		Events []struct {
			Ph string
			ID int64
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal([]byte(export(t, "chrome", a, b)), &f); err != nil {
		t.Fatal(err)
	}
	began := map[int64]int{}
	for _, e := range f.Events {
		if e.Ph == "s" {
			if began[e.ID]++; began[e.ID] > 1 || e.ID >= 1<<53 {
				t.Errorf("%d arrows have the number %d", began[e.ID], e.ID)
			}
		}
	}
}

func TestCSVHasARowARequest(t *testing.T) {
	rows, err := csv.NewReader(strings.NewReader(export(t, "csv", vector(), &timeline.Line{RequestID: "x"}))).ReadAll()
	if err != nil || len(rows) != 3 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	cell := func(row int, col string) string {
		for i, name := range rows[0] {
			if name == col {
				return rows[row][i]
			}
		}
		return "no column " + col
	}
	for col, want := range map[string]string{"request_id": "req-1", "client_request_id": "'=mine", "ttft_ns": "78000000", "prefill_ns": "9000000", "queue_ns": "", "kv_bytes": "99"} {
		if got := cell(1, col); got != want {
			t.Errorf("%s is %q, want %q", col, got, want)
		}
	}
	for _, col := range []string{"ttft_ns", "wall_ns"} {
		if got := cell(2, col); got != "" {
			t.Errorf("%s is absent, and %q", col, got)
		}
	}
}

// TestEverySpanHasAColumn compares with the names that the merge can give.
func TestParquetGivesBackEveryRow(t *testing.T) {
	full, bare := vector(), &timeline.Line{Schema: timeline.Schema, RequestID: "bare"}
	full.Error, full.CriticalSpan = &phase.Error{Stage: "kv", Message: "gone"}, "prefill"
	out := export(t, "parquet", full, bare)
	rows, err := parquet.Read[request](strings.NewReader(out), int64(len(out)))
	if err != nil || len(rows) != 2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	want := []request{rowOf(full), rowOf(bare)}
	if !reflect.DeepEqual(rows[0], want[0]) {
		t.Errorf("%+v\nwant\n%+v", rows[0], want[0])
	}
	if rows[1].TTFTNS != nil || rows[1].KVBytes != nil || rows[1].ErrorStage != nil || len(rows[1].Spans) != 0 {
		t.Errorf("what is absent is not null: %+v", rows[1])
	}
}

func TestEverySpanHasAColumn(t *testing.T) {
	for _, name := range timeline.SpanNames() {
		if !strings.Contains(" "+strings.Join(spanColumns, " ")+" ", " "+name+" ") {
			t.Errorf("span %s has no column", name)
		}
	}
}

// verbatim is JSON that is only compared.
type verbatim string

func (x *verbatim) UnmarshalJSON(b []byte) error {
	*x = verbatim(b)
	return nil
}

// otlpSpan is a span as a collector reads it.
type otlpSpan struct {
	TraceID    string `json:"traceId"`
	SpanID     string `json:"spanId"`
	ParentID   string `json:"parentSpanId"`
	Name       string
	Start      json.Number `json:"startTimeUnixNano"`
	End        json.Number `json:"endTimeUnixNano"`
	Attributes verbatim
}

func otlpSpans(t *testing.T, text string) (spans []otlpSpan) {
	t.Helper()
	for line := range strings.Lines(text) {
		list, err := decodeSpans([]byte(line))
		if err != nil {
			t.Fatalf("%v\n%s", err, line)
		}
		spans = append(spans, list...)
	}
	return spans
}

func decodeSpans(b []byte) (spans []otlpSpan, err error) {
	var r struct {
		ResourceSpans []struct {
			ScopeSpans []struct{ Spans []otlpSpan }
		}
	}
	err = json.Unmarshal(b, &r)
	for _, rs := range r.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			spans = append(spans, ss.Spans...)
		}
	}
	return spans, err
}

func TestOTLPIsOneTreeARequest(t *testing.T) {
	l := vector()
	l.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	spans := otlpSpans(t, export(t, "otlp", l))
	if len(spans) != 6 || spans[0].ParentID != "b7ad6b7169203331" {
		t.Fatalf("%+v", spans)
	}
	seen := map[string]bool{}
	for _, s := range spans {
		if s.TraceID != "0af7651916cd43dd8448eb211c80319c" || len(s.SpanID) != 16 || seen[s.SpanID] {
			t.Errorf("ids of %+v", s)
		}
		seen[s.SpanID] = true
		if s.Start < spans[0].Start || s.End > spans[0].End || s.End < s.Start {
			t.Errorf("%s lies outside its parent", s.Name)
		}
		if s.Name != "chat tiny" && s.ParentID != spans[0].SpanID {
			t.Errorf("%s has parent %q", s.Name, s.ParentID)
		}
	}
	if s := otlpSpans(t, export(t, "otlp", vector())); s[0].ParentID != "" || len(s[0].TraceID) != 32 {
		t.Errorf("without traceparent: %+v", s[0])
	}
}

func TestHostileTextStaysText(t *testing.T) {
	l := vector()
	evil := "<script>\x00\"\n\u2028,=cmd|'\xff"
	l.RequestID, l.ClientRequestID, l.Spans[0].Name, l.Spans[0].Node, l.Model, l.Traceparent, l.Error = evil, evil, evil, evil, evil, evil, &phase.Error{Message: evil}
	l.Phases[1].Node = evil
	for _, f := range Formats() {
		out := export(t, f, l)
		if f == "chrome" || f == "otlp" || f == "trtllm" {
			if !json.Valid([]byte(out)) {
				t.Errorf("%s: no JSON: %s", f, out)
			}
		}
	}
}

func TestUnknownFormatIsNamed(t *testing.T) {
	if _, err := New("pdf", nil); !errors.Is(err, ErrFormat) || !strings.Contains(fmt.Sprint(err), "perfetto") {
		t.Errorf("%v", err)
	}
}
