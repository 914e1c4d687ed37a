package ledger

import (
	"math"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/infer"
)

const gapBuckets = 21

// gapLimits are tokenBuckets in ns.
var gapLimits = [gapBuckets]int64{1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 3e7, 5e7, 75e6, 1e8, 15e7, 2e8, 3e8, 5e8, 75e7, 1e9, 25e8, 5e9, 1e10}

// Tokens are the times between the tokens of one request, and how likely these were, counted where they arise: one request,
// one goroutine, no lock. What nearly every token touches is at the front, within a cache line: with 256 requests a
// second line would cost more than all other accounting of a step.
type Tokens struct {
	lastNS int64
	// The bucket of the gap before, (above, limit]: the next gap is mostly in it. run counts those that are not in counts.
	above, limit int64
	run          uint32
	near         int32

	firstNS int64
	logprob float64 // sum; 0 if log probabilities were not asked for
	counts  [gapBuckets + 1]uint32
}

// Add takes in the next tokens of the request.
func (g *Tokens) Add(tokens []infer.Token) {
	for i := range tokens {
		at := tokens[i].AtNS
		if p := tokens[i].Logprob; p != 0 {
			g.logprob += float64(p)
		}
		gap := at - g.lastNS
		switch {
		case g.lastNS == 0:
			g.firstNS = at
		case gap > g.above && gap <= g.limit:
			g.run++
		default:
			g.settle()
			g.find(gap)
			g.run = 1
		}
		g.lastNS = at
	}
}

// settle puts the gaps that fell into the same bucket, one after the other, into the counts.
func (g *Tokens) settle() {
	g.counts[g.near] += g.run
	g.run = 0
}

// number of tokens, of which there was one at least; after settle.
func (g *Tokens) number() (n int) {
	for _, c := range g.counts {
		n += int(c)
	}
	return n + 1
}

// find looks for the bucket of a gap.
func (g *Tokens) find(gap int64) {
	k := 0
	for k < gapBuckets && gap > gapLimits[k] {
		k++
	}
	g.near, g.above, g.limit = int32(k), math.MinInt64, math.MaxInt64
	if k > 0 {
		g.above = gapLimits[k-1]
	}
	if k < gapBuckets {
		g.limit = gapLimits[k]
	}
}

// gapMetrics is the histogram of the times between tokens, under our name and, if asked for, under vLLM's. It takes whole
// requests: a histogram that is locked for each token of each request would cost more than all other accounting.
type gapMetrics struct {
	descs []*prometheus.Desc

	mu     sync.Mutex // guards what follows
	counts [gapBuckets + 1]uint64
	n      uint64
	sumNS  int64
}

func newGapMetrics(labels prometheus.Labels, vllm bool) *gapMetrics {
	const help = "Time from a token to the next of the same request, as the engine gave them."
	m := &gapMetrics{descs: []*prometheus.Desc{prometheus.NewDesc(prefix+"inter_token_latency_seconds", help, nil, labels)}}
	if vllm {
		m.descs = append(m.descs, prometheus.NewDesc(vllmPrefix+"inter_token_latency_seconds", help, nil, vllmLabels(labels["model_name"])))
	}
	return m
}

func (m *gapMetrics) add(g *Tokens) {
	g.settle()
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, c := range g.counts {
		m.counts[i] += uint64(c)
		m.n += uint64(c)
	}
	m.sumNS += g.lastNS - g.firstNS
}

// Describe sends the names.
func (m *gapMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range m.descs {
		to <- d
	}
}

// Collect sends the histogram.
func (m *gapMetrics) Collect(to chan<- prometheus.Metric) {
	m.mu.Lock()
	counts, n, sum := m.counts, m.n, m.sumNS
	m.mu.Unlock()
	buckets, below := make(map[float64]uint64, gapBuckets), uint64(0)
	for i, limit := range tokenBuckets() {
		below += counts[i]
		buckets[limit] = below
	}
	for _, d := range m.descs {
		to <- prometheus.MustNewConstHistogram(d, n, float64(sum)/1e9, buckets)
	}
}
