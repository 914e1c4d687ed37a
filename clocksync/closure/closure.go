// Package closure owns what messages between clocks prove together: nothing is received before it was sent, whoever's
// clock says when. Messages that cross tighten the bounds of the clocks; messages that contradict name the clock that lies.
// It is pure, and it works on stamps that were converted to the reference clock by the point estimates.
//
// What is unknown of clock c is its correction x(c): true reference time minus converted time, within the bound of its
// estimate. A message from A to B proves sent + x(A) <= received + x(B), which is
//
//	x(B) - x(A) >= sent - received
//
// A set of such differences is closed by longest paths. A cycle of positive length asks a clock to be ahead of itself: no
// values satisfy it, so some stamp on it is false.
package closure

import (
	"math"
	"slices"
)

// Reference names the reference clock, whose correction is 0.
const Reference = ""

// Clock is a clock with the bounds of its correction: lower and upper bound of the offset, minus the point estimate.
type Clock struct {
	Name             string
	LowerNS, UpperNS int64
}

// Message was sent by one clock and received by another. Both stamps are converted. SlackNS is how much the two
// corrections may have moved since the moment that the bounds are for; it weakens the proof.
type Message struct {
	From, To           string
	SentNS, ReceivedNS int64
	SlackNS            int64
}

// Result is what follows.
type Result struct {
	// Clocks are those given, in their order, with bounds that are never wider. With a contradiction they are as given.
	Clocks []Clock
	// Cycle are the clocks of a contradiction, in the order of its messages; empty: there is none.
	Cycle []string
	// ExcessNS is by how much the stamps of Cycle contradict each other.
	ExcessNS int64
	// Liars are the clocks each of which explains every contradiction alone; if some do so by being off by one constant,
	// they alone. One: it is named. Several: too few clocks are linked to tell them apart. None, with a Cycle: more than one
	// lies.
	Liars []string
}

// edge says x(to) - x(from) >= w.
type edge struct {
	from, to int
	w        float64
	bound    bool // it is a clock's bound, not a message
}

// without is what a search leaves out, to see what is left when a clock is not believed: all edges of a clock, or only its
// bounds, as if its estimate were off by a constant. 0: nothing.
type without struct{ clock, bounds int }

var nobody = without{}

func (w without) leavesOut(e edge) bool {
	return w.clock != 0 && (e.from == w.clock || e.to == w.clock) || w.bounds != 0 && e.bound && (e.from == w.bounds || e.to == w.bounds)
}

// graph has the reference as node 0.
type graph struct {
	names []string
	edges []edge
}

// Close derives everything that the messages prove of the clocks. Messages of clocks that are not given are ignored.
func Close(clocks []Clock, ms []Message) Result {
	g := build(clocks, ms)
	out := Result{Clocks: slices.Clone(clocks)}
	low, cycle := g.longest(0, nobody, false)
	if cycle == nil {
		high, _ := g.longest(0, nobody, true)
		for i := range out.Clocks {
			out.Clocks[i].LowerNS = max(clocks[i].LowerNS, int64(math.Floor(low[i+1])))
			out.Clocks[i].UpperNS = min(clocks[i].UpperNS, int64(math.Ceil(-high[i+1])))
		}
		return out
	}
	for i, n := range cycle {
		out.Cycle = append(out.Cycle, g.names[n])
		out.ExcessNS += int64(g.weight(n, cycle[(i+1)%len(cycle)]))
	}
	out.Liars = g.liars(cycle)
	return out
}

// liars of a cycle: only a clock of it can explain it, and so only such a one can explain all contradictions.
func (g graph) liars(cycle []int) (names []string) {
	var constant []string
	for _, n := range cycle {
		if n == 0 {
			continue // the reference is right by definition
		}
		if _, other := g.longest(0, without{clock: n}, false); other != nil {
			continue
		}
		names = append(names, g.names[n])
		if _, other := g.longest(0, without{bounds: n}, false); other == nil {
			constant = append(constant, g.names[n])
		}
	}
	if len(constant) > 0 {
		names = constant
	}
	slices.Sort(names)
	return names
}

// weight is that of the heaviest edge between two nodes.
func (g graph) weight(from, to int) float64 {
	w := math.Inf(-1)
	for _, e := range g.edges {
		if e.from == from && e.to == to {
			w = max(w, e.w)
		}
	}
	return w
}

func build(clocks []Clock, ms []Message) graph {
	g := graph{names: []string{Reference}}
	index := map[string]int{Reference: 0}
	for i, c := range clocks {
		g.names = append(g.names, c.Name)
		index[c.Name] = i + 1
		g.edges = append(g.edges, edge{0, i + 1, float64(c.LowerNS), true}, edge{i + 1, 0, -float64(c.UpperNS), true})
	}
	// Of many messages between the same two clocks only the one that proves most matters.
	best := map[[2]int]float64{}
	for _, m := range ms {
		a, ok1 := index[m.From]
		b, ok2 := index[m.To]
		if !ok1 || !ok2 || a == b {
			continue
		}
		w := float64(m.SentNS-m.ReceivedNS) - float64(m.SlackNS)
		if old, ok := best[[2]int{a, b}]; !ok || w > old {
			best[[2]int{a, b}] = w
		}
	}
	for k, w := range best {
		g.edges = append(g.edges, edge{k[0], k[1], w, false})
	}
	slices.SortFunc(g.edges, func(a, b edge) int { // maps have no order, results should
		if a.from != b.from {
			return a.from - b.from
		}
		return a.to - b.to
	})
	return g
}

// longest is Bellman and Ford's: the longest path from a node to each, or to it from each when back is true. A cycle is
// returned when there is one of positive length that the node reaches.
func (g graph) longest(start int, out without, back bool) (dist []float64, cycle []int) {
	n := len(g.names)
	dist = make([]float64, n)
	via := make([]int, n)
	for i := range dist {
		dist[i], via[i] = math.Inf(-1), -1
	}
	dist[start] = 0
	last := -1
	for range n + 1 {
		last = -1
		for _, e := range g.edges {
			from, to := e.from, e.to
			if back {
				from, to = to, from
			}
			if out.leavesOut(e) || math.IsInf(dist[from], -1) {
				continue
			}
			if d := dist[from] + e.w; d > dist[to]+1e-6 {
				dist[to], via[to] = d, from
				last = to
			}
		}
		if last < 0 {
			return dist, nil
		}
	}
	return dist, walk(via, last, n)
}

// walk finds the cycle that a node hangs on.
func walk(via []int, at, n int) (cycle []int) {
	for range n {
		at = via[at]
	}
	for k := at; ; k = via[k] {
		cycle = append(cycle, k)
		if via[k] == at {
			slices.Reverse(cycle)
			return cycle
		}
	}
}
