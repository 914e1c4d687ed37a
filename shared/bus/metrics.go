package bus

import "github.com/prometheus/client_golang/prometheus"

// Register exports the publisher's counts: emitted = stored + dropped once nothing is pending.
func (p *Publisher) Register(reg prometheus.Registerer) error {
	type metric struct {
		name, help string
		value      func(Stats) int64
		gauge      bool
	}
	for _, m := range []metric{
		{"meridian_phase_emitted_total", "Phase messages given to the publisher, those of an earlier process included.", func(s Stats) int64 { return s.Emitted + s.Recovered }, false},
		{"meridian_phase_stored_total", "Phase messages acknowledged by JetStream.", func(s Stats) int64 { return s.Stored }, false},
		{"meridian_phase_dropped_total", "Phase messages lost: spool and memory were full, or one was larger than a stream takes.", func(s Stats) int64 { return s.Dropped }, false},
		{"meridian_phase_pending", "Phase messages on their way to JetStream.", func(s Stats) int64 { return s.Pending }, true},
		{"meridian_phase_spool_bytes", "Size of the spool on disk.", func(s Stats) int64 { return s.Bytes }, true},
	} {
		value := func() float64 { return float64(m.value(p.Stats())) }
		var c prometheus.Collector
		if m.gauge {
			c = prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: m.name, Help: m.help}, value)
		} else {
			c = prometheus.NewCounterFunc(prometheus.CounterOpts{Name: m.name, Help: m.help}, value)
		}
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
