// Package summary owns what many timelines say together: percentiles per span, per node and per pair, and the slowest
// requests. It reads lines one after the other and keeps histograms, never the lines.
package summary

import "math"

// histogram counts durations in buckets 1 % wide, so that a quantile is right within 0.5 %; negative ones too. The zero
// value is empty.
type histogram struct {
	buckets []int64 // of the keys from base on; key: 0 for 0, ±(1 + log of the value)
	base    int32
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
		return -key(-max(ns, -math.MaxInt64)) // the least of all has no opposite
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

func (h *histogram) add(ns int64) { h.addKey(key(ns), ns) }

// addKey is add for whoever has the key of ns already.
func (h *histogram) addKey(k int32, ns int64) {
	if h.n == 0 {
		h.lo, h.hi = ns, ns
	}
	*h.bucket(k)++
	h.n++
	h.sum += float64(ns)
	h.lo, h.hi = min(h.lo, ns), max(h.hi, ns)
}

// spare is how many buckets are made beyond the one that is wanted.
const spare = 64

// bucket finds the bucket of a key, made where there is none.
func (h *histogram) bucket(k int32) *int64 {
	if i := int(k) - int(h.base); i >= 0 && i < len(h.buckets) {
		return &h.buckets[i]
	}
	base, end := k-spare, k+spare
	if len(h.buckets) == 0 {
		h.base = base
	}
	base, end = min(base, h.base), max(end, h.base+int32(len(h.buckets)))
	wider := make([]int64, end-base)
	copy(wider[h.base-base:], h.buckets)
	h.buckets, h.base = wider, base
	return &h.buckets[k-base]
}

func (h *histogram) merge(o *histogram) {
	if o.n == 0 {
		return
	}
	if h.n == 0 {
		h.lo, h.hi = o.lo, o.hi
	}
	for i, n := range o.buckets {
		if n > 0 {
			*h.bucket(o.base + int32(i)) += n
		}
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
	n := float64(h.n)
	q.Mean = int64(h.sum / n)
	q.P50, q.P90, q.P99, q.P999 = h.rank(0.5*n), h.rank(0.9*n), h.rank(0.99*n), h.rank(0.999*n)
	return q
}

// rank is the value at a rank, within half a percent.
func (h *histogram) rank(r float64) int64 {
	seen := int64(0)
	for i, n := range h.buckets {
		if seen += n; n > 0 && float64(seen) >= r {
			return max(h.lo, min(h.hi, value(h.base+int32(i))))
		}
	}
	return h.hi
}
