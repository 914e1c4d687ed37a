package collect

import (
	"strings"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// words keeps one copy of each text that many records have in common, such as names of nodes. A record that was parsed
// shares memory with its message; without this, each request would keep its messages until its line is written.
type words map[string]string

// maxWords bounds the words: names that change with every record must not fill the memory.
const maxWords = 10_000

func (w words) of(s string) string {
	if s == "" {
		return ""
	}
	if known, ok := w[s]; ok {
		return known
	}
	if len(w) >= maxWords {
		clear(w)
	}
	s = strings.Clone(s)
	w[s] = s
	return s
}

// detach makes a record independent of the text that it was parsed from.
func (w words) detach(r *phase.Record) {
	id := func(c *clock.ID) { *c = clock.ID(w.of(string(*c))) }
	for _, s := range []*string{&r.Schema, &r.Node, &r.Router, &r.Style, &r.Model, &r.FinishReason, (*string)(&r.Role), (*string)(&r.Outcome)} {
		*s = w.of(*s)
	}
	id(&r.Instance)
	r.RequestID, r.ClientRequestID, r.Traceparent = strings.Clone(r.RequestID), strings.Clone(r.ClientRequestID), strings.Clone(r.Traceparent)
	if e := r.Error; e != nil {
		e.Stage, e.Type, e.Message = w.of(e.Stage), w.of(e.Type), strings.Clone(e.Message)
	}
	for i := range r.Clocks {
		c := &r.Clocks[i]
		id(&c.ID)
		c.Kind = w.of(c.Kind)
		if e := c.Estimate; e != nil {
			id(&e.Reference)
			id(&e.Local)
			e.State, e.Transport, e.Via = w.of(e.State), w.of(e.Transport), w.of(e.Via)
		}
	}
	if t := r.Transfer; t != nil {
		t.Peer = w.of(t.Peer)
	}
	for i := range r.Legs {
		l := &r.Legs[i]
		l.Role, l.Node, l.Outcome = phase.Role(w.of(string(l.Role))), w.of(l.Node), phase.Outcome(w.of(string(l.Outcome)))
	}
	if d := r.Decision; d != nil {
		d.Policy, d.Ctx, d.Gen, d.Reason = w.of(d.Policy), w.of(d.Ctx), w.of(d.Gen), w.of(d.Reason)
		for i := range d.Candidates {
			d.Candidates[i].Node = w.of(d.Candidates[i].Node)
		}
	}
}
