package account

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/sim"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/hardware"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

// accounts is an engine with its ledgers, connected as in a node.
type accounts struct {
	*engine.Engine
	ledger  *ledger.Ledger // nil: all accounting is off
	metrics *prometheus.Registry
	steps   bool         // requests keep their steps
	records atomic.Int64 // bytes that the records of requests take
	stop    func()
}

// opener opens a device on a clock.
type opener func(now func() int64) (backend.Backend, error)

func simulated(c sim.Config) opener {
	return func(now func() int64) (backend.Backend, error) {
		c.Now = now
		return sim.New(c)
	}
}

// newAccounts starts an engine; a sink turns its accounting on. around wraps what the engine calls after each step.
func newAccounts(tb testing.TB, cfg engine.Config, open opener, sink *rows.Sink, around ...func(func(*engine.Iteration)) func(*engine.Iteration)) *accounts {
	tb.Helper()
	a := &accounts{metrics: prometheus.NewRegistry()}
	start := time.Now()
	cfg.Now = func() int64 { return int64(time.Since(start)) + 1 }
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	if sink != nil {
		hw := hardware.New(hardware.Options{})
		check(tb, hw.Register(a.metrics))
		run.Go(func() { _ = hw.Run(ctx) })
		sink.Memory, sink.Energy = hw.Memory, hw.Energy
		a.ledger = ledger.New(ledger.Options{Keep: 1000, VLLM: true, Sink: *sink, Registry: a.metrics})
		c, err := stats.New(stats.Options{Interval: sink.Interval, KVInterval: sink.KVInterval, MaxActive: cfg.MaxBatchSize, Put: a.ledger.Put, Memory: func() rows.Memory { return hw.Memory(nil) }})
		check(tb, err)
		cfg.OnIteration, cfg.OnIdle, cfg.Energy = c.Iterated, c.Idled, func() (float64, bool) { return hw.Energy(nil) }
		for _, wrap := range around {
			cfg.OnIteration = wrap(cfg.OnIteration)
		}
	}
	device, err := open(cfg.Now)
	check(tb, err)
	a.Engine, err = engine.New(cfg, device)
	check(tb, err)
	if a.ledger != nil {
		check(tb, a.ledger.Start(ledger.Engine{Static: rows.Static{Node: "gen0", ClockID: "c", MaxBatchSize: 256}, Model: "m", Device: device.Info().Device, Blocks: device.Info().KVBlocks, Load: a.Load}))
	}
	run.Go(func() {
		if err := a.Run(ctx); err != nil {
			tb.Error(err)
		}
	})
	a.stop = sync.OnceFunc(func() {
		cancel()
		run.Wait()
		if err := errors.Join(a.Check(), device.Close()); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(a.stop)
	return a
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// requestUntil runs a request as a node does, and cancels it after so many tokens; -1: never.
func (a *accounts) requestUntil(tb testing.TB, r infer.Request, cancelAfter int) (tokens int, done infer.Done) {
	r.ReturnPerfMetrics = a.steps
	s, err := a.Submit(r)
	if err != nil {
		tb.Error(err)
		return 0, done
	}
	return a.consume(tb, r, s, cancelAfter)
}

// consume drains the tokens of a request, counts them, and in the end makes the record and counts it.
func (a *accounts) consume(tb testing.TB, r infer.Request, s *engine.Sequence, cancelAfter int) (tokens int, done infer.Done) {
	var told ledger.Tokens
	for {
		if cancelAfter >= 0 && tokens >= cancelAfter {
			s.Cancel()
		}
		got, d, err := s.Next(context.Background())
		if err != nil {
			tb.Error(err)
			return tokens, done
		}
		tokens += len(got)
		if a.ledger != nil {
			told.Add(got)
		}
		if d == nil {
			continue
		}
		rec := recordOf(r, d, 1)
		if a.ledger != nil {
			a.ledger.Observe(rec, ledger.Ended{Tokens: &told})
		}
		size := 0
		for _, m := range phase.AppendSteps(rec, d.Report.Steps) {
			size += len(m)
		}
		size += len(phase.Append(nil, rec))
		a.records.Add(int64(size))
		return tokens, *d
	}
}

func recordOf(r infer.Request, d *infer.Done, received int64) *phase.Record {
	rep := &d.Report
	rec := &phase.Record{
		Schema: phase.Schema, Role: phase.Gen, Node: "gen0", Instance: "c", Router: "r", RequestID: "req-0123456789", Style: "aggregated",
		Outcome: phase.Finished, FinishReason: string(d.Reason), Probe: r.Probe, KV: &rep.KV, Chunks: rep.Chunks, Preemptions: rep.Preemptions, EnergyJ: rep.EnergyJ,
		Tokens: phase.Tokens{Prompt: rep.PromptTokens, Cached: rep.CachedTokens, Output: rep.OutputTokens},
		Iters:  &phase.Iters{First: rep.FirstIter, Last: rep.LastIter},
	}
	if d.Err != nil {
		rec.Outcome, rec.FinishReason = phase.Cancelled, ""
		rec.Error = &phase.Error{Stage: "engine", Type: string(d.Reason), Message: d.Err.Error()}
	}
	s := &rec.Stamps
	for _, p := range []struct {
		to **int64
		ns int64
	}{{&s.ReceiveNS, received}, {&s.QueuedNS, rep.QueuedNS}, {&s.FirstScheduledNS, rep.FirstScheduledNS}, {&s.FirstTokenNS, rep.FirstTokenNS}, {&s.LastTokenNS, rep.LastTokenNS}, {&s.EndNS, rep.FinishedNS}} {
		if p.ns != 0 {
			*p.to = &p.ns
		}
	}
	return rec
}

// load runs batch requests of so many tokens at once, and gives the time a step. All are in the queue before any is
// waited for, so that they run as one batch whatever the device costs.
func (a *accounts) load(tb testing.TB, batch, tokens int) (wall, cpu time.Duration) {
	start, used, at := time.Now(), processor(), a.Load().Iter
	var all sync.WaitGroup
	for i := range batch {
		r := infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3, 4, int32(i)}, MaxTokens: tokens, IgnoreEOS: true, ReturnPerfMetrics: a.steps}
		s, err := a.Submit(r)
		check(tb, err)
		all.Go(func() { a.consume(tb, r, s, -1) })
	}
	all.Wait()
	steps := time.Duration(a.Load().Iter - at)
	return time.Since(start) / steps, (processor() - used) / steps
}

func processor() time.Duration {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// batchOf256 is an engine for 256 sequences on a device whose step takes so long and costs the host little.
func batchOf256(stepNS float64) (engine.Config, opener) {
	return engine.Config{Overlap: true, MaxBatchSize: 256}, simulated(sim.Config{Shallow: true, Layers: 1, KVHeads: 1, KVBlocks: 1 << 14, Cost: sim.Cost{Step: stepNS}})
}

func allOn() *rows.Sink { return &rows.Sink{Node: "gen0", Interval: 1} }

// BenchmarkOnOff is the processor time of the whole process for a step of 256 sequences, with all accounting less without it:
// what runs on the engine's goroutine, what each request adds when it ends, garbage and cold caches. Turns alternate, and
// a second engine without accounting takes its turns too: by what it differs from the first the reader sees what the
// machine adds by itself.
//
//   - busy: the device takes no time and there is one processor, so that nothing sleeps and nothing wakes. It resolves a
//     microsecond in a second.
//   - 2ms: the device takes 2 ms. Sleeping and waking costs five times what a step works, and differs from turn to turn
//     by more than all accounting; on/off is the ratio of the times of a step.
//
// The parts of it are measured one by one: make bench-accounting.
func BenchmarkOnOff(b *testing.B) {
	for _, run := range []struct {
		name       string
		stepNS     float64
		tokens     int
		processors int
	}{{"busy/400tokens", 0, 400, 1}, {"busy/60tokens", 0, 60, 1}, {"2ms/400tokens", 2e6, 400, runtime.GOMAXPROCS(0)}, {"2ms/60tokens", 2e6, 60, runtime.GOMAXPROCS(0)}} {
		b.Run(run.name, func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(run.processors))
			cfg, dev := batchOf256(run.stepNS)
			more, control, ratio := onOff(b, cfg, dev, 256, run.tokens)
			report(b, "µs/step-more", more)
			report(b, "µs/step-control", control)
			if run.stepNS > 0 {
				b.ReportMetric(median(ratio), "on/off")
			}
		})
	}
}

