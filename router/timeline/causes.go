package timeline

import (
	"fmt"

	"meridian.internal/clocksync/closure"
	"meridian.internal/shared/phase"
)

// causes are pairs of events of which the first makes the second happen: something is sent, and then it is received. They
// check the clocks of both, and where they prove more than the clocks' bounds, they tighten these.
var causes = []struct{ cause, event, style string }{
	{"R.gen_dispatch_ns", "G.receive_ns", ""},
	{"R.ctx_dispatch_ns", "C.receive_ns", ""},
	{"R.gen_dispatch_ns|R.ctx_dispatch_ns", "A.receive_ns", ""},
	{"G.headers_sent_ns", "R.gen_headers_ns", ""},
	{"G.first_token_sent_ns|G.first_token_ns", "R.first_token_ns", ""},
	{"A.first_token_sent_ns|A.first_token_ns", "R.first_token_ns", ""},
	{"C.first_token_ns", "R.ctx_done_ns", ""},
	{"C.first_token_ns", "G.first_token_ns", ""},
	{"G.requested_ns", "C.requested_ns", ""},
	{"C.start_ns", "G.start_ns", ""},
	{"G.installed_ns", "C.installed_ns", ""}, // at the sender: acknowledged
	{"R.gen_headers_ns", "R.ctx_dispatch_ns", styleGenFirst},
	{"R.ctx_done_ns", "R.gen_dispatch_ns", styleCtxFirst},
}

// link is a cause and its event, both converted.
type link struct{ cause, event end }

// bound is how far the distance of the two may be off: nothing on one clock.
func (k link) bound() int64 {
	if k.cause.src == k.event.src {
		return 0
	}
	return k.cause.boundNow() + k.event.boundNow()
}

// grew is what the bound of an end grew by since the moment that its estimate is for.
func (e end) grew() int64 { return e.bound - e.before }

// boundNow is the bound of an end after its source's was tightened.
func (e end) boundNow() int64 { return e.src.est.BoundNS() + e.grew() }

// link finds the causes of every router's record.
func (m *merger) link() {
	for _, s := range m.sources {
		r := s.Record
		if r.Role != phase.Disagg {
			continue
		}
		ch := newChain(m.sources, r)
		for _, c := range causes {
			if c.style != "" && c.style != r.Style {
				continue
			}
			a, b := ch.edge(c.cause), ch.edge(c.event)
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
		of[i].bound = 0
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
