package perfheader

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

func stamps(pairs ...any) (out []timeline.Stamp) {
	for i := 0; i < len(pairs); i += 2 {
		ns := int64(pairs[i+1].(int))
		out = append(out, timeline.Stamp{Name: pairs[i].(string), Ref: &ns})
	}
	return out
}

// aLine has another number in every place.
func aLine() *timeline.Line {
	return &timeline.Line{StartNS: 1_000_000_000_000_000_001, Phases: []timeline.Phase{
		{Role: phase.Disagg, Stamps: stamps("receive_ns", 0, "ctx_dispatch_ns", 1_234_567, "first_token_ns", 50_000_000)},
		{
			Role: phase.Ctx, Stamps: stamps("receive_ns", 2_000_000, "queued_ns", 3_000_000, "first_scheduled_ns", 5_000_001, "first_token_ns", 40_000_000, "first_token_sent_ns", 41_000_000),
			Chunks: &timeline.Columns{Names: []string{"iter", "forward_start_ns", "forward_end_ns", "sample_end_ns"}, Values: [][]int64{{7, 8}, {10, 2_000}, {1_010, 5_000}, {1_020, 5_500}}},
		},
		{
			Role: phase.Gen, Stamps: stamps("receive_ns", 500_000, "admitted_ns", 900_000, "first_scheduled_ns", 42_000_000, "first_token_ns", 40_000_000, "last_token_ns", 90_000_000),
			Transfer: stamps("start_ns", 6_000_000, "installed_ns", 39_500_000),
			Steps:    &timeline.Columns{Names: []string{"iter", "forward_start_ns", "forward_end_ns", "sample_end_ns"}, Values: [][]int64{{90, 91}, {0, 100}, {60, 90}, {80, 95}}},
		},
	}}
}

func TestHeadersOfALine(t *testing.T) {
	want := []Header{
		{ServerTiming, "disagg_queue;dur=1.234567, disagg_ttft;dur=50.000000, ctx_queue;dur=2.000001, ctx_ttft;dur=37.000000, ctx_e2e;dur=37.000000, gen_queue;dur=41.100000, gen_ttft;dur=39.100000, gen_e2e;dur=89.100000, gen_kv_transfer;dur=33.500000"},
		{StartEnd, "ctx-start;ts=1000000000.003000001, ctx-end;ts=1000000000.040000001, ctx-srv-start;ts=1000000000.002000001, ctx-srv-ttft;ts=1000000000.041000001, gen-start;ts=1000000000.000900001, gen-end;ts=1000000000.090000001, gen-srv-start;ts=1000000000.000500001, gen-kv-start;ts=1000000000.006000001, gen-kv-end;ts=1000000000.039500001"},
		{Steps, "gen-step-90-forward;dur=0.000060, gen-step-90-sample;dur=0.000020"}, // the second step ends before it begins
		{Chunks, "ctx-ctx-chunk-0-forward;dur=0.001000, ctx-ctx-chunk-0-sample;dur=0.000010, ctx-ctx-chunk-1-forward;dur=0.003000, ctx-ctx-chunk-1-sample;dur=0.000500"},
	}
	got := Of(aLine())
	if len(got) != len(want) {
		t.Fatalf("headers %+v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("header %d:\n got %+v\nwant %+v", i, got[i], want[i])
		}
	}
}

