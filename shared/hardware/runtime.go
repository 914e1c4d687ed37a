package hardware

import (
	"math"
	"runtime/metrics"

	"meridian.internal/shared/rows"
)

const (
	heapName    = "/memory/classes/heap/objects:bytes"
	routineName = "/sched/goroutines:goroutines"
	cyclesName  = "/gc/cycles/total:gc-cycles"
	pauseName   = "/sched/pauses/total/gc:seconds"
)

// readRuntime reads what the Go runtime says of itself, without stopping it.
func readRuntime(n *Sample) {
	s := []metrics.Sample{{Name: heapName}, {Name: routineName}, {Name: cyclesName}, {Name: pauseName}}
	metrics.Read(s)
	for i, to := range []*rows.Int{&n.HeapBytes, &n.GoRoutines, &n.GCCycles} {
		if s[i].Value.Kind() == metrics.KindUint64 {
			*to = rows.Some(int64(s[i].Value.Uint64()))
		}
	}
	if s[3].Value.Kind() == metrics.KindFloat64Histogram {
		n.GCPause = rows.Ratio{V: sumOf(s[3].Value.Float64Histogram()), OK: true}
	}
}

// sumOf estimates the sum of a histogram's values by the middle of each bucket.
func sumOf(h *metrics.Float64Histogram) float64 {
	sum := 0.0
	for i, count := range h.Counts {
		low, high := h.Buckets[i], h.Buckets[i+1]
		switch {
		case math.IsInf(low, -1):
			low = high
		case math.IsInf(high, 1):
			high = low
		}
		sum += float64(count) * (low + high) / 2
	}
	return sum
}
