package timeline

import (
	"fmt"
	"slices"

	"meridian.internal/clocksync/closure"
	"meridian.internal/shared/phase"
)

// causes are pairs of events of which the first makes the second happen: something is sent, and then it is received. They
// check the clocks of both, and where they prove more than the clocks' bounds, they tighten these.
var causes = parseCauses([]cause{
	{cause: "R.gen_dispatch_ns", event: "G.receive_ns"},
	{cause: "R.ctx_dispatch_ns", event: "C.receive_ns"},
	{cause: "R.gen_dispatch_ns|R.ctx_dispatch_ns", event: "A.receive_ns"},
	{cause: "G.headers_sent_ns", event: "R.gen_headers_ns"},
	{cause: "G.first_token_sent_ns|G.first_token_ns", event: "R.first_token_ns"},
	{cause: "A.first_token_sent_ns|A.first_token_ns", event: "R.first_token_ns"},
	{cause: "C.first_token_ns", event: "R.ctx_done_ns"},
	{cause: "C.first_token_ns", event: "G.first_token_ns"},
	{cause: "G.requested_ns", event: "C.requested_ns"},
	{cause: "C.start_ns", event: "G.start_ns"},
	{cause: "G.installed_ns", event: "C.installed_ns"}, // at the sender: acknowledged
	{cause: "R.gen_headers_ns", event: "R.ctx_dispatch_ns", style: styleGenFirst},
	{cause: "R.ctx_done_ns", event: "R.gen_dispatch_ns", style: styleCtxFirst},
})

func parseCauses(list []cause) []cause {
	for i := range list {
		list[i].sent, list[i].received = parseEdge(list[i].cause), parseEdge(list[i].event)
	}
	return list
}

type cause struct {
	cause, event, style string
	sent, received      edge // cause and event
}

// link is a cause and its event, both converted.
type link struct{ cause, event end }

// bound is how far the distance of the two may be off.
func (k link) bound() int64 {
	if k.cause.src == k.event.src {
		return k.cause.src.same()
	}
	return k.cause.boundNow() + k.event.boundNow()
}

// grew is what the bound of an end grew by since the moment that its estimate is for.
func (e end) grew() int64 { return e.bound - e.before }

// boundNow is the bound of an end after its source's was tightened.
func (e end) boundNow() int64 { return e.src.est.BoundNS() + e.grew() }

// link finds the causes of every router's record.
func (m *merger) link() {
	m.links = slices.Grow(m.links, len(causes))
	for _, s := range m.sources {
		r := s.Record
		if r.Role != phase.Disagg {
			continue
		}
		ch := newChain(m.sources, r)
		for i := range causes {
			c := &causes[i]
			if c.style != "" && c.style != r.Style {
				continue
			}
			a, b := ch.edge(&c.sent), ch.edge(&c.received)
			if a.ok && b.ok {
				a.before, b.before = a.src.est.BoundNS(), b.src.est.BoundNS()
				m.links = append(m.links, link{a, b})
			}
		}
	}
}

// tighten closes the bounds of the request's clocks under its links. The points stay where the estimates put them: what is
// proven is how far they are off.
func (m *merger) tighten() {
	if !m.proveMore() {
		return
	}
	names := make(map[*source]string, len(m.sources))
	var clocks []closure.Clock
	var of []*source
	for i, s := range m.sources {
		if !s.ok || s.clock.ID == m.line.Reference {
			names[s] = closure.Reference
			continue
		}
		names[s] = fmt.Sprintf("%s/%d", s.Record.Node, i) // each record has its own estimate
		clocks = append(clocks, closure.Clock{Name: names[s], LowerNS: s.est.LowerNS - s.est.OffsetNS, UpperNS: s.est.UpperNS - s.est.OffsetNS})
		of = append(of, s)
	}
	var ms []closure.Message
	for _, k := range m.links {
		ms = append(ms, closure.Message{
			From: names[k.cause.src], To: names[k.event.src], SentNS: k.cause.at, ReceivedNS: k.event.at, SlackNS: k.cause.grew() + k.event.grew(),
		})
	}
	got := closure.Close(clocks, ms)
	m.contradiction = got.ExcessNS
	if len(got.Cycle) > 0 {
		return
	}
	for i, c := range got.Clocks {
		of[i].est.LowerNS, of[i].est.UpperNS = of[i].est.OffsetNS+c.LowerNS, of[i].est.OffsetNS+c.UpperNS
		of[i].convert()
	}
}

// proveMore says whether a link says something that the bounds do not say already. Mostly none does: a message takes longer
// than the clocks are uncertain.
func (m *merger) proveMore() bool {
	for _, k := range m.links {
		a, b := k.cause.src.est, k.event.src.est
		// The least and the most that the distance of the two stamps can be, by the bounds alone.
		least := (b.LowerNS - b.OffsetNS) - (a.UpperNS - a.OffsetNS)
		if k.cause.src != k.event.src && k.cause.at-k.event.at-k.cause.grew()-k.event.grew() > least {
			return true
		}
	}
	return false
}

// fillViolations compares every cause with its event. What the bounds can explain is no violation.
func (m *merger) fillViolations() {
	for _, k := range m.links {
		a, b, bound := k.cause, k.event, k.bound()
		if excess := a.at - b.at - bound; excess > 0 {
			m.line.Violations = append(m.line.Violations, Violation{
				Cause: a.src.Record.Node + "." + a.name, Event: b.src.Record.Node + "." + b.name,
				CauseNS: a.at, EventNS: b.at, BoundNS: bound, ExcessNS: excess,
			})
		}
	}
	if m.contradiction > 0 && len(m.line.Violations) == 0 { // each link can be explained, all together cannot
		m.line.Violations = append(m.line.Violations, Violation{Cause: allClocks, Event: allClocks, ExcessNS: m.contradiction})
	}
}

// allClocks stands in a violation for the clocks of all records of the request.
const allClocks = "clocks"
