package proxy

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// observe counts the request. Exemplars carry the router's own id of it, under which its timeline is found.
func (s *session) observe(e *api.Error) {
	m, t := s.p.met, s.times
	if e != nil {
		m.ended(outcomeOf(e), e.Stage)
		return
	}
	m.ended(phase.Finished, "")
	var id prometheus.Labels
	if m.exemplarDue(t.end) {
		id = prometheus.Labels{"request_id": s.id}
	}
	exemplar(m.e2e, t.end-t.received, id)
	if a := s.subs[0].beginner(); a != nil && a.stamps.FirstTokenNS != nil {
		exemplar(m.ttft, *a.stamps.FirstTokenNS-t.received, id)
		exemplar(m.overhead, s.overheadNS(a), id)
	}
	m.tokens.Add(float64(s.usage().CompletionTokens))
}

// exemplarEvery is far below the usual interval of scrapes, which keep one of each bucket: more cost a request and are not
// seen.
const exemplarEvery = 20 * time.Millisecond

// exemplarDue tells whether the request that ends now gives its id to the histograms.
func (m *metrics) exemplarDue(now int64) bool {
	last := m.exemplarNS.Load()
	return now-last >= int64(exemplarEvery) && m.exemplarNS.CompareAndSwap(last, now)
}

// exemplar observes a time; id nil: without an exemplar.
func exemplar(h prometheus.Histogram, ns int64, id prometheus.Labels) {
	if o, ok := h.(prometheus.ExemplarObserver); ok && id != nil {
		o.ObserveWithExemplar(float64(ns)/1e9, id)
		return
	}
	h.Observe(float64(ns) / 1e9)
}

// overheadNS is what the router itself took of the way to the first token: from the request's arrival to its first leg, from what
// one leg answered to the sending of the other, and from the first token's arrival to its sending.
func (s *session) overheadNS(a *attempt) int64 {
	t := &a.stamps
	total := int64(0)
	add := func(from, to *int64) {
		if from != nil && to != nil && *to > *from {
			total += *to - *from
		}
	}
	first := t.GenDispatchNS
	if t.CtxDispatchNS != nil && (first == nil || *t.CtxDispatchNS < *first) {
		first = t.CtxDispatchNS
		add(t.CtxDoneNS, t.GenDispatchNS)
	} else {
		add(t.CtxPrepareNS, t.CtxDispatchNS)
	}
	add(&s.times.received, first)
	if s.times.admitted != 0 {
		total -= s.times.admitted - s.times.parsed // the wait for room is the nodes'
	}
	add(t.FirstTokenNS, t.FirstTokenSentNS)
	return total
}

var (
	nodeReserved = prometheus.NewDesc("meridian_router_reserved_legs", "Legs that this router has given to a node and not got back.", []string{"role", "node"}, nil)
	nodeLoadAge  = prometheus.NewDesc("meridian_router_load_age_seconds", "Age of the load that a node reported last; absent: it reported none.", []string{"role", "node"}, nil)
	nodeStale    = prometheus.NewDesc("meridian_router_load_stale", "1 while the load of a node is too old to be believed.", []string{"role", "node"}, nil)
	nodeHealthy  = prometheus.NewDesc("meridian_router_node_healthy", "1 while a node passes its health checks.", []string{"role", "node"}, nil)
)

// nodeMetrics shows the members as they are at the scrape.
type nodeMetrics struct{ p *pool.Pool }

// Describe is prometheus.Collector's.
func (m nodeMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{nodeReserved, nodeLoadAge, nodeStale, nodeHealthy} {
		ch <- d
	}
}

// Collect is prometheus.Collector's.
func (m nodeMetrics) Collect(ch chan<- prometheus.Metric) {
	seen := map[[2]string]bool{} // a node may be a static one and a registered one: two samples would spoil the scrape
	for _, st := range m.p.Snapshot() {
		k := [2]string{string(st.Info.Role), st.Info.Name}
		if seen[k] {
			continue
		}
		seen[k] = true
		gauge := func(d *prometheus.Desc, v float64) {
			if x, err := prometheus.NewConstMetric(d, prometheus.GaugeValue, v, string(st.Info.Role), st.Info.Name); err == nil { // a name that is no UTF-8 is no label
				ch <- x
			}
		}
		gauge(nodeReserved, float64(st.Reserved))
		gauge(nodeHealthy, one01(st.Healthy))
		gauge(nodeStale, one01(st.LoadStale))
		if st.LoadAgeNS != nil {
			gauge(nodeLoadAge, float64(*st.LoadAgeNS)/1e9)
		}
	}
}

func one01(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
