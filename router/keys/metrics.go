package keys

import "github.com/prometheus/client_golang/prometheus"

// Metrics says how many keys are in force, and whether the file that is there now is.
func (s *Store) Metrics() prometheus.Collector { return collector{s} }

type collector struct{ s *Store }

var (
	descKeys = prometheus.NewDesc("meridian_router_api_keys", "API keys in force.", nil, nil)
	descBad  = prometheus.NewDesc("meridian_router_api_keys_stale", "1 while the file of API keys cannot be used and the keys before it are in force.", nil, nil)
)

// Describe names the metrics.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- descKeys; ch <- descBad }

// Collect reads them.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	stale := 0.0
	if c.s.Err() != nil {
		stale = 1
	}
	ch <- prometheus.MustNewConstMetric(descKeys, prometheus.GaugeValue, float64(c.s.Len()))
	ch <- prometheus.MustNewConstMetric(descBad, prometheus.GaugeValue, stale)
}
