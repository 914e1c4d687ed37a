package load

import (
	"maps"
	"math"
	"slices"
)

// growth is the width of a histogram bucket: a percentile is within 0.5 % of the truth.
const growth = 1.01

// Histogram holds durations in ns in buckets that grow by 1 %, so that its size does not depend on how many there are.
// The zero value is empty.
type Histogram struct {
	buckets  map[int]int64
	n        int64
	sum      float64
	min, max int64
}

// Add counts one duration; a negative one counts as 0.
func (h *Histogram) Add(ns int64) {
	ns = max(ns, 0)
	if h.n == 0 {
		h.buckets, h.min, h.max = map[int]int64{}, ns, ns
	}
	h.n++
	h.sum += float64(ns)
	h.min, h.max = min(h.min, ns), max(h.max, ns)
	h.buckets[bucket(ns)]++
}

func bucket(ns int64) int {
	if ns < 1 {
		return -1
	}
	return int(math.Log(float64(ns)) / math.Log(growth))
}

// Stats are the numbers of a histogram in ns; null without samples.
type Stats struct {
	Count int64  `json:"count"`
	Mean  *int64 `json:"mean_ns"`
	Min   *int64 `json:"min_ns"`
	P50   *int64 `json:"p50_ns"`
	P90   *int64 `json:"p90_ns"`
	P95   *int64 `json:"p95_ns"`
	P99   *int64 `json:"p99_ns"`
	Max   *int64 `json:"max_ns"`
}

// Stats summarises the histogram.
func (h *Histogram) Stats() Stats {
	if h.n == 0 {
		return Stats{}
	}
	mean, least, most := int64(h.sum/float64(h.n)), h.min, h.max
	return Stats{
		Count: h.n, Mean: &mean, Min: &least, Max: &most,
		P50: h.percentile(0.50), P90: h.percentile(0.90), P95: h.percentile(0.95), P99: h.percentile(0.99),
	}
}

// percentile is the nearest-rank percentile: the least value that at least q of all do not exceed.
func (h *Histogram) percentile(q float64) *int64 {
	rank := int64(math.Ceil(q * float64(h.n)))
	var seen int64
	v := h.max
	for _, b := range slices.Sorted(maps.Keys(h.buckets)) {
		if seen += h.buckets[b]; seen >= rank {
			v = int64(math.Pow(growth, float64(b)+0.5))
			break
		}
	}
	v = min(max(v, h.min), h.max)
	return &v
}
