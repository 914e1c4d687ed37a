package service

import (
	"net/http"
	"slices"
	"strings"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/clocksync/track"
	"meridian.internal/clocksync/utc"
	"meridian.internal/shared/clock"
)

// Row is one estimate on GET /clocks: offset = reference - local. Several routers make several rows per node.
type Row struct {
	Node       string      `json:"node"`
	Reference  string      `json:"reference"` // the router, or this daemon itself
	OffsetNS   *int64      `json:"offset_ns"` // null: not known
	SkewPPB    *int64      `json:"skew_ppb"`
	LowerNS    *int64      `json:"lower_ns"`
	UpperNS    *int64      `json:"upper_ns"`
	BoundNS    *int64      `json:"bound_ns"`
	State      clock.State `json:"state"`
	Transport  string      `json:"transport"`
	Via        string      `json:"via"`
	AgeNS      *int64      `json:"age_ns"` // since the newest burst; null: there was none
	RTTNS      int64       `json:"rtt_ns"`
	Samples    int64       `json:"samples"`
	AtNS       int64       `json:"at_ns"`
	LocalID    clock.ID    `json:"local_id"`
	RefID      clock.ID    `json:"reference_id"`
	Violations int64       `json:"violations"`
	Steps      int64       `json:"steps"`
	EtaPPMPerS float64     `json:"eta_ppm_per_s"`
	LastError  string      `json:"last_error,omitempty"`
}

// Clocks is the body of GET /clocks.
type Clocks struct {
	Clocks []Row  `json:"clocks"`
	Name   string `json:"name"`
	Leads  bool   `json:"leads"`
	// UTC against this daemon's clock; null: no server is configured, or no majority of them agrees.
	UTC        *utc.State   `json:"utc"`
	UTCServers []utc.Server `json:"utc_servers"`
}

// Routes adds GET /clocks.
func (s *Service) Routes(e *echo.Echo) {
	e.GET("/clocks", func(c echo.Context) error {
		return c.JSON(http.StatusOK, s.Clocks())
	})
}

// Clocks states everything that is known.
func (s *Service) Clocks() Clocks {
	c := Clocks{Clocks: s.Rows(), Name: s.opts.Name, Leads: s.lead.held(), UTCServers: []utc.Server{}}
	if s.opts.UTC != nil {
		st, ok := s.opts.UTC.Now()
		c.UTCServers = st.Servers
		if ok {
			c.UTC = &st
		}
	}
	return c
}

// Rows states every estimate: each node against each router, and all against this daemon.
func (s *Service) Rows() []Row {
	roles := s.snapshot()
	stats := s.tracker.Statuses()
	rows := []Row{}
	for _, st := range stats {
		r, ok := roles[st.Peer.Name]
		if !ok {
			continue
		}
		if !r.router {
			for _, p := range s.pairs(st.Peer.Name, st.Estimate) {
				rows = append(rows, row(p.Node, p.Router, p.Estimate, st))
			}
		}
	}
	for _, st := range stats {
		if r, ok := roles[st.Peer.Name]; ok {
			rows = append(rows, row(r.name, s.opts.Name, st.Estimate, st))
		}
	}
	slices.SortStableFunc(rows, func(a, b Row) int {
		if (a.Reference == s.opts.Name) != (b.Reference == s.opts.Name) {
			if a.Reference == s.opts.Name {
				return 1
			}
			return -1
		}
		return strings.Compare(a.Node+"\x00"+a.Reference, b.Node+"\x00"+b.Reference)
	})
	return rows
}

func row(node, reference string, e clock.Estimate, st track.Status) Row {
	r := Row{
		Node: node, Reference: reference, State: e.State, Transport: e.Transport, Via: e.Via, RTTNS: e.RTTNS, Samples: e.Samples,
		AtNS: e.AtNS, LocalID: e.Local, RefID: e.Reference, Violations: st.Stats.Violations + st.Stats.Infeasible, Steps: st.Stats.Steps,
		EtaPPMPerS: st.Stats.EtaPPMPerS, LastError: st.LastErr,
	}
	if e.State != clock.Joining || e.LowerNS < e.UpperNS {
		bound := e.BoundNS()
		r.OffsetNS, r.SkewPPB, r.LowerNS, r.UpperNS, r.BoundNS = &e.OffsetNS, &e.SkewPPB, &e.LowerNS, &e.UpperNS, &bound
	}
	if st.AgeNS >= 0 {
		r.AgeNS = &st.AgeNS
	}
	return r
}

