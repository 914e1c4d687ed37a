package worker

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// metrics of a node's requests and of the engine's load. Probes have a counter of their own and are in no other.
type metrics struct {
	requests *prometheus.CounterVec // by kind of work and outcome
	probes   *prometheus.CounterVec
	tokens   *prometheus.CounterVec // by direction
	kvBytes  prometheus.Counter
}

func newMetrics(o Options) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "meridian_node_requests_total",
			Help: "Attempts that ended on this node, by serving style and outcome."}, []string{"style", "outcome"}),
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "meridian_node_probes_total",
			Help: "Probe attempts that ended on this node; they are counted nowhere else."}, []string{"outcome"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "meridian_node_tokens_total",
			Help: "Tokens of ended attempts: prompt, cached (part of prompt), output."}, []string{"kind"}),
		kvBytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "meridian_node_kv_transfer_bytes_total",
			Help: "KV bytes that crossed the network, headers not counted."}),
	}
	if o.Registry == nil {
		return m, nil
	}
	all := []prometheus.Collector{m.requests, m.probes, m.tokens, m.kvBytes}
	if o.Load != nil {
		all = append(all, loadGauges(o.Load)...)
	}
	for _, c := range all {
		if err := o.Registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics of node %s: %w", o.Name, err)
		}
	}
	return m, nil
}

func loadGauges(load func() infer.Load) []prometheus.Collector {
	var out []prometheus.Collector
	for _, g := range []struct {
		name, help string
		value      func(infer.Load) int
	}{
		{"meridian_engine_running", "Sequences that hold a slot.", func(l infer.Load) int { return l.Running }},
		{"meridian_engine_waiting", "Sequences in the queue.", func(l infer.Load) int { return l.Waiting }},
		{"meridian_engine_waiting_tokens", "Prompt tokens not yet prefilled.", func(l infer.Load) int { return l.WaitingTokens }},
		{"meridian_engine_kv_used_blocks", "KV blocks held by requests and transfers.", func(l infer.Load) int { return l.KVUsedBlocks }},
		{"meridian_engine_kv_max_blocks", "KV blocks in all.", func(l infer.Load) int { return l.KVMaxBlocks }},
	} {
		out = append(out, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: g.name, Help: g.help}, func() float64 { return float64(g.value(load())) }))
	}
	return append(out, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "meridian_engine_iterations_total",
		Help: "Iterations of the engine."}, func() float64 { return float64(load().Iter) }))
}

func (m *metrics) count(rec *phase.Record) {
	if rec.Probe {
		m.probes.WithLabelValues(string(rec.Outcome)).Inc()
		return
	}
	m.requests.WithLabelValues(rec.Style, string(rec.Outcome)).Inc()
	m.tokens.WithLabelValues("prompt").Add(float64(rec.Tokens.Prompt))
	m.tokens.WithLabelValues("cached").Add(float64(rec.Tokens.Cached))
	m.tokens.WithLabelValues("output").Add(float64(rec.Tokens.Output))
	if rec.Transfer != nil {
		m.kvBytes.Add(float64(rec.Transfer.Bytes))
	}
}
