package ledger

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

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

func (m *gapMetrics) add(g *Gaps) {
	if g == nil || g.n == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, c := range g.counts {
		m.counts[i] += uint64(c)
	}
	m.n += g.n
	m.sumNS += g.sumNS
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
