package ledger

import (
	"bufio"
	"encoding/json"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

func newLedger(t testing.TB, o Options) *Ledger {
	t.Helper()
	l := New(o)
	if err := l.Start(Engine{Static: rows.Static{Node: "n", ClockID: "c", MaxBatchSize: 8}, Model: "tiny", Device: "sim", Blocks: 50,
		Load: func() infer.Load { return infer.Load{Running: 3, KVUsedBlocks: 5, KVMaxBlocks: 50} }}); err != nil {
		t.Fatal(err)
	}
	return l
}

func get(l *Ledger, target, accept string) *httptest.ResponseRecorder {
	e := echo.New()
	l.Routes(e)
	r := httptest.NewRequest(http.MethodGet, target, nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	e.ServeHTTP(w, r)
	return w
}

type answer struct {
	Enabled               bool
	Rows                  []struct{ Seq, Iter int64 }
	Next, Oldest, Dropped int64
	ClockID               string `json:"clock_id"`
}

func TestIterationStatsAreReadWithACursor(t *testing.T) {
	l := newLedger(t, Options{Keep: 5, Sink: rows.Sink{Interval: 1}})
	for i := range int64(8) {
		l.Put(&rows.Row{Iter: 100 + i})
	}
	for _, tt := range []struct {
		query                       string
		rows                        int
		first, next, oldest, missed int64
	}{
		{"", 5, 4, 8, 4, 3}, {"?after=5", 3, 6, 8, 4, 0}, {"?after=5&limit=2", 2, 6, 7, 4, 0}, {"?after=8", 0, 0, 8, 4, 0}, {"?after=99", 0, 0, 99, 4, 0},
	} {
		var a answer
		if err := json.Unmarshal(get(l, "/iteration_stats"+tt.query, "").Body.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
		if !a.Enabled || a.ClockID != "c" || len(a.Rows) != tt.rows || a.Next != tt.next || a.Oldest != tt.oldest || a.Dropped != tt.missed || tt.rows > 0 && (a.Rows[0].Seq != tt.first || a.Rows[0].Iter != 99+tt.first) {
			t.Errorf("%q: %+v", tt.query, a)
		}
	}
	off := newLedger(t, Options{Keep: 5})
	if got := strings.TrimSpace(get(off, "/iteration_stats?after=7", "text/event-stream").Body.String()); got != `{"enabled":false,"rows":[],"next":7,"oldest":0,"newest":0,"dropped":0}` {
		t.Errorf("disabled: %s", got)
	}
}

func TestAnAnswerHoldsTheRowsOfAllRanks(t *testing.T) {
	l := New(Options{Keep: 3, Sink: rows.Sink{Interval: 1}})
	if err := l.Start(Engine{Ranks: 4}); err != nil {
		t.Fatal(err)
	}
	for i := range int64(20) {
		l.Put(&rows.Row{Iter: 1 + i/4, Rank: i % 4})
	}
	for query, want := range map[string]int{"": 12, "?limit=100": 12, "?limit=5": 5} {
		var a answer
		if err := json.Unmarshal(get(l, "/iteration_stats"+query, "").Body.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
		if len(a.Rows) != want {
			t.Errorf("%q: %d rows of 3 iterations of 4 ranks, want %d", query, len(a.Rows), want)
		}
	}
}

func TestRowsAreFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t, Options{Keep: 3, Sink: rows.Sink{Interval: 1}})
		for range 5 {
			l.Put(new(rows.Row))
		}
		body := make(chan string)
		go func() { body <- get(l, "/iteration_stats", "text/event-stream").Body.String() }()
		synctest.Wait()
		l.Put(new(rows.Row))
		synctest.Wait()
		l.Close()
		var seen []string
		for in := bufio.NewScanner(strings.NewReader(<-body)); in.Scan(); {
			line := in.Text()
			if strings.HasPrefix(line, "id: ") || strings.Contains(line, "dropped\"") {
				seen = append(seen, line)
			}
		}
		if got := strings.Join(seen, " "); got != `data: {"dropped":2} id: 3 id: 4 id: 5 id: 6` {
			t.Errorf("followed %s", got)
		}
	})
}

func TestRowsArePublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t, Options{Keep: 3, Sink: rows.Sink{Interval: 1}})
		n := 0
		done := make(chan error)
		go func() { done <- l.Publish(t.Context(), func([]byte) error { n++; return nil }) }()
		synctest.Wait()
		l.Put(new(rows.Row))
		synctest.Wait()
		l.Put(new(rows.Row))
		l.Close()
		if err := <-done; err != nil || n != 2 {
			t.Errorf("%d rows published, %v", n, err)
		}
	})
}

func ns(v int64) *int64 { return &v }

