package proxy

import (
	"slices"

	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// record is what the router knows of a request, with raw stamps of its own clock: those of the sub-request that failed, or
// else of the first. It lists every leg that was sent.
func (s *session) record(e *api.Error) *phase.Record {
	t, id := s.times, s.p.o.Steady.ID()
	u := s.usage()
	var m struct { // one piece of memory
		record phase.Record
		clocks [1]phase.Clock
		legs   [2]phase.Leg
	}
	m.clocks[0] = phase.Clock{ID: id, Kind: "mono"}
	r := &m.record
	*r = phase.Record{
		Schema: phase.Schema, Role: phase.Disagg, Node: s.p.o.Name, Instance: id, Router: s.p.o.Name,
		RequestID: s.id, ClientRequestID: s.clientID, Traceparent: s.trace, Style: s.p.o.Schedule, Outcome: phase.Finished, Clocks: m.clocks[:],
		Tokens: phase.Tokens{Prompt: u.PromptTokens, Output: u.CompletionTokens, NoPrompt: u.NoPrompt, NoCached: u.PromptTokensDetails == nil}, Legs: s.legs(m.legs[:0]),
	}
	if s.req != nil { // nil: it was refused before it was understood
		r.Model, r.Streamed = s.req.Model, s.req.Stream
	}
	if d := u.PromptTokensDetails; d != nil {
		r.Tokens.Cached = d.CachedTokens
	}
	if e != nil {
		r.Outcome = outcomeOf(e)
		r.Error = &phase.Error{Stage: e.Stage, Type: e.Type, Message: e.Message, Retryable: e.Retryable}
	}
	if b := s.main(); b != nil {
		b.tell(r)
	}
	r.Stamps.ReceiveNS, r.Stamps.EndNS = &t.received, &t.end
	r.Stamps.ParsedNS, r.Stamps.AdmittedNS = taken(&t.parsed), taken(&t.admitted)
	return r
}

// main is the sub-request that the record tells of; nil when there is none.
func (s *session) main() *sub {
	for _, b := range s.subs {
		if a := b.last(); a != nil && a.failure != nil && a.failure.Type != api.TypeCancelled {
			return b
		}
	}
	if len(s.subs) == 0 {
		return nil
	}
	return s.subs[0]
}

// tell fills in the attempt that began the answer, or the last one where none did, and what became of the answer.
func (b *sub) tell(r *phase.Record) {
	r.Sub = b.index
	a := b.beginner()
	if a == nil {
		return
	}
	r.DisaggRequestID, r.Attempt, r.Stamps = a.id, a.n, a.stamps
	if a.serving != nil {
		r.DisaggRequestID = a.serving.id
	}
	if a.choice != nil {
		r.Decision, r.Style = &a.choice.Decision, a.style
	}
	r.FinishReason = b.last().finish
	for _, a := range b.tries[slices.Index(b.tries, a):] {
		if r.Stamps.FirstTokenSentNS == nil {
			r.Stamps.FirstTokenSentNS = a.stamps.FirstTokenSentNS
		}
		if a.stamps.LastTokenNS != nil {
			r.Stamps.LastTokenNS = a.stamps.LastTokenNS
		}
		if a.had > 0 && a.cutNS != nil && a.stamps.FirstTokenNS != nil {
			r.Resumes = append(r.Resumes, phase.Resume{Sub: b.index, Attempt: a.n, Tokens: a.had, CutNS: *a.cutNS, TokenNS: *a.stamps.FirstTokenNS})
		}
	}
}

// legs appends the legs that were sent. Without any the list is empty, not nil.
func (s *session) legs(legs []phase.Leg) []phase.Leg {
	for _, b := range s.subs {
		for _, a := range b.tries {
			for _, c := range a.calls {
				if c.leg == nil {
					continue
				}
				legs = append(legs, *c.leg)
				if c.releasedNS.Load() != 0 {
					ns := c.releasedNS.Load()
					legs[len(legs)-1].ReleasedNS = &ns
				}
			}
			if a.genLeg != nil {
				legs = append(legs, *a.genLeg)
			}
		}
	}
	return legs
}

func outcomeOf(e *api.Error) phase.Outcome {
	switch {
	case e.Stage == "place" || e.Stage == "parse" || e.Stage == stageAuth:
		return phase.Rejected
	case e.Type == api.TypeCancelled:
		return phase.Cancelled
	case e.Type == api.TypeTimeout:
		return phase.Expired
	case e.Status() < 500 || e.Stage == "queue":
		return phase.Rejected
	default:
		return phase.Failed
	}
}
