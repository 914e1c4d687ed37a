package stats

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

var update = flag.Bool("update", false, "write the golden files anew")

// rig is an engine on a simulated device whose rows are kept.
type rig struct {
	*engine.Engine
	t     testing.TB
	rows  []rows.Row
	start func()
	stop  func()
}

// newRig starts an engine.
func newRig(t testing.TB, o Options, cfg engine.Config, dev sim.Config) *rig {
	t.Helper()
	r := newRigAtRest(t, o, cfg, dev)
	r.start()
	return r
}

// newRigAtRest makes an engine that is yet to be started: what is submitted until then is there at its first step.
func newRigAtRest(t testing.TB, o Options, cfg engine.Config, dev sim.Config) *rig {
	t.Helper()
	r := &rig{t: t}
	start := time.Now()
	cfg.Now = func() int64 { return int64(time.Since(start)) + 1 }
	o.Put = func(row *rows.Row) {
		kept := *row
		kept.Seq = int64(len(r.rows)) + 1
		r.rows = append(r.rows, kept)
	}
	o.Wall = func() int64 { return 1_790_000_000_000_000_000 + cfg.Now() }
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	cfg.OnIteration, cfg.OnIdle = c.Iterated, c.Idled
	dev.Now = cfg.Now
	d, err := sim.New(dev)
	if err != nil {
		t.Fatal(err)
	}
	if r.Engine, err = engine.New(cfg, d); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	r.start = func() {
		run.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	r.stop = sync.OnceFunc(func() {
		cancel()
		run.Wait()
		if err := r.Check(); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func request(id int64, n, tokens int) infer.Request {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32((int64(i)*7919 + id%5*104729 + 13) % 1000)
	}
	return infer.Request{ID: id, Prompt: p, MaxTokens: tokens, IgnoreEOS: true}
}

func drain(t testing.TB, s *engine.Sequence) (tokens int, done infer.Done) {
	for {
		got, d, err := s.Next(context.Background())
		if err != nil {
			t.Error(err)
			return tokens, done
		}
		tokens += len(got)
		if d != nil {
			return tokens, *d
		}
	}
}

// TestTimesMeanWhatIsDocumented runs both modes back to back on a device whose step takes 2 ms.
func TestTimesMeanWhatIsDocumented(t *testing.T) {
	for _, tt := range []struct {
		overlap bool
		factor  float64 // sum of iterLatencyMS over wall time
	}{{false, 1}, {true, 2}} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, Options{Interval: 1}, engine.Config{Overlap: tt.overlap, MaxBatchSize: 4}, sim.Config{Cost: sim.Cost{Step: 2e6}})
			s, err := r.Submit(request(1, 10, 100))
			if err != nil {
				t.Fatal(err)
			}
			drain(t, s)
			r.stop()
			var latency, span, host, device int64
			last := int64(0)
			for i, row := range r.rows {
				if row.Drain {
					continue
				}
				latency += row.IterLatency.NS
				span += row.IterSpan.NS
				host += row.HostStep.NS
				device += row.Forward.NS + row.Sample.NS
				if row.IterSpan.OK != (i > 0) || row.PrevDevice.OK != (i > 0) || !row.HostStep.OK || row.Iter != int64(i+1) || row.Covers != 1 {
					t.Errorf("row %d: %+v", i, row)
				}
				last = row.StartNS
			}
			wall := float64(last - r.rows[0].StartNS)
			if float64(span) != wall {
				t.Errorf("overlap %v: iterSpanMS sums to %d ns, the wall time is %v", tt.overlap, span, wall)
			}
			for name, sum := range map[string]float64{"iterLatencyMS": float64(latency) / tt.factor, "hostStepTimeMS": float64(host), "gpuForwardTimeMS": float64(device)} {
				if math.Abs(sum/wall-1) > 0.03 {
					t.Errorf("overlap %v: %s sums to %.3f of the wall time", tt.overlap, name, sum/wall)
				}
			}
		})
	}
}

