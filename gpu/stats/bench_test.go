package stats

import (
	"testing"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/rows"
)

// BenchmarkIterated is what making a row of each iteration adds to a step. Where the row goes is in shared/ledger.
func BenchmarkIterated(b *testing.B) {
	c, err := New(Options{Interval: 1, Put: func(*rows.Row) {}, Memory: func() rows.Memory { return rows.Memory{} }})
	if err != nil {
		b.Fatal(err)
	}
	it := engine.Iteration{Pool: kv.New(1<<20, 32, 1, kv.Events{}), NewRequests: 1, Completed: 1, OutputTokens: 256}
	it.BatchSize, it.DecodeSeqs = 256, 256
	b.ReportAllocs()
	for b.Loop() {
		it.Iter++
		c.Iterated(&it)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N), "ns/step")
}