func TestAContextNodeBesideTheOneThatServedIsLeftOut(t *testing.T) {
	l, want := aLine(), Of(aLine())
	beside := timeline.Phase{Role: phase.Ctx, Disagg: 3, Stamps: stamps("receive_ns", 1, "queued_ns", 2, "first_scheduled_ns", 3)}
	l.Phases = append(l.Phases, beside)
	l.Attempts = []timeline.Attempt{{Role: phase.Ctx}, {Role: phase.Ctx}, {Role: phase.Gen}}
	if got := Of(l); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestWhatIsNotKnownOrNegativeIsLeftOut(t *testing.T) {
	l := aLine()
	l.Phases[1].Stamps = stamps("queued_ns", 10, "first_scheduled_ns", 9) // before its cause
	l.Phases[1].Chunks, l.Phases[2].Stamps, l.Phases[2].Transfer, l.Phases[2].Steps = nil, nil, nil, nil
	got := Of(l)
	if len(got) != 2 || got[0].Value != "disagg_queue;dur=1.234567, disagg_ttft;dur=50.000000" || got[1].Value != "ctx-start;ts=1000000000.000000011" {
		t.Errorf("headers %+v", got)
	}
	if got := Of(&timeline.Line{}); len(got) != 0 {
		t.Errorf("an empty line gives %+v", got)
	}
	l = aLine()
	again := l.Phases[2]
	again.Attempt, again.Stamps, again.Transfer, again.Steps = 1, stamps("admitted_ns", 0, "first_scheduled_ns", 1_000_000), nil, nil
	l.Phases = append(l.Phases, again)
	if v := Of(l)[0].Value; !strings.Contains(v, "gen_queue;dur=1.000000") || strings.Contains(v, "gen_queue;dur=41.1") {
		t.Errorf("of two attempts: %s", v)
	}
}

func TestEightyKiB(t *testing.T) {
	l := aLine()
	n := 4000
	for _, c := range []*timeline.Columns{l.Phases[1].Chunks, l.Phases[2].Steps} {
		for i := range c.Values {
			c.Values[i] = make([]int64, n)
		}
	}
	got := Of(l)
	if len(got) != 2 || got[0].Name != ServerTiming || got[1].Name != StartEnd {
		t.Errorf("%d headers of %d bytes; want those of steps and chunks left out", len(got), size(got))
	}
	for sub := range 2000 {
		p := l.Phases[2]
		p.Sub = sub + 1
		l.Phases = append(l.Phases, p)
	}
	if got := Of(l); len(got) != 2 || size(got) > maxBytes || size(got) < maxBytes/2 {
		t.Errorf("2,000 sub-requests give %d headers of %d bytes", len(got), size(got))
	}
}

var entry = regexp.MustCompile(`^[a-z0-9_-]+;(dur=\d+\.\d{6}|ts=\d+\.\d{9})$`)

func FuzzOf(f *testing.F) {
	f.Add(int64(0), int64(5), int64(3), int64(9))
	f.Add(int64(math.MaxInt64), int64(math.MinInt64), int64(-1), int64(1))
	f.Fuzz(func(t *testing.T, start, a, b, c int64) {
		l := aLine()
		l.StartNS = start
		for i := range l.Phases {
			for j := range l.Phases[i].Stamps {
				l.Phases[i].Stamps[j].Ref = []*int64{&a, &b, &c}[j%3]
			}
		}
		l.Phases[2].Steps.Values[1], l.Phases[2].Steps.Values[2] = []int64{a}, []int64{b}
		h := Of(l)
		for _, x := range h {
			for e := range strings.SplitSeq(x.Value, ", ") {
				if !entry.MatchString(e) {
					t.Errorf("%s: entry %q", x.Name, e)
				}
			}
		}
		ev := string(AppendEvent(nil, h))
		data, ok := strings.CutPrefix(ev, "event: trtllm.perf_metrics\ndata: ")
		m := map[string]string{}
		if err := json.Unmarshal([]byte(data), &m); !ok || err != nil || len(m) != len(h) || strings.Count(data, "\n") != 2 {
			t.Errorf("event %q: %v", ev, err)
		}
		for _, x := range h {
			if m[x.Name] != x.Value {
				t.Errorf("event holds %q, header %q", m[x.Name], x.Value)
			}
		}
	})
}

func TestClockSync(t *testing.T) {
	if got := string(AppendClockSync(nil, 1_000_050_000_000, 1_000_350_000_001)); got != "receive;ts=1000.050000000, transmit;ts=1000.350000001" {
		t.Error(got)
	}
}

func BenchmarkOf(b *testing.B) {
	l := aLine()
	b.ReportAllocs()
	for b.Loop() {
		Of(l)
	}
}

func ExampleAppendEvent() {
	fmt.Printf("%s", AppendEvent(nil, []Header{{ServerTiming, "disagg_ttft;dur=1.500000"}}))
	// Output:
	// event: trtllm.perf_metrics
	// data: {"Server-Timing":"disagg_ttft;dur=1.500000"}
}
