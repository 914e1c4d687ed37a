package proxy

import (
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// gaps is the histogram of the time between tokens. Those that are read together are counted together: a histogram of the library
// takes one value at a time, and costs as much as all else that is done with a token.
type gaps struct {
	desc   *prometheus.Desc
	bounds []float64       // in seconds
	counts []atomic.Uint64 // of each bound, and of what is above all
	sumNS  atomic.Int64
}

func newGaps() *gaps {
	g := &gaps{
		desc:   prometheus.NewDesc("meridian_router_itl_seconds", "Between two arrivals of tokens of one choice at the router.", nil, nil),
		bounds: prometheus.ExponentialBuckets(0.0005, 2, 14),
	}
	g.counts = make([]atomic.Uint64, len(g.bounds)+1)
	return g
}

// add counts n tokens that were read together: the first came ns after the token before, the others with it.
func (g *gaps) add(ns int64, n int) {
	if n == 0 {
		return
	}
	i, _ := slices.BinarySearch(g.bounds, float64(ns)/1e9) // a bound belongs to its bucket
	g.counts[i].Add(1)
	g.sumNS.Add(ns)
	if n > 1 {
		g.counts[0].Add(uint64(n - 1))
	}
}

// Describe is prometheus.Collector's.
func (g *gaps) Describe(ch chan<- *prometheus.Desc) { ch <- g.desc }

// Collect is prometheus.Collector's.
func (g *gaps) Collect(ch chan<- prometheus.Metric) {
	below, total := map[float64]uint64{}, uint64(0)
	for i, b := range g.bounds {
		total += g.counts[i].Load()
		below[b] = total
	}
	total += g.counts[len(g.bounds)].Load()
	ch <- prometheus.MustNewConstHistogram(g.desc, total, float64(g.sumNS.Load())/1e9, below)
}
