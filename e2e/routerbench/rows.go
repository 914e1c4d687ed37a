package routerbench

import (
	"math"
	"slices"
)

// row is one line of the table: what is measured, how it compares, and what it must reach.
type row struct {
	title   string
	load    string                // "": measured on its own, see extra
	value   func(*sample) float64 // of one turn
	unit    string
	compare comparison
	goal    float64
	least   bool // the goal is a least value, not a largest
}

type comparison int

const (
	plain   comparison = iota
	toNaive            // divided by the naive router's value of the same round
	added              // over the direct legs' value of the same round
)

const (
	memoryTitle  = "memory of an open stream"
	leavingTitle = "a client's leaving seen by the worker, slowest"
)

func rows() []row {
	perSecond := func(s *sample) float64 { return s.perSecond(s.requests) }
	tokens := func(s *sample) float64 { return s.perSecond(s.tokens) }
	return []row{
		{"t1 c16", "t1-c16", perSecond, "req/s", toNaive, 1.8, true},
		{"t64 c16", "t64-c16", tokens, "tok/s", toNaive, 1.35, true},
		{"t256 c64", "t256-c64", tokens, "tok/s", toNaive, 1.05, true},
		{"64 KB prompt c16", "64KB-c16", perSecond, "req/s", toNaive, 3.4, true},
		{"CPU per request, t1 c16", "t1-c16", func(s *sample) float64 { return us(s) / float64(s.requests) }, "us", toNaive, 0.45, false},
		{"CPU per paced token", "paced-c128", func(s *sample) float64 { return us(s) / float64(s.tokens) }, "us", toNaive, 0.72, false},
		{"forwarding delay p99", "paced-c128", func(s *sample) float64 { return percentile(s.delay, 0.99) / 1e6 }, "ms", plain, 2, false},
		{"t1 c1 added, p50", "t1-c1", func(s *sample) float64 { return percentile(s.latency, 0.50) / 1e6 }, "ms", added, 0.15, false},
		{"t1 c1 added, p99", "t1-c1", func(s *sample) float64 { return percentile(s.latency, 0.99) / 1e6 }, "ms", added, 0.5, false},
		{title: memoryTitle, unit: "KiB", goal: 30},
		{title: leavingTitle, unit: "ms", goal: 5},
	}
}

func us(s *sample) float64 { return float64(s.cpu.Nanoseconds()) / 1e3 }

// Cell is one subject's value of a row: absolute, and as the row compares it. NaN: not measured.
type Cell struct{ Value, Compared float64 }

var missing = Cell{math.NaN(), math.NaN()}

// cells computes a row: medians over the rounds.
func (r row) cells(samples map[string]map[string][]*sample) map[string]Cell {
	of := samples[r.load]
	out := map[string]Cell{}
	for name, turns := range of {
		var values, compared []float64
		for round, s := range turns {
			v := r.value(s)
			values = append(values, v)
			switch r.compare {
			case toNaive:
				v /= r.of(of["naive"], round)
			case added:
				v -= r.of(of["direct"], round)
			case plain:
			}
			compared = append(compared, v)
		}
		out[name] = Cell{median(values), median(compared)}
	}
	return out
}

// of is a unit's value of a round; NaN: it is not measured in this run.
func (r row) of(unit []*sample, round int) float64 {
	if round >= len(unit) {
		return math.NaN()
	}
	return r.value(unit[round])
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// met tells whether ours reaches the goal.
func (r row) met(ours float64) bool {
	if r.least {
		return ours >= r.goal
	}
	return ours <= r.goal
}
