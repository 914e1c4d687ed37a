package clocks

import (
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/clocksync/track"
)

var (
	exchangesDesc = prometheus.NewDesc("meridian_router_clock_exchanges_total",
		"Routed requests that were clock exchanges too, by whether they agree with what is known of the node's clock.", []string{"result"}, nil)
	contradictedDesc = prometheus.NewDesc("meridian_router_clock_contradictions_total",
		"Messages of requests that were received before they were sent by more than the clock bounds allow.", nil, nil)
	wrongDesc = prometheus.NewDesc("meridian_router_clock_wrong", "1 for a node whose clock the messages of the last minutes prove wrong.", []string{"node"}, nil)
)

// Describe is empty: nodes come and go.
func (b *Book) Describe(chan<- *prometheus.Desc) {}

// Collect states what requests proved of the clocks.
func (b *Book) Collect(ch chan<- prometheus.Metric) {
	for h, name := range map[track.Hinted]string{track.HintUnknown: "unknown", track.HintAgrees: "agrees", track.HintContradicts: "contradicts"} {
		ch <- prometheus.MustNewConstMetric(exchangesDesc, prometheus.CounterValue, float64(b.hints[h].Load()), name)
	}
	ch <- prometheus.MustNewConstMetric(contradictedDesc, prometheus.CounterValue, float64(b.witness.messages()))
	for _, name := range b.witness.named() {
		ch <- prometheus.MustNewConstMetric(wrongDesc, prometheus.GaugeValue, 1, name)
	}
}