// TestSumsAreExactAtAnyInterval is a random load with cancels, deadlines, probes and preemptions.
func TestSumsAreExactAtAnyInterval(t *testing.T) {
	for _, tt := range []struct {
		rows, kv int
		overlap  bool
		windows  []int // of three layers
		bytes    []int
	}{
		{1, 1, true, nil, nil}, {3, 6, true, nil, nil}, {10, 10, true, nil, nil}, {3, 3, false, nil, nil}, {1, 7, true, nil, nil},
		{2, 2, true, []int{0, 9, 20}, []int{64, 32, 16}}, {3, 3, true, []int{12, 12, 12}, []int{0, 64}},
	} {
		t.Run(fmt.Sprintf("every %d and %d, overlap %v, windows %v", tt.rows, tt.kv, tt.overlap, tt.windows), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				exact(t, Options{Interval: tt.rows, KVInterval: tt.kv, BlockBytes: tt.bytes, Violated: func(err error) { t.Error(err) }}, tt.overlap, tt.windows)
			})
		})
	}
}

// sums of what the consumers saw.
type sums struct {
	requests                                 rows.Requests
	prompt, cached, output                   int64
	allocNew, reused, missed, preempted, all int64
	copied                                   int64 // blocks, a part of which was reused
}

func exact(t *testing.T, o Options, overlap bool, windows []int) {
	r := newRig(t, o, engine.Config{Overlap: overlap, PrefixReuse: true, MaxBatchSize: 16, MaxNumTokens: 64, MaxWaiting: 4000},
		sim.Config{TokensPerBlock: 4, KVBlocks: 90, Shallow: true, Layers: max(len(windows), 1), Windows: windows, KVHeads: 1, Cost: sim.Cost{Step: 1e6}})
	want := load(t, r, 2000)
	r.stop()
	var got sums
	groups := 0
	for _, n := range o.BlockBytes {
		if n > 0 {
			groups++
		}
	}
	for i, row := range r.rows {
		if row.KV.Sampled {
			addsUp(t, &row, groups)
		}
		q := row.Requests
		got.requests.New += q.New
		got.requests.NewActive += q.NewActive
		got.requests.Completed += q.Completed
		got.requests.Cancelled += q.Cancelled
		got.requests.Expired += q.Expired
		got.preempted += q.Suspended
		got.prompt += row.Sums.Prompt
		got.cached += row.Sums.Cached
		got.output += row.Sums.Output
		got.allocNew += row.KV.DAllocNew
		got.reused += row.KV.DReused
		got.missed += row.KV.DMissed
		got.copied += row.KV.IntraCopyBlocks.V
		if !row.Drain && (row.Iter%int64(o.Interval) != 0 || row.KV.Sampled != (row.Iter%int64(o.KVInterval) == 0)) {
			t.Fatalf("row %d is of iteration %d, KV sampled %v", i, row.Iter, row.KV.Sampled)
		}
	}
	if got.copied == 0 || got.copied > want.copied { // who is cancelled before its first step copies nothing
		t.Errorf("%d blocks copied, %d reused in part", got.copied, want.copied)
	}
	got.requests.MaxActive, got.all, got.copied = want.requests.MaxActive, want.all, want.copied
	if got != want {
		t.Errorf("rows  %+v\nloads %+v", got, want)
	}
	last := r.rows[len(r.rows)-1]
	if k := last.KV; !k.Sampled || k.Used != 0 || k.AllocNew-k.Freed != k.Evictable || last.Requests.Active+last.Requests.Queued != 0 {
		t.Errorf("at the end %+v", last)
	}
	if want.preempted == 0 || want.requests.Cancelled == 0 || want.requests.Expired == 0 {
		t.Errorf("the load is too tame: %+v", want)
	}
}

// addsUp checks that the groups of a row make its sum, that no block is lost in any, and that each survives the codec.
func addsUp(t *testing.T, r *rows.Row, groups int) {
	static := rows.Static{TokensPerBlock: 4}
	for i := range r.Groups {
		k := &r.Groups[i]
		static.Groups = append(static.Groups, rows.Group{Tokens: int64(100 - i), BlockBytes: 8})
		if k.Free+k.Used != k.Max || k.PeakFree < k.Free || k.PeakUsed < k.Used || k.PeakEvictable < k.Evictable || k.DReused != k.DFullReused+k.DPartialReused {
			t.Errorf("row %d, group %d: %+v", r.Seq, i, k)
		}
	}
	if len(r.Groups) != groups && groups > 1 || r.KV.Violations != 0 {
		t.Errorf("row %d has %d groups, want %d; %d violations", r.Seq, len(r.Groups), groups, r.KV.Violations)
	}
	_, again, err := rows.NewCodec().Parse(rows.NewEncoder(static).Append(nil, r))
	if err != nil || again.KV != r.KV {
		t.Errorf("row %d: %v, sum\n%+v, read\n%+v", r.Seq, err, r.KV, again.KV)
	}
}

