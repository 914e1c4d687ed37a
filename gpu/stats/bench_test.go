package stats

import (
	"syscall"
	"testing"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/rows"
)

// BenchmarkIterated is a row from an iteration, put into a ring.
func BenchmarkIterated(b *testing.B) {
	ring := rows.NewRing(rows.Static{}, 1000)
	c, err := New(Options{Interval: 1, Put: ring.Put, Memory: func() rows.Memory { return rows.Memory{} }})
	if err != nil {
		b.Fatal(err)
	}
	it := engine.Iteration{NewRequests: 1, Completed: 1, OutputTokens: 256}
	it.BatchSize, it.DecodeSeqs = 256, 256
	b.ReportAllocs()
	for b.Loop() {
		it.Iter++
		c.Iterated(&it)
	}
}

// BenchmarkOnOff runs 256 sequences on a device that takes no time, with all accounting of the engine and without, and
// gives the processor time of a step. The difference is a sanity check of the sum of the parts.
func BenchmarkOnOff(b *testing.B) {
	for name, on := range map[string]bool{"off": false, "on": true} {
		b.Run(name, func(b *testing.B) {
			cfg := engine.Config{Overlap: true, MaxBatchSize: 256}
			r := newBenchRig(b, cfg, on)
			var cpu, steps int64
			for b.Loop() {
				from, at := processor(), r.Load().Iter
				var seqs []*engine.Sequence
				for i := range int64(256) {
					req := request(i, 5, 400)
					req.ReturnPerfMetrics = on
					s, err := r.Submit(req)
					if err != nil {
						b.Fatal(err)
					}
					seqs = append(seqs, s)
				}
				for _, s := range seqs {
					drain(b, s)
				}
				cpu += processor() - from
				steps += r.Load().Iter - at
			}
			b.ReportMetric(float64(cpu)/float64(steps)/1000, "cpu-µs/step")
		})
	}
}

func newBenchRig(b *testing.B, cfg engine.Config, on bool) *rig {
	dev := sim.Config{Shallow: true, Layers: 1, KVHeads: 1, KVBlocks: 1 << 14}
	o := Options{Interval: 1 << 30}
	if on {
		o.Interval = 1
	}
	r := newRig(b, o, cfg, dev)
	b.Cleanup(r.stop)
	return r
}

func processor() int64 {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return use.Utime.Nano() + use.Stime.Nano()
}