// states are all that the state metric shows.
var states = [...]clock.State{clock.Joining, clock.Synced, clock.Holdover, clock.Suspect, clock.Quarantined, clock.Void, clock.Identity}

// metrics shows the rows to Prometheus; they are computed when it asks.
type metrics struct{ s *Service }

// Register adds the metrics of the daemon.
func (s *Service) Register(reg prometheus.Registerer) error { return reg.Register(metrics{s}) }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("meridian_clock_"+name, help, labels, nil)
}

// Describe is empty: the rows come and go.
func (m metrics) Describe(chan<- *prometheus.Desc) {}

// Collect states each row.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(name, help string, v float64, r Row, more ...string) {
		labels := []string{"node", "reference"}
		values := append([]string{r.Node, r.Reference}, more...)
		if len(more) > 0 {
			labels = append(labels, strings.TrimSuffix(name, "_info"))
		}
		ch <- prometheus.MustNewConstMetric(desc(name, help, labels...), prometheus.GaugeValue, v, values...)
	}
	shown := map[[2]string]bool{} // names may be given twice, in two roles: two samples with the same labels would spoil the scrape
	for _, r := range m.s.Rows() {
		k := [2]string{r.Node, r.Reference}
		if shown[k] {
			continue
		}
		shown[k] = true
		if r.OffsetNS != nil {
			gauge("offset_seconds", "reference - local", float64(*r.OffsetNS)*1e-9, r)
			gauge("bound_seconds", "how far the offset may be off", float64(*r.BoundNS)*1e-9, r)
			gauge("skew_ppm", "rate difference", float64(*r.SkewPPB)*1e-3, r)
		}
		if r.AgeNS != nil {
			gauge("age_seconds", "since the newest burst", float64(*r.AgeNS)*1e-9, r)
		}
		gauge("rtt_seconds", "least round trip of the newest burst", float64(r.RTTNS)*1e-9, r)
		gauge("transport_info", "how the exchanges travel", 1, r, r.Transport)
		for _, s := range states {
			v := 0.0
			if s == r.State {
				v = 1
			}
			gauge("state_info", "1 for the state that the estimate is in", v, r, s)
		}
	}
	m.counters(ch)
}

func (m metrics) counters(ch chan<- prometheus.Metric) {
	count := func(name, help string, v int64, labels, values []string) {
		ch <- prometheus.MustNewConstMetric(desc(name, help, labels...), prometheus.CounterValue, float64(v), values...)
	}
	roles, shown := m.s.snapshot(), map[string]bool{}
	for _, st := range m.s.tracker.Statuses() {
		r, ok := roles[st.Peer.Name]
		if !ok || shown[r.name] {
			continue
		}
		shown[r.name] = true
		l, v := []string{"node"}, []string{r.name}
		count("exchanges_total", "exchanges used", st.Stats.Exchanges, l, v)
		count("lost_total", "exchanges without reply", st.Lost, l, v)
		count("failed_bursts_total", "bursts without any reply", st.Failed, l, v)
		count("impossible_total", "exchanges that causality forbids", st.Stats.Impossible, l, v)
		count("steps_total", "steps of the clock", st.Stats.Steps, l, v)
		count("assumption_violations_total", "predictions that the declared limits did not hold", st.Stats.Violations+st.Stats.Infeasible, l, v)
		count("conflicts_total", "times that two processes claimed the name", st.Conflicts, l, v)
	}
	if c := m.s.Clocks(); c.UTC != nil {
		ch <- prometheus.MustNewConstMetric(desc("utc_bound_seconds", "how far UTC may be off"), prometheus.GaugeValue, float64(c.UTC.Bound)*1e-9)
		ch <- prometheus.MustNewConstMetric(desc("utc_agree", "NTP servers that agree"), prometheus.GaugeValue, float64(c.UTC.Agree))
	}
	count("published_total", "estimates put into the bucket", m.s.out.published.Load(), nil, nil)
	count("publish_dropped_total", "log entries dropped, NATS being slow or away", m.s.out.dropped.Load()+m.s.out.failed.Load(), nil, nil)
	count("pushed_total", "offsets that nodes took", m.s.push.pushed.Load(), nil, nil)
	count("push_refused_total", "offsets that nodes refused", m.s.push.refused.Load(), nil, nil)
	count("lead_taken_total", "times that this daemon took the lead", m.s.lead.taken.Load(), nil, nil)
}
