package decode

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/hardware"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

// accounts is an engine on a simulated device with its ledgers, connected as in a node.
type accounts struct {
	*engine.Engine
	ledger  *ledger.Ledger // nil: all accounting is off
	metrics *prometheus.Registry
	steps   bool         // requests keep their steps
	records atomic.Int64 // bytes that the records of requests take
	stop    func()
}

func newAccounts(tb testing.TB, cfg engine.Config, dev sim.Config, sink *rows.Sink) *accounts {
	tb.Helper()
	a := &accounts{metrics: prometheus.NewRegistry()}
	start := time.Now()
	cfg.Now = func() int64 { return int64(time.Since(start)) + 1 }
	dev.Now = cfg.Now
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	if sink != nil {
		hw := hardware.New(hardware.Options{})
		check(tb, hw.Register(a.metrics))
		run.Go(func() { _ = hw.Run(ctx) })
		sink.Memory, sink.Energy = hw.Memory, hw.Energy
		a.ledger = ledger.New(ledger.Options{Keep: 1000, VLLM: true, Sink: *sink, Registry: a.metrics})
		c, err := stats.New(stats.Options{Interval: sink.Interval, KVInterval: sink.KVInterval, MaxActive: cfg.MaxBatchSize, Put: a.ledger.Put, Memory: hw.Memory})
		check(tb, err)
		cfg.OnIteration, cfg.OnIdle, cfg.Energy = c.Iterated, c.Idled, hw.Energy
	}
	device, err := sim.New(dev)
	check(tb, err)
	a.Engine, err = engine.New(cfg, device)
	check(tb, err)
	if a.ledger != nil {
		check(tb, a.ledger.Start(ledger.Engine{Static: rows.Static{Node: "gen0", ClockID: "c", MaxBatchSize: 256}, Model: "m", Device: "sim", Blocks: dev.KVBlocks, Load: a.Load}))
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

// request runs a request as a node does: it drains the tokens, counts the gaps between them, and in the end makes the
// record and counts it.
func (a *accounts) request(tb testing.TB, r infer.Request) (tokens int, done infer.Done) {
	return a.requestUntil(tb, r, -1)
}

// requestUntil cancels the request after so many tokens; -1: never.
func (a *accounts) requestUntil(tb testing.TB, r infer.Request, cancelAfter int) (tokens int, done infer.Done) {
	received := int64(1)
	r.ReturnPerfMetrics = a.steps
	s, err := a.Submit(r)
	if err != nil {
		tb.Error(err)
		return 0, done
	}
	var gaps ledger.Gaps
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
			gaps.Add(got)
		}
		if d == nil {
			continue
		}
		rec := recordOf(r, d, received)
		if a.ledger != nil {
			a.ledger.Observe(rec, &gaps)
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

// load runs batch requests of so many tokens at once, and gives the time a step.
func (a *accounts) load(tb testing.TB, batch, tokens int) (wall, cpu time.Duration) {
	start, used, at := time.Now(), processor(), a.Load().Iter
	var all sync.WaitGroup
	for i := range batch {
		all.Go(func() {
			a.request(tb, infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3, 4, int32(i)}, MaxTokens: tokens, IgnoreEOS: true})
		})
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
func batchOf256(stepNS float64) (engine.Config, sim.Config) {
	return engine.Config{Overlap: true, MaxBatchSize: 256}, sim.Config{Shallow: true, Layers: 1, KVHeads: 1, KVBlocks: 1 << 14, Cost: sim.Cost{Step: stepNS}}
}

func allOn() *rows.Sink { return &rows.Sink{Node: "gen0", Interval: 1} }

// BenchmarkOnOff runs 256 sequences on a device whose step takes 2 ms, with all accounting and without, in short turns, and
// gives the median ratio of the times of a pair: what else the machine does hits some turns, not the median. What
// accounting costs a step is measured part by part: make bench-accounting.
func BenchmarkOnOff(b *testing.B) {
	cfg, dev := batchOf256(2e6)
	on, off := newAccounts(b, cfg, dev, allOn()), newAccounts(b, cfg, dev, nil)
	on.steps = true
	var wall, cpu, ratio []float64
	for turn := 0; b.Loop(); turn++ {
		var w, c [2]float64 // off, on
		for k := range 2 {
			i := (k + turn) % 2 // each goes first as often
			a := []*accounts{off, on}[i]
			wallStep, cpuStep := a.load(b, 256, 60)
			w[i], c[i] = float64(wallStep), float64(cpuStep)
		}
		wall, cpu, ratio = append(wall, w[0]), append(cpu, c[1]-c[0]), append(ratio, w[1]/w[0])
	}
	b.ReportMetric(median(ratio), "on/off")
	b.ReportMetric(median(wall), "ns/step-off")
	b.ReportMetric(median(cpu)/1000, "cpu-µs/step-more")
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}