// BenchmarkLargeModel is the accounting of a step on the CPU back end with a model that is larger than its caches: 1.1 GB in
// bf16, a batch of 4. A step takes 100 ms and more and pushes what accounting touches out of the caches, so what the
// engine calls after each step is measured in place: the row, kept and counted. A paired run cannot resolve it.
func BenchmarkLargeModel(b *testing.B) {
	dir := b.TempDir()
	check(b, model.WriteRandom(dir, []byte(largeConfig), 1))
	m, err := model.Load(dir)
	check(b, err)
	open := func(now func() int64) (backend.Backend, error) {
		return cpu.New(m, cpu.Options{KVBlocks: 256, MaxSlots: 4, Now: now})
	}
	var rowNS, stepNS []float64
	a := newAccounts(b, engine.Config{Overlap: true}, open, allOn(), func(f func(*engine.Iteration)) func(*engine.Iteration) {
		return func(it *engine.Iteration) {
			start := time.Now()
			f(it)
			rowNS, stepNS = append(rowNS, float64(time.Since(start))), append(stepNS, float64(it.Stamps.SampleEndNS-it.Stamps.ForwardStartNS))
		}
	})
	a.steps = true
	for b.Loop() {
		a.load(b, 4, 8)
	}
	a.stop()
	b.ReportMetric(median(rowNS)/1e3, "µs/row")
	b.ReportMetric(median(stepNS)/1e3, "µs/step")
	b.ReportMetric(100*median(rowNS)/median(stepNS), "%-of-a-step")
	check(b, m.Close())
}