func series(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				out[f.GetName()] += m.GetCounter().GetValue()
			case dto.MetricType_GAUGE:
				out[f.GetName()] += m.GetGauge().GetValue()
			case dto.MetricType_HISTOGRAM:
				out[f.GetName()] += float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return out
}

func TestMetricsSumRowsAndRecords(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := newLedger(t, Options{Keep: 3, VLLM: true, Registry: reg, Sink: rows.Sink{Interval: 1}})
	if len(series(t, reg)) == 0 {
		t.Error("no series before the first row")
	}
	for i, total := range []int64{10, 25, 5, 9} { // the third is of a pool that began anew
		r := rows.Row{Requests: rows.Requests{New: 2, Completed: 1, Active: int64(i)}, Sums: rows.Sums{Prompt: 10, Cached: 4, Output: 7}}
		r.KV = rows.KV{Sampled: true, Max: 50, Used: 20, Reused: total, Missed: 3}
		r.Batch.Scheduled = rows.Some(4)
		l.Put(&r)
	}
	l.Put(&rows.Row{Drain: true})
	var g Tokens
	g.Add([]infer.Token{{AtNS: 1e9}, {AtNS: 1_003_000_000}})
	g.Add([]infer.Token{{AtNS: 1_005_000_000}, {AtNS: 99e9}})
	rec := phase.Record{Outcome: phase.Finished, FinishReason: "stop", Tokens: phase.Tokens{Prompt: 12, Cached: 4, Output: 4}, Stamps: phase.Stamps{
		ReceiveNS: ns(900e6), FirstScheduledNS: ns(950e6), FirstTokenNS: ns(1e9), LastTokenNS: ns(99e9)}}
	l.Observe(&rec, Ended{Tokens: &g})
	failed := phase.Record{Outcome: phase.Failed, Error: &phase.Error{Type: "server_error"}}
	l.Observe(&failed, Ended{Code: 502})
	probe := rec
	probe.Probe = true
	l.Observe(&probe, Ended{Tokens: &g})
	got := series(t, reg)
	for name, want := range map[string]float64{
		"meridian_num_requests_new_total": 8, "meridian_num_requests_completed_total": 4, "meridian_kv_cache_reused_blocks_total": 29,
		"meridian_kv_cache_utilization": 0.4, "meridian_iter_output_tokens_total": 28, "meridian_scheduled_batch_size": 4,
		"meridian_prefill_batch_tokens": 0, "meridian_num_requests_running": 0, "meridian_request_success_total": 1,
		"meridian_request_error_total": 1, "meridian_time_to_first_token_seconds": 1, "meridian_request_prefill_time_seconds": 0,
		"meridian_inter_token_latency_seconds": 3, "meridian_generation_tokens_total": 4, "meridian_kv_cache_config_info": 1,
		"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0.1, "vllm:cache_config_info": 1,
		"vllm:time_to_first_token_seconds": 1, "vllm:inter_token_latency_seconds": 3, "vllm:e2e_request_latency_seconds": 1,
		"vllm:prompt_tokens_total": 12, "vllm:generation_tokens_total": 4, "vllm:prefix_cache_queries_total": 40, "vllm:prefix_cache_hits_total": 16,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (%v), want %v", name, v, ok, want)
		}
	}
}

// TestWhatARequestTells: the status that goes with an error is a label; perplexity counts every token of a request that asked
// for log probabilities, also those of which the model was certain; a hand-over has a speed if it took time.
func TestWhatARequestTells(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := newLedger(t, Options{Registry: reg})
	var told, silent Tokens
	told.Add([]infer.Token{{AtNS: 1, Logprob: -2}, {AtNS: 2}, {AtNS: 3, Logprob: -1}}) // e^(3/3)
	silent.Add([]infer.Token{{AtNS: 1}, {AtNS: 2}})
	rec := phase.Record{Outcome: phase.Finished, FinishReason: "stop", Transfer: &phase.Transfer{Bytes: 1000, StartNS: ns(1), LastByteNS: ns(500_000_001)}}
	l.Observe(&rec, Ended{Tokens: &told})
	rec.Transfer = &phase.Transfer{Bytes: 1000, StartNS: ns(1), LastByteNS: ns(1)}
	l.Observe(&rec, Ended{Tokens: &silent})
	l.Observe(&phase.Record{Outcome: phase.Rejected, Error: &phase.Error{Type: "overloaded_error"}}, Ended{Code: 503})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, f := range families {
		m := f.GetMetric()[0]
		switch f.GetName() {
		case "meridian_generation_perplexity":
			if h := m.GetHistogram(); h.GetSampleCount() != 1 || math.Abs(h.GetSampleSum()-math.E) > 1e-6 {
				t.Errorf("perplexity: %v", h)
			}
		case "meridian_kv_transfer_speed_bytes_per_second":
			if h := m.GetHistogram(); h.GetSampleCount() != 1 || h.GetSampleSum() != 2000 {
				t.Errorf("speed: %v", h)
			}
		case "meridian_request_error_total":
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["http_code"] != "503" || labels["error_type"] != "overloaded_error" || m.GetCounter().GetValue() != 1 {
				t.Errorf("errors: %v", m)
			}
		default:
			continue
		}
		found++
	}
	if found != 3 {
		t.Errorf("%d of 3 metrics are there", found)
	}
}

