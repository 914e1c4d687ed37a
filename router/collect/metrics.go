package collect

import (
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/router/timeline"
)

// metrics counts what happens to records and lines.
type metrics struct {
	complete, incomplete, amended prometheus.Counter
	negative, violations          prometheus.Counter
	duplicates, bad, busy, probes prometheus.Counter
	shed, writeErrors, ackErrors  prometheus.Counter
	sealErrors, adopted           prometheus.Counter
	failing                       prometheus.Gauge
	queued                        prometheus.GaugeFunc
	unaccounted                   prometheus.Histogram
	spans                         *prometheus.HistogramVec
	bySpan                        map[string]prometheus.Observer // what spans has made; owned by Run
}

func newMetrics(c *Collector) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "meridian_timeline_" + name, Help: help})
	}
	buckets := prometheus.ExponentialBuckets(1e-5, 2.5, 18) // 10 µs to 58 s
	return &metrics{
		complete:    counter("complete_total", "Timelines written with every phase."),
		incomplete:  counter("incomplete_total", "Timelines written after the grace time with phases missing."),
		amended:     counter("amended_total", "Timelines written again because a phase came late."),
		negative:    counter("negative_spans_total", "Spans of negative duration."),
		violations:  counter("causality_violations_total", "Events before their cause by more than the clock bounds allow."),
		duplicates:  counter("duplicates_total", "Records that were delivered again."),
		bad:         counter("bad_records_total", "Messages that could not be read."),
		busy:        counter("busy_total", "Router records that took the way through the stream because the collector was busy."),
		probes:      counter("probes_total", "Records of probes, which have no timeline."),
		shed:        counter("shed_total", "Timelines written early because too many requests were open."),
		writeErrors: counter("write_errors_total", "Failed writes of timelines; they wait."),
		ackErrors:   counter("ack_errors_total", "Acknowledgements that could not be sent."),
		sealErrors:  counter("seal_errors_total", "Files of timelines that could not be indexed or compressed."),
		adopted:     counter("adopted_total", "Adoptions of the records of a router that is gone."),
		failing:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "meridian_timeline_write_failing", Help: "1 while timelines cannot be written: they wait in memory and in the stream."}),
		queued: prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "meridian_timeline_input_queue", Help: "Records that wait for the collector."},
			func() float64 { return float64(len(c.in)) }),
		unaccounted: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "meridian_timeline_unaccounted_seconds", Help: "Absolute time of requests that no span covers.", Buckets: buckets}),
		spans: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "meridian_span_seconds", Help: "Duration of the spans of requests.", Buckets: buckets},
			[]string{"span"}),
		bySpan: map[string]prometheus.Observer{},
	}
}

func (m *metrics) register(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{
		m.complete, m.incomplete, m.amended, m.negative, m.violations, m.duplicates, m.bad, m.busy, m.probes, m.shed, m.writeErrors, m.ackErrors, m.sealErrors, m.adopted, m.failing, m.queued,
		m.unaccounted, m.spans,
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

func (m *metrics) line(l *timeline.Line) {
	if l.Complete {
		m.complete.Inc()
	} else {
		m.incomplete.Inc()
	}
	m.negative.Add(float64(l.NegativeSpans))
	m.violations.Add(float64(len(l.Violations)))
	if l.UnaccountedNS != nil {
		m.unaccounted.Observe(abs(float64(*l.UnaccountedNS)) / 1e9)
	}
	for i := range l.Spans {
		name := l.Spans[i].Name
		h := m.bySpan[name]
		if h == nil {
			h = m.spans.WithLabelValues(name)
			m.bySpan[name] = h
		}
		h.Observe(float64(l.Spans[i].DurNS) / 1e9)
	}
}

func abs(x float64) float64 {
	if x < 0 {
		return -x
	}
	return x
}
