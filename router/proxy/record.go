package proxy

import (
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
)

// record is what the router knows of an attempt, with raw stamps of its own clock.
func (a *attempt) record() *phase.Record {
	s, id := a.s, a.s.p.o.Steady.ID()
	r := &phase.Record{
		Schema: phase.Schema, Role: phase.Disagg, Node: s.p.o.Name, Instance: id, Router: s.p.o.Name,
		RequestID: s.id, ClientRequestID: s.clientID, DisaggRequestID: a.id, Sub: a.sub.index, Attempt: a.n,
		Traceparent: s.trace, Style: a.style, Model: s.req.Model, Streamed: s.req.Stream,
		Outcome: phase.Finished, FinishReason: a.finish, Stamps: a.stamps,
		Clocks: []phase.Clock{{ID: id, Kind: "mono"}},
	}
	u := a.usage()
	r.Tokens = phase.Tokens{Prompt: u.PromptTokens, Output: u.CompletionTokens}
	if d := u.PromptTokensDetails; d != nil {
		r.Tokens.Cached = d.CachedTokens
	}
	if a.choice != nil {
		r.Decision = &a.choice.Decision
	}
	if e := a.failure; e != nil {
		r.Outcome = outcomeOf(e)
		r.Error = &phase.Error{Stage: e.Stage, Type: e.Type, Message: e.Message, Retryable: e.Retryable}
	}
	return r
}

func outcomeOf(e *api.Error) phase.Outcome {
	switch {
	case e.Stage == "place" || e.Stage == "parse":
		return phase.Rejected
	case e.Type == api.TypeCancelled:
		return phase.Cancelled
	case e.Type == api.TypeTimeout:
		return phase.Expired
	case e.Status() < 500:
		return phase.Rejected
	default:
		return phase.Failed
	}
}