func TestMetricsAreClean(t *testing.T) {
	for _, vllm := range []bool{false, true} {
		reg := prometheus.NewRegistry()
		l := newLedger(t, Options{Keep: 3, VLLM: vllm, Registry: reg, Sink: rows.Sink{Interval: 1}})
		l.Put(&rows.Row{KV: rows.KV{Sampled: true, Max: 1}})
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			if !vllm || !strings.HasPrefix(p.Metric, vllmPrefix) || !strings.Contains(p.Text, "':'") {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	}
}

func TestGapsFallIntoTheirBuckets(t *testing.T) {
	for i, limit := range tokenBuckets() {
		if want := int64(limit*1e9 + 0.5); gapLimits[i] != want {
			t.Errorf("limit %d is %d, want %d", i, gapLimits[i], want)
		}
	}
	var g Tokens
	at := int64(1)
	for _, gap := range []int64{1, 1e5, 1e5 + 1, 1e10, 1e10 + 1, 1, 2e6} {
		g.Add([]infer.Token{{AtNS: at}})
		at += gap
	}
	g.Add([]infer.Token{{AtNS: at}})
	g.settle()
	want := [gapBuckets + 1]uint32{0: 3, 1: 1, 4: 1, 20: 1, 21: 1}
	if sum := g.lastNS - g.firstNS; g.counts != want || sum != 1+1e5+1e5+1+1e10+1e10+1+1+2e6 {
		t.Errorf("counts %v, sum %d", g.counts, sum)
	}
}

// BenchmarkStep is what the ledger adds to a step of 256 sequences: its row, kept and counted, and the gap of each
// sequence's tokens; then what a request costs when it ends, of which one of 400 tokens pays a 400th each step: its record
// counted and its steps encoded.
func BenchmarkStep(b *testing.B) {
	const batch, tokens = 256, 400
	l := newLedger(b, Options{Keep: 1000, VLLM: true, Registry: prometheus.NewRegistry(), Sink: rows.Sink{Interval: 1}})
	row := rows.Row{KV: rows.KV{Sampled: true, Max: 1}}
	row.Batch.Scheduled, row.Batch.CtxTokens = rows.Some(batch), rows.Some(100)
	var gaps [batch]Tokens
	one := make([]infer.Token, 1)
	rec := phase.Record{Outcome: phase.Finished, FinishReason: "stop", Tokens: phase.Tokens{Prompt: 12, Cached: 4, Output: tokens}, Stamps: phase.Stamps{
		ReceiveNS: ns(900e6), FirstScheduledNS: ns(950e6), FirstTokenNS: ns(1e9), LastTokenNS: ns(99e9)}}
	steps := &infer.StepRecords{N: tokens}
	for k := 0; k < tokens; {
		p := infer.StepPage{Runs: []infer.StepRun{{N: int32(min(64, tokens-k)), Step: int32(k), KVTokens: int32(k), Tokens: 1}}}
		for range p.Runs[0].N {
			at := int64(k) * 2_000_000
			p.Append(infer.StepRow{Iter: int64(k), ForwardStartNS: at, ForwardEndNS: at + 1_912_345 + at%977, SampleEndNS: at + 1_987_654, TokenNS: at + 2_010_101 + at%991, BatchSize: batch})
			k++
		}
		steps.Pages = append(steps.Pages, p)
	}
	ended, ballast := 0, make([]byte, heapOfANode)
	b.ReportAllocs()
	from := processor()
	for b.Loop() {
		l.Put(&row)
		one[0].AtNS += 2_000_000
		for i := range gaps {
			gaps[i].Add(one)
		}
		for ended += batch; ended >= tokens; ended -= tokens {
			l.Observe(&rec, Ended{Tokens: &gaps[0]})
			phase.AppendSteps(&rec, steps)
		}
	}
	b.ReportMetric(float64(processor()-from)/float64(b.N), "ns/step")
	runtime.KeepAlive(ballast)
}

// heapOfANode is less than a node's heap: how often garbage is collected goes by it.
const heapOfANode = 64 << 20

// processor is the processor time of the process in ns: what else the machine does is not in it.
func processor() int64 {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return use.Utime.Nano() + use.Stime.Nano()
}

func TestRanksHaveSeriesOfTheirOwn(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := New(Options{Keep: 3, VLLM: true, Registry: reg, Sink: rows.Sink{Interval: 1}})
	if err := l.Start(Engine{Ranks: 2}); err != nil {
		t.Fatal(err)
	}
	for rank := range int64(2) {
		n := rank*2 + 1 // 1 and 3
		r := rows.Row{
			Rank: rank, Memory: rows.Memory{GPU: rows.Some(n)}, Requests: rows.Requests{Active: n}, Sums: rows.Sums{Output: n, Prompt: n}, Batch: rows.Batch{Scheduled: rows.Some(n)},
			KV: rows.KV{Sampled: true, Max: 10, Used: n},
		}
		if rank == 0 {
			r.Requests.New, r.Requests.Queued = 7, 5
		}
		l.Put(&r)
	}
	l.Put(&rows.Row{Rank: 0, Synthetic: true, Dropped: 6, Memory: rows.Memory{GPU: rows.Some(20), CPU: rows.Some(9)}, Requests: rows.Requests{Active: 1}, KV: rows.KV{Sampled: true, Used: 1}, Batch: rows.Batch{Scheduled: rows.Some(0)}})
	got := scrape(t, reg)
	for line, want := range map[string]float64{
		`iter_output_tokens_total{dp_rank="0",engine_type="",model_name=""}`:   1,
		`iter_output_tokens_total{dp_rank="1",engine_type="",model_name=""}`:   3,
		`num_requests_new_total{engine_type="",model_name=""}`:                 7,
		`num_requests_running{engine_type="",model_name=""}`:                   4,
		`num_requests_waiting{engine_type="",model_name=""}`:                   0,
		`iter_prompt_tokens_total{engine_type="",model_name=""}`:               4,
		`kv_cache_used_blocks{dp_rank="1",engine_type="",model_name=""}`:       3,
		`rank_imbalance_ratio{engine_type="",model_name="",of="batch"}`:        2,
		`rank_imbalance_ratio{engine_type="",model_name="",of="kv_blocks"}`:    1.5,
		`rank_rows_dropped_total{engine_type="",model_name=""}`:                6,
		`gpu_memory_usage_bytes{engine_type="",model_name=""}`:                 23,
		`cpu_memory_usage_bytes{engine_type="",model_name=""}`:                 9,
		`scheduled_batch_size_count{dp_rank="0",engine_type="",model_name=""}`: 1,
		`scheduled_batch_size_count{dp_rank="1",engine_type="",model_name=""}`: 1,
		`kv_cache_tokens_per_block{dp_rank="1",engine_type="",model_name=""}`:  0,
	} {
		if v, ok := got["meridian_"+line]; !ok || v != want {
			t.Errorf("%s is %v (there: %t), want %v", line, v, ok, want)
		}
	}
	if _, ok := got[`meridian_rank_imbalance_ratio{engine_type="",model_name="",of="tokens"}`]; ok {
		t.Error("nothing was computed, and its imbalance is told")
	}
}

// scrape gives the samples of a registry by their names and labels.
func scrape(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	out := map[string]float64{}
	for line := range strings.Lines(w.Body.String()) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil {
			out[name+"}"] = v
		}
	}
	return out
}

