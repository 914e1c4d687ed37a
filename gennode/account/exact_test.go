package account

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
	dto "github.com/prometheus/client_model/go"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// counts are the same facts as three ledgers and the load generator tell them.
type counts struct {
	New, Completed, Cancelled, Preempted  int64
	Prompt, Cached, Output                int64
	AllocNew, Freed, Evictable, Reused    int64
	RecordOutput, RecordPrompt, Succeeded int64 // of requests that ran to their end
}

func promptOf(r *rand.Rand, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = r.Int32N(900)
	}
	return out
}

// TestAllLedgersTellTheSame runs 2,000 random requests with cancels and preemptions, and holds what their callers saw against
// the rows, as a reader of the ring gets them, and against Prometheus.
func TestAllLedgersTellTheSame(t *testing.T) {
	for _, every := range []int{1, 3, 10} {
		t.Run(fmt.Sprintf("a row of every %d iterations", every), func(t *testing.T) {
			sink := allOn()
			sink.Interval = every
			a := newAccounts(t, engine.Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 16, MaxNumTokens: 64, MaxWaiting: 4000},
				simulated(sim.Config{TokensPerBlock: 4, KVBlocks: 90, Shallow: true, Layers: 1, KVHeads: 1, Cost: sim.Cost{Step: 2e5}}), sink)
			a.steps = true
			follow := follower{a: a}
			want := a.storm(t, 2000, &follow)
			a.stop()
			a.ledger.Close()
			follow.read(t)
			if want.Preempted == 0 || want.Cancelled == 0 || want.Cached == 0 {
				t.Errorf("the load is too tame: %+v", want)
			}
			byRows := follow.counts()
			byMetrics := a.byMetrics(t)
			want.Freed, want.Evictable = byRows.Freed, byRows.Evictable // only the engine knows these
			byRows.RecordOutput, byRows.RecordPrompt, byRows.Succeeded = want.RecordOutput, want.RecordPrompt, want.Succeeded
			if byRows != want {
				t.Errorf("rows    %+v\ncallers %+v", byRows, want)
			}
			if byMetrics != want {
				t.Errorf("metrics %+v\ncallers %+v", byMetrics, want)
			}
			if byRows.AllocNew-byRows.Freed != byRows.Evictable || follow.newest.KV.Used != 0 {
				t.Errorf("idle, but %d blocks allocated, %d freed, %d evictable, %d used", byRows.AllocNew, byRows.Freed, byRows.Evictable, follow.newest.KV.Used)
			}
		})
	}
}

// storm runs n requests, up to 60 at once, and counts what their callers see.
func (a *accounts) storm(t *testing.T, n int, f *follower) (c counts) {
	var mu sync.Mutex
	var all sync.WaitGroup
	room := make(chan struct{}, 60)
	for i := range n {
		room <- struct{}{}
		if i%16 == 0 {
			f.read(t)
		}
		all.Go(func() {
			defer func() { <-room }()
			r := rand.New(rand.NewPCG(uint64(i), 7))
			req := infer.Request{ID: int64(i), Prompt: promptOf(rand.New(rand.NewPCG(uint64(i%5), 3)), 1+r.IntN(60)), MaxTokens: 1 + r.IntN(40), IgnoreEOS: true}
			after := -1 // tokens, then it is cancelled
			if i%7 == 0 {
				after = r.IntN(10)
			}
			tokens, done := a.requestUntil(t, req, after)
			mu.Lock()
			defer mu.Unlock()
			c.add(tokens, done)
		})
	}
	all.Wait()
	return c
}

func (c *counts) add(tokens int, done infer.Done) {
	rep := &done.Report
	c.New++
	c.Preempted += int64(rep.Preemptions)
	c.Output += int64(tokens)
	c.AllocNew += int64(rep.KV.AllocNewBlocks)
	c.Reused += int64(rep.KV.ReusedBlocks)
	if rep.KV.AllocTotalBlocks > 0 {
		c.Prompt += int64(rep.PromptTokens)
		c.Cached += int64(rep.CachedTokens)
	}
	if done.Err != nil {
		c.Cancelled++
		return
	}
	c.Completed++
	c.Succeeded++
	c.RecordOutput += int64(rep.OutputTokens)
	c.RecordPrompt += int64(rep.PromptTokens)
}

// byMetrics reads the counters.
func (a *accounts) byMetrics(t *testing.T) counts {
	families, err := a.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]int64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				of[f.GetName()] += int64(m.GetCounter().GetValue())
			case dto.MetricType_GAUGE:
				of[f.GetName()] += int64(m.GetGauge().GetValue())
			}
		}
	}
	return counts{
		New: of["meridian_num_requests_new_total"], Completed: of["meridian_num_requests_completed_total"],
		Cancelled: of["meridian_num_requests_cancelled_total"], Preempted: of["meridian_num_requests_preempted_total"],
		Prompt: of["meridian_iter_prompt_tokens_total"], Cached: of["meridian_iter_cached_tokens_total"], Output: of["meridian_iter_output_tokens_total"],
		AllocNew: of["meridian_kv_cache_alloc_new_blocks_total"], Freed: of["meridian_kv_cache_freed_blocks_total"],
		Evictable: of["meridian_kv_cache_evictable_blocks"], Reused: of["meridian_kv_cache_iter_reused_blocks_total"],
		RecordOutput: of["meridian_generation_tokens_total"], RecordPrompt: of["meridian_prompt_tokens_total"], Succeeded: of["meridian_request_success_total"],
	}
}

// follower reads rows over HTTP with a cursor of its own.
type follower struct {
	a      *accounts
	cursor int64
	lost   int64
	rows   []rows.Row
	newest rows.Row
}

