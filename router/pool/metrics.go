package pool

import (
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/node"
)

// metrics exports the pool's state when it is scraped.
type metrics struct{ p *Pool }

// Metrics is the pool as a collector of Prometheus.
func (p *Pool) Metrics() prometheus.Collector { return metrics{p} }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("meridian_router_"+name, help, labels, nil)
}

var (
	descNodes    = desc("nodes", "Members by role and state.", "role", "state")
	descReserved = desc("reservations", "Legs that have reserved a place on a node and not given it back.", "role")
	descUnseen   = desc("reservations_unseen", "Reservations that no load report of the node includes yet.", "role")
	descOthers   = desc("reservations_of_others", "Legs of other routers that no load report of the node includes yet.", "role")
	descAge      = desc("oldest_load_age_seconds", "Age of the oldest load of a node that may get work.", "role")
	descStale    = desc("loads_stale", "Nodes whose load is too old to be believed, or unknown.", "role")
	descExpired  = desc("reservations_expired_total", "Reservations that nobody released in time. Anything but 0 is a fault of the router.")
	descMatched  = desc("matched_tokens_total", "Prompt tokens whose KV the chosen node held already, as the prefix index knew.")
	descPlaced   = desc("matchable_tokens_total", "Prompt tokens that were looked up in the prefix index.")
	descBorrowed = desc("kv_fetches_total", "Requests whose generation node was sent to a peer for cached KV.")
	descPairs    = desc("pairs", "Pairs of nodes, and nodes alone, by the state of their qualification.", "state")
	descProbes   = desc("probes_total", "Probes that ended, by outcome. They are in no other count of requests.", "outcome")
	descBlocks   = desc("prefix_blocks", "KV blocks in the prefix index, counted once for each node that holds them.")
	descDropped  = desc("prefix_blocks_dropped_total", "KV blocks that were left out because the prefix index is full.")
	descGaps     = desc("prefix_gaps_total", "Times that KV events of a node were missing; a snapshot repairs each.")
	descBehind   = desc("prefix_behind", "Nodes of which a snapshot of KV blocks is awaited.")
)

// Describe implements prometheus.Collector.
func (x metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descNodes, descReserved, descUnseen, descOthers, descAge, descStale, descExpired, descMatched, descPlaced, descBorrowed, descPairs, descProbes,
		descBlocks, descDropped, descGaps, descBehind,
	} {
		ch <- d
	}
}

// sums of one role.
type sums struct {
	states                   map[string]int
	reserved, unseen, others int
	stale                    int
	oldestNS                 int64
}

// Collect implements prometheus.Collector.
func (x metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	roles, pairs, c := x.p.sum()
	for role, s := range roles {
		for state, n := range s.states {
			gauge(descNodes, float64(n), string(role), state)
		}
		gauge(descReserved, float64(s.reserved), string(role))
		gauge(descUnseen, float64(s.unseen), string(role))
		gauge(descOthers, float64(s.others), string(role))
		gauge(descStale, float64(s.stale), string(role))
		gauge(descAge, float64(s.oldestNS)/1e9, string(role))
	}
	for state, n := range pairs {
		gauge(descPairs, float64(n), string(state))
	}
	counter(descExpired, c.expired)
	counter(descMatched, c.matchedTokens)
	counter(descPlaced, c.placedTokens)
	counter(descBorrowed, c.borrowed)
	counter(descProbes, c.probes[0], "failed")
	counter(descProbes, c.probes[1], "passed")
	if x.p.o.Index != nil {
		st := x.p.o.Index.Stats()
		gauge(descBlocks, float64(st.Blocks))
		counter(descDropped, st.Dropped)
		counter(descGaps, st.Gaps)
		gauge(descBehind, float64(st.Behind))
	}
}

func (p *Pool) sum() (map[node.Role]*sums, map[QualState]int, counts) {
	now := p.o.Now()
	roles := map[node.Role]*sums{node.RoleCtx: {states: map[string]int{}}, node.RoleGen: {states: map[string]int{}}}
	pairs := map[QualState]int{Unproven: 0, Qualified: 0, Refused: 0}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		s := roles[m.info.Role]
		state := string(m.info.State)
		if !m.healthy {
			state = "unhealthy"
		}
		s.states[state]++
		u := m.unreported()
		s.reserved += m.all.CtxLegs + m.all.GenLegs
		s.unseen += u.CtxLegs + u.GenLegs
		s.others += m.others.CtxLegs + m.others.GenLegs
		if m.usable() {
			if !m.load.known || m.load.stale {
				s.stale++
			}
			if m.load.known {
				s.oldestNS = max(s.oldestNS, now-m.load.atNS)
			}
		}
		for _, w := range m.pairs {
			pairs[w.state]++
		}
		if m.alone.atNS != 0 {
			pairs[m.alone.state]++
		}
	}
	return roles, pairs, p.counts
}
