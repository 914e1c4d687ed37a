// Package summary owns what many timelines say together: percentiles per span, per node and per pair, and the slowest
// requests. It reads lines one after the other and keeps histograms, never the lines.
package summary

import (
	"math"
	"sort"
)

// histogram counts durations in buckets 1 % wide, so that a quantile is right within 0.5 %; negative ones too. The zero
// value is empty.
type histogram struct {
	buckets map[int32]int64 // key: 0 for 0, ±(1 + log of the value)
	n       int64
	sum     float64
	lo, hi  int64
}

// growth is the width of a bucket.
const growth = 1.01

var logGrowth = math.Log(growth)

func key(ns int64) int32 {
	switch {
	case ns == 0:
		return 0
	case ns < 0:
		return -key(-ns)
	}
	return 1 + int32(math.Log(float64(ns))/logGrowth)
}

// value is the middle of a bucket.
func value(k int32) int64 {
	switch {
	case k == 0:
		return 0
	case k < 0:
		return -value(-k)
	}
	return int64(math.Exp((float64(k-1) + 0.5) * logGrowth))
}

func (h *histogram) add(ns int64) {
	if h.buckets == nil {
		h.buckets = map[int32]int64{}
		h.lo, h.hi = ns, ns
	}
	h.buckets[key(ns)]++
	h.n++
	h.sum += float64(ns)
	h.lo, h.hi = min(h.lo, ns), max(h.hi, ns)
}

func (h *histogram) merge(o *histogram) {
	if o.n == 0 {
		return
	}
	if h.buckets == nil {
		h.buckets = map[int32]int64{}
		h.lo, h.hi = o.lo, o.hi
	}
	for k, n := range o.buckets {
		h.buckets[k] += n
	}
	h.n += o.n
	h.sum += o.sum
	h.lo, h.hi = min(h.lo, o.lo), max(h.hi, o.hi)
}

// Quantiles of one set of durations, in ns.
type Quantiles struct {
	N    int64 `json:"n"`
	Min  int64 `json:"min_ns"`
	P50  int64 `json:"p50_ns"`
	P90  int64 `json:"p90_ns"`
	P99  int64 `json:"p99_ns"`
	P999 int64 `json:"p999_ns"`
	Max  int64 `json:"max_ns"`
	Mean int64 `json:"mean_ns"`
}

func (h *histogram) quantiles() Quantiles {
	q := Quantiles{N: h.n, Min: h.lo, Max: h.hi}
	if h.n == 0 {
		return q
	}
	q.Mean = int64(h.sum / float64(h.n))
	keys := make([]int32, 0, len(h.buckets))
	for k := range h.buckets {
		keys = append(keys, k)
	}
	sort.Slice(keys, func(i, j int) bool { return keys[i] < keys[j] })
	want := []struct {
		at float64
		to *int64
	}{{0.5, &q.P50}, {0.9, &q.P90}, {0.99, &q.P99}, {0.999, &q.P999}}
	seen := int64(0)
	next := 0
	for _, k := range keys {
		seen += h.buckets[k]
		for next < len(want) && float64(seen) >= want[next].at*float64(h.n) {
			*want[next].to = max(h.lo, min(h.hi, value(k)))
			next++
		}
	}
	return q
}
