package stats

import (
	"fmt"
	"slices"
	"testing"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/rows"
)

// BenchmarkIterated is what making a row of each iteration, with KV statistics, adds to a step: how many blocks there are does not
// matter, how many groups of layers does, of which a row has at most eight. Where the row goes is in shared/ledger.
func BenchmarkIterated(b *testing.B) {
	for _, bb := range []struct{ groups, blocks int }{{1, 1 << 10}, {1, 1 << 20}, {3, 1 << 20}, {rows.MaxGroups, 1 << 20}} {
		groups := bb.groups
		b.Run(fmt.Sprintf("groups=%d/blocks=%d", groups, bb.blocks), func(b *testing.B) {
			it := engine.Iteration{Pool: kv.New(bb.blocks/groups, 32, 1, kv.Events{}), NewRequests: 1, Completed: 1, OutputTokens: 256}
			for i := range groups - 1 {
				it.Pool.AddWindow(32*(i+1), bb.blocks/groups, 4096)
			}
			it.WindowDecodeBlocks = make([]int, groups-1)
			c, err := New(Options{
				Interval: 1, BlockBytes: slices.Repeat([]int{1 << 16}, groups), Put: func(*rows.Row) {}, Memory: func() rows.Memory { return rows.Memory{} },
			})
			if err != nil {
				b.Fatal(err)
			}
			it.BatchSize, it.DecodeSeqs = 256, 256
			b.ReportAllocs()
			for b.Loop() {
				it.Iter++
				c.Iterated(&it)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N), "ns/step")
		})
	}
}
