package engine

import (
	"reflect"
	"runtime"
	"syscall"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sched"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// batchOf makes a step of n decoding sequences that keep their steps.
func batchOf(e *Engine, n int) *flight {
	f := &flight{step: backend.NewStep(1)}
	for range n {
		s := &Sequence{e: e, steps: stepLog{on: true, max: 4096}, req: infer.Request{Prompt: []int32{1}}}
		s.q = sched.Seq{Tokens: make([]int32, 100), Data: s}
		s.report.OutputTokens = 5
		f.items = append(f.items, sched.Item{Seq: &s.q, KVLen: 99, Tokens: 1, Sample: true})
	}
	return f
}

// BenchmarkAccounting is what the ledgers add to a step on the engine's goroutine, at 256 sequences: the counts of the
// batch, a step record for each request, and the report of the iteration; then what a request costs when it ends. What
// rows, metrics and records add is in gpu/stats and shared/ledger. The bare loop over the sequences is taken off: the engine
// goes through them without accounting too.
func BenchmarkAccounting(b *testing.B) {
	d, err := sim.New(sim.Config{Now: clock()})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	e, err := New(Config{Now: clock(), OnIteration: func(*Iteration) {}}, d)
	if err != nil {
		b.Fatal(err)
	}
	const n = 256
	f := batchOf(e, n)
	ballast := make([]byte, 64<<20) // less than a node's heap: how often garbage is collected goes by it
	step := func(i int64, accounting bool) {
		f.batch.Iter = i
		f.counts, f.logged = Batch{}, false
		if accounting {
			e.countBatch(f)
		}
		for k := range f.items {
			it := &f.items[k]
			s := it.Seq.Data.(*Sequence)
			it.KVLen++
			if accounting {
				s.record(it, f, i)
			}
			if s.step == 400 { // a request ends, another begins
				if accounting {
					s.steps.close()
					s.steps.records()
				}
				s.step, s.steps = 0, stepLog{on: true, max: 4096}
			}
		}
		if accounting {
			e.iterated(f, i)
		}
	}
	b.ReportAllocs()
	from, i := processor(), int64(0)
	for b.Loop() {
		i++
		step(i, true)
	}
	all := processor() - from
	from = processor()
	for k := range i {
		step(k, false)
	}
	b.ReportMetric(float64(all-(processor()-from))/float64(b.N), "ns/step")
	runtime.KeepAlive(ballast)
}

// processor is the processor time of the process in ns: what else the machine does is not in it.
func processor() int64 {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return use.Utime.Nano() + use.Stime.Nano()
}

// TestStepRecordsAreSmall keeps 4,000 steps of 512 requests that run at the same time; once they take their turns, so that
// no two steps of a request follow each other. All else that the heap grows by is none.
func TestStepRecordsAreSmall(t *testing.T) {
	const requests, steps, limit = 512, 4000, 256 << 10
	for _, turns := range []bool{false, true} {
		logs := make([]stepLog, requests)
		before := heap()
		var b batchLog
		for k := range steps {
			b.add(rowAt(int64(k) * 2_000_000))
			if turns {
				b.add(rowAt(int64(k)*2_000_000 + 1_000_000))
			}
			for i := range logs {
				logs[i].max = 8192
				logs[i].add(&b, k, k, 1)
			}
		}
		each := (heap() - before) / requests
		logs[0].close()
		wire := 0
		for _, m := range phase.AppendSteps(&phase.Record{}, logs[0].records()) {
			wire += len(m)
		}
		if each > limit || wire > limit {
			t.Errorf("turns %v: %d bytes a request in memory, %d sent, want at most %d", turns, each, wire, limit)
		} else {
			t.Logf("turns %v: %d bytes a request of %d steps in memory, %d sent", turns, each, steps, wire)
		}
		runtime.KeepAlive(logs)
	}
}

// rowAt is a row with the times of a step that begins at a time.
func rowAt(at int64) infer.StepRow {
	return infer.StepRow{Iter: at / 1e6, ForwardStartNS: at + 11, ForwardEndNS: at + 1_912_345 + at%977, SampleEndNS: at + 1_987_654 + at%983, TokenNS: at + 2_010_101 + at%991, BatchSize: 256}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestStepRecordsKeepWhatTheyAreGiven(t *testing.T) {
	type row struct{ step, kv, tokens int }
	var given []row
	var batches []infer.StepRow
	var b batchLog
	l := stepLog{max: 3*pageRows + 5}
	for i := range 4*pageRows + 7 {
		r := infer.StepRow{Iter: int64(i), ForwardStartNS: int64(i) + 1, ForwardEndNS: int64(i) + 2, SampleEndNS: int64(i) + 3, TokenNS: int64(i) + 4, BatchSize: int64(i) + 5, StageNS: []int64{int64(i) + 7, int64(i) + 9}}
		b.add(r)
		if i%97 == 13 || i < 20 && i%2 == 0 { // not in this batch
			continue
		}
		own := row{len(given), 50 + len(given), 1}
		if i%200 == 150 { // computed anew after a preemption
			own.kv, own.tokens = 10, 40
		}
		l.add(&b, own.step, own.kv, own.tokens)
		given, batches = append(given, own), append(batches, r)
	}
	l.close()
	packed := l.records()
	b.add(infer.StepRow{Iter: 999, StageNS: []int64{1, 2}}) // the engine goes on
	c, err := packed.Decode()
	if err != nil || len(c.Step) != l.max || packed.N != l.max || int(c.Truncated) != len(given)-l.max {
		t.Fatalf("%d steps, %d truncated of %d: %v", len(c.Step), c.Truncated, len(given), err)
	}
	for i := range l.max {
		got := infer.StepRow{
			Iter: c.Iter[i], ForwardStartNS: c.ForwardStartNS[i], ForwardEndNS: c.ForwardEndNS[i], SampleEndNS: c.SampleEndNS[i],
			TokenNS: c.TokenNS[i], BatchSize: int64(c.BatchSize[i]), StageNS: []int64{c.StageNS[0][i], c.StageNS[1][i]},
		}
		if !reflect.DeepEqual(got, batches[i]) || (row{int(c.Step[i]), int(c.KVTokens[i]), int(c.Tokens[i])}) != given[i] {
			t.Fatalf("step %d: %+v, want %+v, %+v", i, got, batches[i], given[i])
		}
	}
}

// TestOffCostsNothing: without a listener nothing is counted and no clock is read.
func TestOffCostsNothing(t *testing.T) {
	d, err := sim.New(sim.Config{Now: clock()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	reads := 0
	e, err := New(Config{Now: func() int64 { reads++; return 1 }}, d)
	if err != nil {
		t.Fatal(err)
	}
	f := batchOf(e, 4)
	for i := range f.items {
		f.items[i].Seq.Data.(*Sequence).steps = stepLog{}
	}
	reads = 0
	allocs := testing.AllocsPerRun(100, func() {
		e.countBatch(f)
		e.trace(f, 0)
		for k := range f.items {
			f.items[k].Seq.Data.(*Sequence).record(&f.items[k], f, 1)
		}
		e.traceEnd(f, 1)
		e.iterated(f, 1)
		e.idled()
	})
	if allocs != 0 || reads != 0 || f.counts != (Batch{}) {
		t.Errorf("%v allocations, %d clock reads, counted %+v", allocs, reads, f.counts)
	}
}