func (f *follower) read(tb testing.TB) {
	e := echo.New()
	f.a.ledger.Routes(e)
	w := httptest.NewRecorder()
	e.ServeHTTP(w, httptest.NewRequest(http.MethodGet, fmt.Sprintf("/iteration_stats?after=%d", f.cursor), nil))
	var page struct {
		Rows          []json.RawMessage
		Next, Dropped int64
	}
	if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil {
		tb.Error(err)
		return
	}
	codec := rows.NewCodec()
	for _, b := range page.Rows {
		_, r, err := codec.Parse(b)
		if err != nil || page.Dropped == 0 && r.Seq != f.cursor+1 {
			tb.Errorf("row %d after %d: %v", r.Seq, f.cursor, err)
		}
		f.cursor, f.newest = r.Seq, r
		f.rows = append(f.rows, r)
	}
	f.lost += page.Dropped
}

func (f *follower) counts() (c counts) {
	for i := range f.rows {
		r := &f.rows[i]
		c.New += r.Requests.New
		c.Completed += r.Requests.Completed
		c.Cancelled += r.Requests.Cancelled
		c.Preempted += r.Requests.Suspended
		c.Prompt += r.Sums.Prompt
		c.Cached += r.Sums.Cached
		c.Output += r.Sums.Output
		c.AllocNew += r.KV.DAllocNew
		c.Reused += r.KV.DReused
	}
	c.Freed, c.Evictable = f.newest.KV.Freed, f.newest.KV.Evictable
	return c
}

// TestThreeReadersLoseNothing reads the rows of a busy engine with three cursors, each at its own pace, and a fourth that comes
// too seldom: it is told how many rows it missed.
func TestThreeReadersLoseNothing(t *testing.T) {
	cfg, dev := batchOf256(0)
	a := newAccounts(t, cfg, dev, allOn())
	readers := []*follower{{a: a}, {a: a}, {a: a}}
	for range 30 {
		a.load(t, 8, 60)
		for _, f := range readers {
			f.read(t)
		}
	}
	a.stop() // the last rows come after the last answer
	slow := &follower{a: a}
	for _, f := range append(readers, slow) {
		f.read(t)
	}
	last := readers[0].cursor
	for i, f := range readers {
		if f.lost != 0 || int64(len(f.rows)) != last || f.cursor != last {
			t.Errorf("reader %d: %d rows of %d, %d lost", i, len(f.rows), last, f.lost)
		}
	}
	if slow.lost == 0 || slow.lost+int64(len(slow.rows)) != last {
		t.Errorf("the slow reader: %d rows and %d lost, of %d", len(slow.rows), slow.lost, last)
	}
}

// BenchmarkReaders is what three readers at 20 Hz take of the processor time of a busy engine: 60 readings a second over
// TCP, of 25 rows each at a step of 2 ms. A row becomes text once for all three. The readers' own time is taken off. The
// engine alone is less than a node, which serves its requests over HTTP too; docs/ledgers.md has the share of a node.
func BenchmarkReaders(b *testing.B) {
	cfg, dev := batchOf256(2e6)
	a := newAccounts(b, cfg, dev, allOn())
	_, used := a.load(b, 256, 100)
	engine := used * 500 // a second
	f := follower{a: a}
	f.read(b)
	row := f.newest
	e := echo.New()
	a.ledger.Routes(e)
	server := httptest.NewServer(e)
	defer server.Close()
	const rowsEach = 25
	var readers [3]*plainReader
	for i := range readers {
		readers[i] = newPlainReader(b, server.Listener.Addr().String())
		defer readers[i].close()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var apart time.Duration // of the readers and of the engine's rows
	from := processor()
	for b.Loop() {
		start := thread()
		for range rowsEach {
			a.ledger.Put(&row)
		}
		for _, r := range readers {
			r.read(b, fmt.Sprintf("GET /iteration_stats?after=%d HTTP/1.1\r\nHost: n\r\n\r\n", row.Seq-rowsEach))
		}
		apart += thread() - start
	}
	second := (processor() - from - apart) * 20 / time.Duration(b.N)
	b.ReportMetric(float64(second)/60/1e3, "µs/reading")
	b.ReportMetric(float64(second)/float64(engine)*100, "%-of-engine-cpu")
	b.ReportMetric(float64(second)/1e9*100, "%-of-a-processor")
}

// plainReader reads answers over a connection whose calls block the thread: its time is that of the thread.
type plainReader struct {
	fd  int
	buf []byte
}

func newPlainReader(b *testing.B, addr string) *plainReader {
	c, err := net.Dial("tcp", addr)
	check(b, err)
	defer c.Close()
	f, err := c.(*net.TCPConn).File()
	check(b, err)
	defer f.Close()
	fd, err := syscall.Dup(int(f.Fd())) // Fd makes it block
	check(b, err)
	return &plainReader{fd, make([]byte, 256<<10)}
}

// read sends a request and reads its answer to the end.
func (r *plainReader) read(b *testing.B, request string) {
	if _, err := syscall.Write(r.fd, []byte(request)); err != nil {
		b.Fatal(err)
	}
	for n := 0; !bytes.HasSuffix(r.buf[:n], []byte("}")) && !bytes.HasSuffix(r.buf[:n], []byte("0\r\n\r\n")); {
		more, err := syscall.Read(r.fd, r.buf[n:])
		if err != nil || more == 0 {
			b.Fatalf("after %d bytes: %v", n, err)
		}
		n += more
	}
}

func (r *plainReader) close() { _ = syscall.Close(r.fd) }

// thread is the processor time of the calling thread.
func thread() time.Duration {
	const self = 1 // RUSAGE_THREAD
	var use syscall.Rusage
	if syscall.Getrusage(self, &use) != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}