// TestSpansOfARankAreMeasuredOnOneClock: what a rank with a clock of its own stamped is moved before it is subtracted.
func TestSpansOfARankAreMeasuredOnOneClock(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := newLedger(t, Options{Registry: reg})
	rec := phase.Record{
		Outcome: phase.Finished, FinishReason: "stop", Stamps: phase.Stamps{EngineClock: 1, ReceiveNS: ns(1e9), FirstScheduledNS: ns(8e9), FirstTokenNS: ns(9e9), LastTokenNS: ns(11e9)},
		Clocks: []phase.Clock{{ID: "a"}, {ID: "b", Kind: "rank", Estimate: &clock.Estimate{OffsetNS: -6e9, State: clock.Synced}}},
	}
	l.Observe(&rec, Ended{})
	rec.Clocks[1].Estimate = &clock.Estimate{State: clock.Joining} // nobody knows where it was
	l.Observe(&rec, Ended{})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"meridian_time_to_first_token_seconds": 2, "meridian_request_queue_time_seconds": 1, "meridian_e2e_request_latency_seconds": 4}
	for _, f := range families {
		sum, ok := want[f.GetName()]
		if !ok {
			continue
		}
		delete(want, f.GetName())
		if h := f.GetMetric()[0].GetHistogram(); h.GetSampleCount() != 1 || h.GetSampleSum() != sum {
			t.Errorf("%s is %v of %d, want %v of 1", f.GetName(), h.GetSampleSum(), h.GetSampleCount(), sum)
		}
	}
	if len(want) > 0 {
		t.Errorf("there is no %v", want)
	}
	if *rec.Stamps.FirstTokenNS != 9e9 {
		t.Error("the record was changed")
	}
}
