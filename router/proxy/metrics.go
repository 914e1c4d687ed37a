package proxy

import (
	"fmt"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/router/pool"
	"meridian.internal/shared/phase"
)

type metrics struct {
	requests  *prometheus.CounterVec
	inflight  prometheus.Gauge
	ttft      prometheus.Histogram
	itl       *gaps
	e2e       prometheus.Histogram
	overhead  prometheus.Histogram
	retries   *prometheus.CounterVec
	decisions *prometheus.CounterVec
	tokens    prometheus.Counter

	exemplarNS atomic.Int64 // when a request last gave its id

	resumes      prometheus.Counter
	retryRefused prometheus.Counter
	hedges       *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, h *health, d *door, b *bodies, p *pool.Pool) (*metrics, error) {
	seconds := prometheus.ExponentialBuckets(0.001, 2, 16)
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "meridian_router_requests_total", Help: "Requests by their end; each request counts once.",
		}, []string{"outcome", "stage"}),
		inflight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "meridian_router_requests_running", Help: "Requests that have not ended.",
		}),
		ttft: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "meridian_router_ttft_seconds", Help: "From the request's arrival to its first token at the router.", Buckets: seconds,
		}),
		itl: newGaps(),
		overhead: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "meridian_router_overhead_seconds", Help: "Time of a finished request inside the router, up to its first token: not that spent waiting for nodes.",
			Buckets: prometheus.ExponentialBuckets(0.00002, 2, 16),
		}),
		e2e: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "meridian_router_e2e_seconds", Help: "From the request's arrival to its last byte.", Buckets: seconds,
		}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "meridian_router_retries_total", Help: "Sub-requests that were tried again, by the stage that failed.",
		}, []string{"stage"}),
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "meridian_router_decisions_total", Help: "Placements by policy, serving style and reason: pair, aggregated, no_pair or local_cheaper.",
		}, []string{"policy", "style", "reason"}),
		tokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "meridian_router_output_tokens_total", Help: "Tokens of finished requests.",
		}),
		resumes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "meridian_router_resumes_total", Help: "Answers that went on at another node after their first token.",
		}),
		hedges: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "meridian_router_hedges_total", Help: "Second context legs beside a slow one, by whether they served.",
		}, []string{"result"}),
		retryRefused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "meridian_router_retries_refused_total", Help: "Retries that the budget had no room for.",
		}),
	}
	for _, result := range []string{"won", "lost"} {
		m.hedges.WithLabelValues(result)
	}
	for _, stage := range []string{"ctx", "kv", "gen", "place"} { // there from the start, at 0
		m.retries.WithLabelValues(stage)
	}
	for outcome, stages := range map[phase.Outcome][]string{ // likewise: alerts see the first of those that they ask for
		phase.Failed: {"ctx", "kv", "gen"}, phase.Expired: {"queue", "relay"}, phase.Rejected: {"place", "queue"},
	} {
		for _, stage := range stages {
			m.requests.WithLabelValues(string(outcome), stage)
		}
	}
	if r == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{
		m.requests, m.inflight, m.ttft, m.itl, m.e2e, m.overhead, m.retries, m.decisions, m.tokens, m.resumes, m.retryRefused, m.hedges, healthMetrics{h, d, b}, nodeMetrics{p}} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register metric: %w", err)
		}
	}
	return m, nil
}

// ended counts a request's end.
func (m *metrics) ended(outcome phase.Outcome, stage string) {
	m.requests.WithLabelValues(string(outcome), stage).Inc()
}

var (
	breakerState = prometheus.NewDesc("meridian_router_breaker_state",
		"Breakers that saw a failure since their last success: 0 closed, 1 half-open, 2 open.", []string{"leg", "node"}, nil)
	retryBudget = prometheus.NewDesc("meridian_router_retry_budget", "Retries that may follow now.", nil, nil)
	doorLoad    = prometheus.NewDesc("meridian_router_admission", "Sub-requests that were let in, and those that wait.", []string{"state"}, nil)
	doorLimit   = prometheus.NewDesc("meridian_router_admission_limit", "Sub-requests that may run at a time.", nil, nil)
	bodyBytes   = prometheus.NewDesc("meridian_router_body_bytes", "Memory of the bodies of requests that have not ended.", nil, nil)
)

// healthMetrics shows breakers, budget, door and bodies as they are at the scrape.
type healthMetrics struct {
	h *health
	d *door
	b *bodies
}

// Describe is prometheus.Collector's.
func (m healthMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- breakerState
	ch <- retryBudget
	ch <- doorLoad
	ch <- doorLimit
	ch <- bodyBytes
}

// Collect is prometheus.Collector's.
func (m healthMetrics) Collect(ch chan<- prometheus.Metric) {
	breakers, left := m.h.snapshot()
	for _, b := range breakers {
		ch <- prometheus.MustNewConstMetric(breakerState, prometheus.GaugeValue, float64(b.State), b.Leg, b.Node)
	}
	ch <- prometheus.MustNewConstMetric(retryBudget, prometheus.GaugeValue, left)
	running, waiting, limit := m.d.load()
	ch <- prometheus.MustNewConstMetric(doorLoad, prometheus.GaugeValue, float64(running), "running")
	ch <- prometheus.MustNewConstMetric(doorLoad, prometheus.GaugeValue, float64(waiting), "waiting")
	ch <- prometheus.MustNewConstMetric(doorLimit, prometheus.GaugeValue, float64(limit))
	ch <- prometheus.MustNewConstMetric(bodyBytes, prometheus.GaugeValue, float64(m.b.used.Load()))
}