// load runs n requests and sums what their consumers saw.
func load(t *testing.T, r *rig, n int) sums {
	var mu sync.Mutex
	var sum sums
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			time.Sleep(time.Duration(i) * 700 * time.Microsecond)
			req := request(int64(i), 1+i*37%60, 1+i*53%40)
			req.Probe = i%29 == 0
			if i%17 == 0 {
				req.DeadlineNS = int64(i)*700_000 + 40_000_000
			}
			s, err := r.Submit(req)
			if err != nil {
				t.Error(err)
				return
			}
			if i%7 == 0 {
				time.AfterFunc(time.Duration(i%31)*time.Millisecond, s.Cancel)
			}
			tokens, done := drain(t, s)
			mu.Lock()
			defer mu.Unlock()
			sum.add(req, tokens, done)
		})
	}
	all.Wait()
	return sum
}

func (s *sums) add(req infer.Request, tokens int, done infer.Done) {
	rep := &done.Report
	s.all++
	s.allocNew += int64(rep.KV.AllocNewBlocks)
	s.reused += int64(rep.KV.ReusedBlocks)
	s.missed += int64(rep.KV.MissedBlocks)
	s.copied += int64(rep.KV.PartialBlocks)
	s.preempted += int64(rep.Preemptions)
	if req.Probe {
		return
	}
	s.requests.New++
	switch done.Reason {
	case infer.FinishCancelled:
		s.requests.Cancelled++
	case infer.FinishExpired:
		s.requests.Expired++
	default:
		s.requests.Completed++
	}
	s.output += int64(tokens)
	if rep.KV.AllocTotalBlocks > 0 {
		s.requests.NewActive++
		s.prompt += int64(rep.PromptTokens)
		s.cached += int64(rep.CachedTokens)
	}
}

func TestIntervalsThatLoseCountsAreRefused(t *testing.T) {
	for _, tt := range []struct {
		rows, kv int
		want     string
	}{{2, 3, "KV interval 3: must be a multiple of the iteration interval, 2"}, {0, 1, "iteration interval 0"}, {4, 2, "KV interval 2"}, {2, 4, ""}} {
		_, err := New(Options{Interval: tt.rows, KVInterval: tt.kv})
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%d, %d: %v", tt.rows, tt.kv, err)
		}
	}
}

// TestGoldenRows holds one row a mode, of a load whose times are fixed.
func TestGoldenRows(t *testing.T) {
	for _, mode := range []string{"overlap", "non_overlap"} {
		synctest.Test(t, func(t *testing.T) {
			r := newRigAtRest(t, Options{Interval: 1, MaxActive: 3, Memory: func() rows.Memory {
				return rows.Memory{CPU: rows.Some(int64(123456789)), Pinned: rows.Some(0)}
			}}, engine.Config{Overlap: mode == "overlap", PrefixReuse: true, RequestStates: true, MaxBatchSize: 3, MaxNumTokens: 16},
				sim.Config{TokensPerBlock: 4, KVBlocks: 24, Cost: sim.Cost{Step: 2e6, PrefillToken: 1e4, Decode: 1e5}})
			var seqs []*engine.Sequence
			for i := range int64(4) {
				s, err := r.Submit(request(i, 12, 8))
				if err != nil {
					t.Fatal(err)
				}
				seqs = append(seqs, s)
			}
			r.start()
			for _, s := range seqs {
				drain(t, s)
			}
			r.stop()
			static := rows.Static{Node: "gen-1", ClockID: "0123456789abcdef.01234567", Mode: mode, MaxBatchSize: 3, MaxNumTokens: 16,
				TokensPerBlock: 4, BlockBytes: 512, Window: 8192, Tier: "host"}
			golden(t, mode+".golden.json", rows.NewEncoder(static).Append(nil, &r.rows[3]))
		})
	}
}

