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

// times are a column of a phase, on its own clock.
func (l *Line) times(p *Phase, c *Columns, name string) []int64 {
	v := slices.Clone(c.Column(name))
	if p.Clock.OffsetNS != nil {
		back := converter{&p.Clock, l.StartNS}
		for i := range v {
			v[i] = back.raw(v[i])
		}
	}
	return v
}

// chunks come back on the phase's own clock.
func (l *Line) chunks(p *Phase) []infer.Chunk {
	c := p.Chunks
	starts := l.times(p, c, "forward_start_ns")
	if len(starts) == 0 {
		return nil
	}
	ends, sampled := l.times(p, c, "forward_end_ns"), l.times(p, c, "sample_end_ns")
	iters, tokens, kv, batches := c.Column("iter"), c.Column("tokens"), c.Column("kv_tokens"), c.Column("batch_size")
	var cuts [][]int64
	for cut := range 2 * (len(c.Stages()) - 1) {
		cuts = append(cuts, l.times(p, c, cutName(cut)))
	}
	at := func(v []int64, i int) int64 {
		if i < len(v) {
			return v[i]
		}
		return 0
	}
	out := make([]infer.Chunk, len(starts))
	for i := range out {
		out[i] = infer.Chunk{
			Iter: at(iters, i), Tokens: int(at(tokens, i)), KVTokens: int(at(kv, i)), BatchSize: int(at(batches, i)),
			ForwardStartNS: starts[i], ForwardEndNS: at(ends, i), SampleEndNS: at(sampled, i),
		}
		for _, cut := range cuts {
			out[i].StageNS = append(out[i].StageNS, at(cut, i))
		}
	}
	return out
}

// steps come back on the phase's own clock; nil where the line has none, or has them in part.
func (l *Line) steps(p *Phase) *infer.Steps {
	c := p.Steps
	if c == nil {
		return nil
	}
	n := len(c.Column("iter"))
	for _, name := range append(slices.Clip(stepNames), c.Names...) {
		if len(c.Column(name)) != n {
			return nil
		}
	}
	s := &infer.Steps{
		Step: narrow(c.Column("step")), Iter: slices.Clone(c.Column("iter")), KVTokens: narrow(c.Column("kv_tokens")), BatchSize: narrow(c.Column("batch_size")),
		ForwardStartNS: l.times(p, c, "forward_start_ns"), ForwardEndNS: l.times(p, c, "forward_end_ns"),
		SampleEndNS: l.times(p, c, "sample_end_ns"), TokenNS: l.times(p, c, "token_ns"),
		Truncated: p.Truncated,
	}
	if c.Column("tokens") != nil {
		s.Tokens = narrow(c.Column("tokens"))
	}
	for cut := range 2 * (len(c.Stages()) - 1) {
		s.StageNS = append(s.StageNS, l.times(p, c, cutName(cut)))
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