// largeConfig is a Llama of 540 million parameters.
const largeConfig = `{"architectures":["LlamaForCausalLM"],"vocab_size":8192,"hidden_size":2048,"intermediate_size":5632,"num_hidden_layers":12,
	"num_attention_heads":16,"num_key_value_heads":4,"max_position_embeddings":2048,"hidden_act":"silu","tie_word_embeddings":true}`

// onOff takes turns: an engine without accounting, another one, and one with all of it. For each turn it gives the
// processor time that a step takes more in µs, what the second takes more than the first, and the ratio of times.
func onOff(b *testing.B, cfg engine.Config, dev opener, batch, tokens int) (more, control, ratio []float64) {
	engines := []*accounts{newAccounts(b, cfg, dev, nil), newAccounts(b, cfg, dev, nil), newAccounts(b, cfg, dev, allOn())}
	engines[2].steps = true
	for turn := 0; b.Loop(); turn++ {
		var wall, cpu [3]float64 // off, off again, on
		for k := range engines {
			i := (k + turn) % len(engines) // each goes first as often
			w, c := engines[i].load(b, batch, tokens)
			wall[i], cpu[i] = float64(w), float64(c)/1e3
		}
		more, control, ratio = append(more, cpu[2]-(cpu[0]+cpu[1])/2), append(control, cpu[1]-cpu[0]), append(ratio, 2*wall[2]/(wall[0]+wall[1]))
	}
	return more, control, ratio
}

func report(b *testing.B, unit string, v []float64) {
	m, e := mean(v)
	b.ReportMetric(m, unit)
	b.ReportMetric(e, "±"+unit)
}

// mean gives the mean and its standard error.
func mean(v []float64) (m, standardError float64) {
	n := float64(len(v))
	for _, x := range v {
		m += x / n
	}
	for _, x := range v {
		standardError += (x - m) * (x - m)
	}
	return m, math.Sqrt(standardError / max(n-1, 1) / n)
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}