// TestAnIdleEngineShowsNoBlocksInUse: the last step is in a row without KV statistics, and its blocks go to the cache, which
// hands out and frees none. A row more says so.
func TestAnIdleEngineShowsNoBlocksInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Options{Interval: 1, KVInterval: 7}, engine.Config{PrefixReuse: true, MaxBatchSize: 4}, sim.Config{TokensPerBlock: 4, Cost: sim.Cost{Step: 1e6}})
		s, err := r.Submit(request(1, 8, 9)) // ends two steps after the row with KV statistics
		if err != nil {
			t.Fatal(err)
		}
		drain(t, s)
		r.stop()
		if last := r.rows[len(r.rows)-1]; !last.KV.Sampled || last.KV.Used != 0 || last.KV.Evictable == 0 {
			t.Errorf("the last row is %+v", last)
		}
	})
}

// A place that is held while nothing runs is told of before any iteration, once.
func TestWhatComesToAnIdleEngineIsCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Options{Interval: 1}, engine.Config{PrefixReuse: true, MaxBatchSize: 4}, sim.Config{TokensPerBlock: 4})
		req := request(1, 8, 3)
		req.Kind = infer.GenerationOnly
		h, err := r.Reserve(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		h.Cancel()
		time.Sleep(time.Second)
		r.stop()
		var sum rows.Requests
		blocks := int64(0)
		for i := range r.rows {
			sum.AddCounts(&r.rows[i].Requests)
			blocks += r.rows[i].KV.DAllocNew
		}
		if want := (rows.Requests{New: 1, NewActive: 1, Cancelled: 1}); sum != want || blocks == 0 || blocks != r.rows[len(r.rows)-1].KV.AllocNew {
			t.Errorf("rows add up to %+v and %d new blocks, want %+v", sum, blocks, want)
		}
	})
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	var text bytes.Buffer
	if err := json.Indent(&text, got, "", "  "); err != nil {
		t.Fatal(err)
	}
	text.WriteByte('\n')
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text.Bytes(), want) {
		t.Errorf("%s differs; run with -update and read the diff:\n%s", name, text.Bytes())
	}
}

func TestTheLogHasALineAnIteration(t *testing.T) {
	var lines []string
	l := &Log{Max: 8, Write: func(s string) { lines = append(lines, s) }}
	for i := range int64(18) {
		it := engine.Iteration{Iter: i + 1, BuiltNS: i * 2e6, EndNS: i*2e6 + 1.5e6, Running: 3, NewRequests: int(i % 2)}
		it.BatchSize, it.ContextSeqs, it.ContextTokens, it.DecodeSeqs = 2, 1, 7, 1
		it.Stamps.ForwardStartNS, it.Stamps.SampleEndNS = i*2e6, i*2e6+1e6
		it.Pool = kv.New(100, 4, 1, kv.Events{})
		it.Pool.Alloc(nil, int(i))
		l.Iterated(&it)
	}
	for _, tt := range []struct {
		line int
		want string
	}{
		{0, "iter = 1, global_rank = 0, rank = 0, num_scheduled_requests = 2, adp_dummy_ctx_tokens = 0, adp_dummy_gen_tokens = 0, kv_cache_util = 0.000, currank_total_requests = 3/8, host_step_time = 1.500ms, prev_device_step_time = N/A, timestamp = "},
		{1, "prev_device_step_time = 1.000ms"},
		{1, "states = {num_ctx_requests: 1, num_ctx_tokens: 7, num_generation_tokens: 1}, num_active = 3, num_fetched = 1, num_dummy = 0, num_unscheduled = 1"},
		{15, "kv_cache_util = 0.000"}, // refreshed every 16 iterations
		{16, "kv_cache_util = 0.160"},
		{17, "kv_cache_util = 0.160"},
	} {
		if !strings.Contains(lines[tt.line], tt.want) {
			t.Errorf("line %d: %s\nwant %s", tt.line, lines[tt.line], tt.want)
		}
	}
}
