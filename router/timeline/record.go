package timeline

import (
	"slices"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// Part turns a phase of l back into the record and the steps that it came from, as far as the line kept them: a record that
// comes late is merged with those that are already written.
func (l *Line) Part(p *Phase) Part {
	r := &phase.Record{
		Schema: phase.Schema, Role: p.Role, Node: p.Node, Instance: p.Clock.ID, Router: l.Router, RequestID: l.RequestID,
		ClientRequestID: l.ClientRequestID, DisaggRequestID: p.Disagg, Sub: p.Sub, Attempt: p.Attempt, Traceparent: l.Traceparent,
		Style: l.Style, Model: l.Model, Streamed: l.Streamed, Outcome: l.Outcome, FinishReason: l.FinishReason, Tokens: p.Tokens,
		Clocks: []phase.Clock{{ID: p.Clock.ID, Kind: "mono"}}, PushedOffsetNS: p.PushedNS, KV: p.KV, Iters: p.Iters, DPRank: p.DPRank,
		StepMessages: p.StepMessages, Preemptions: p.Preemptions, PreemptedNS: p.PreemptedNS, EnergyJ: p.EnergyJ,
	}
	if p.Role == phase.Disagg {
		r.Decision, r.Error, r.Legs = l.Decision, l.Error, l.legs()
		for _, s := range l.Resumes { // its clock is the line's
			s.CutNS, s.TokenNS = s.CutNS+l.StartNS, s.TokenNS+l.StartNS
			r.Resumes = append(r.Resumes, s)
		}
	}
	for _, a := range l.Attempts {
		if a.Role == p.Role && a.Node == p.Node && a.Sub == p.Sub && a.Attempt == p.Attempt {
			r.Outcome, r.Error = a.Outcome, a.Error
		}
	}
	if c := p.Clock; c.OffsetNS != nil && c.BoundNS != nil {
		r.Clocks[0].Estimate = &clock.Estimate{
			Reference: l.Reference, Local: c.ID, OffsetNS: *c.OffsetNS, SkewPPB: c.SkewPPB, LowerNS: *c.OffsetNS - *c.BoundNS,
			UpperNS: *c.OffsetNS + *c.BoundNS, AtNS: c.AtNS, State: c.State, Via: c.Via,
		}
	}
	restore(r.Stamps.All(), p.Stamps)
	if len(p.Transfer) > 0 || p.Peer != "" {
		r.Transfer = l.transfer(p)
	}
	r.Chunks = l.chunks(p)
	steps := l.steps(p)
	if p.Rank != nil {
		p.Rank.restore(r, steps)
	}
	return Part{Record: r, Steps: steps}
}

// legs are those that the router's record listed: what was given before them is told nowhere else.
func (l *Line) legs() (legs []phase.Leg) {
	for _, a := range l.Attempts {
		leg := phase.Leg{Role: a.Role, Node: a.Node, Sub: a.Sub, Attempt: a.Attempt, Given: a.Given}
		reported := slices.ContainsFunc(l.Phases, func(p Phase) bool {
			return p.Role == a.Role && p.Node == a.Node && p.Sub == a.Sub && p.Attempt == a.Attempt
		})
		leg.Records = reported || slices.Contains(l.Missing, missingLeg(leg))
		if !reported {
			leg.Outcome = a.Outcome
		}
		if a.ReleasedNS != nil { // its clock is the line's
			at := *a.ReleasedNS + l.StartNS
			leg.ReleasedNS = &at
		}
		legs = append(legs, leg)
	}
	return legs
}

func restore(fields [phase.StampCount]phase.Stamp, stamps []Stamp) {
	for i := range stamps {
		for _, f := range fields {
			if f.Name == stamps[i].Name {
				*f.NS = &stamps[i].Raw
			}
		}
	}
}

func (l *Line) transfer(p *Phase) *phase.Transfer {
	t := &phase.Transfer{Peer: p.Peer, Bytes: p.Bytes, Tokens: p.Fetched}
	for i := range p.Transfer {
		ns := &p.Transfer[i].Raw
		switch p.Transfer[i].Name {
		case "requested_ns":
			t.RequestedNS = ns
		case "start_ns":
			t.StartNS = ns
		case "last_byte_ns":
			t.LastByteNS = ns
		case "installed_ns":
			t.InstalledNS = ns
		}
	}
	if h := l.Handover; h != nil && p.Role == phase.Gen {
		t.Frames, t.Tokens, t.TokensHeld, t.WireNS, t.InstallNS = h.Frames, h.Tokens, h.TokensHeld, h.WireNS, h.InstallNS
	}
	return t
}

// chunks come back on the phase's own clock.
func (l *Line) chunks(p *Phase) []infer.Chunk {
	c := p.Chunks
	starts := c.Column("forward_start_ns")
	out := make([]infer.Chunk, len(starts))
	back := converter{&p.Clock, l.StartNS}
	raw := func(name string, i int) int64 {
		v := c.Column(name)
		if i >= len(v) {
			return 0
		}
		if p.Clock.OffsetNS == nil {
			return v[i]
		}
		return back.raw(v[i])
	}
	plain := func(name string, i int) int64 {
		if v := c.Column(name); i < len(v) {
			return v[i]
		}
		return 0
	}
	cuts := 2 * (len(c.Stages()) - 1)
	for i := range out {
		out[i] = infer.Chunk{
			Iter: plain("iter", i), Tokens: int(plain("tokens", i)), KVTokens: int(plain("kv_tokens", i)), BatchSize: int(plain("batch_size", i)),
			ForwardStartNS: raw("forward_start_ns", i), ForwardEndNS: raw("forward_end_ns", i), SampleEndNS: raw("sample_end_ns", i),
		}
		for cut := range cuts {
			out[i].StageNS = append(out[i].StageNS, raw(cutName(cut), i))
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// steps come back on the phase's own clock; nil where the line has none, or has them in part.
func (l *Line) steps(p *Phase) *infer.Steps {
	c := p.Steps
	if c == nil {
		return nil
	}
	n, whole := len(c.Column("iter")), true
	back := converter{&p.Clock, l.StartNS}
	plain := func(name string) []int64 {
		v := c.Column(name)
		whole = whole && len(v) == n
		return v
	}
	raw := func(name string) []int64 {
		v := slices.Clone(plain(name))
		if p.Clock.OffsetNS != nil {
			for i := range v {
				v[i] = back.raw(v[i])
			}
		}
		return v
	}
	s := &infer.Steps{
		Step: narrow(plain("step")), Iter: slices.Clone(plain("iter")), KVTokens: narrow(plain("kv_tokens")), BatchSize: narrow(plain("batch_size")),
		ForwardStartNS: raw("forward_start_ns"), ForwardEndNS: raw("forward_end_ns"), SampleEndNS: raw("sample_end_ns"), TokenNS: raw("token_ns"),
		Truncated: p.Truncated,
	}
	if c.Column("tokens") != nil {
		s.Tokens = narrow(plain("tokens"))
	}
	for cut := range 2 * (len(c.Stages()) - 1) {
		s.StageNS = append(s.StageNS, raw(cutName(cut)))
	}
	if !whole {
		return nil
	}
	return s
}

func narrow(in []int64) []int32 {
	out := make([]int32, len(in))
	for i, v := range in {
		out[i] = int32(v)
	}
	return out
}
