package timeline

import (
	"cmp"
	"fmt"
	"slices"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// Part is one record of a request and, when its node kept steps, their columns.
type Part struct {
	Record *phase.Record
	Steps  *infer.Steps
}

// Key names an attempt of a request: two records with one key are the same record, sent twice.
type Key struct {
	Role    phase.Role
	Node    string
	Sub     int
	Attempt int
}

// KeyOf is the key of a record.
func KeyOf(r *phase.Record) Key { return Key{r.Role, r.Node, r.Sub, r.Attempt} }

// Merge makes the line of one request from its records, in whatever order and however often they came. It needs at least
// one. The records are only read.
func Merge(parts []Part, c Clocks) *Line { return new(Merger).Merge(parts, c) }

// Merger merges one request after the other, in the same memory. The zero value is ready; it belongs to one goroutine.
type Merger struct {
	sources []source
	order   []*source
	links   []link
	spans   []Span
}

// Merge is as the function.
func (w *Merger) Merge(parts []Part, c Clocks) *Line {
	parts = sortParts(parts)
	w.sources = slices.Grow(w.sources[:0], len(parts))
	sources := w.sources[:len(parts)]
	m := merger{line: &Line{Schema: Schema}, wall: c.Wall, sources: w.order[:0], links: w.links[:0], spans: slices.Grow(w.spans[:0], usualSpans)}
	defer func() {
		clear(sources) // lets go of the records
		w.order, w.links, w.spans = m.sources, m.links, m.spans
	}()
	router := routerRecord(parts)
	ref := c.Reference
	if router != nil {
		ref = router.Instance
	}
	for i := range sources {
		sources[i].Part, sources[i].rank = onNodeClock(parts[i])
		sources[i].choose(c, ref)
		m.sources = append(m.sources, &sources[i])
	}
	m.line.Reference = ref
	m.setOrigin()
	for _, s := range m.sources {
		s.convert()
	}
	m.link()
	m.tighten()
	head := router
	if head == nil {
		head = parts[0].Record
	}
	m.fillHead(head, router)
	m.fillPhases()
	m.line.Missing = Missing(parts)
	m.line.Complete = router != nil && len(m.line.Missing) == 0
	m.fillSpans(router)
	m.fillViolations()
	return m.line
}

// routerRecord is the router's own record, nil if it is not there. It tells of one sub-request and of the attempt
// that began its answer, and lists the legs of all.
func routerRecord(parts []Part) *phase.Record {
	for _, p := range parts {
		if p.Record.Role == phase.Disagg {
			return p.Record
		}
	}
	return nil
}

// merger holds the line while it is made.
type merger struct {
	line    *Line
	wall    func(int64) int64
	sources []*source
	links   []link
	spans   []Span   // of the line
	ways    []string // see way
	// contradiction is by how much the links contradict the bounds together. 0: not at all
	contradiction int64
}

var roleOrder = map[phase.Role]int{phase.Disagg: 0, phase.Ctx: 1, phase.Gen: 2}

// sortParts orders by role, sub, attempt and node, and drops what came twice.
func sortParts(in []Part) []Part {
	parts := slices.Clone(in)
	slices.SortStableFunc(parts, func(a, b Part) int {
		x, y := a.Record, b.Record
		return cmp.Or(cmp.Compare(roleOrder[x.Role], roleOrder[y.Role]), cmp.Compare(x.Sub, y.Sub), cmp.Compare(x.Attempt, y.Attempt),
			cmp.Compare(x.Node, y.Node))
	})
	return slices.CompactFunc(parts, func(a, b Part) bool { return KeyOf(a.Record) == KeyOf(b.Record) })
}

// setOrigin puts the start at the router's receipt, or else at the earliest stamp that could be converted.
func (m *merger) setOrigin() {
	origin, ok := int64(0), false
	for _, s := range m.sources {
		p := s.stamp(s.Record.Stamps.ReceiveNS)
		if p.ok && (!ok || p.at < origin) {
			origin, ok = p.at, true
		}
		if s.Record.Role == phase.Disagg && p.ok {
			break
		}
	}
	if !ok {
		return
	}
	m.line.StartNS = origin
	if m.wall != nil {
		m.line.WallNS = m.wall(origin)
	}
	for _, s := range m.sources {
		s.origin = origin
	}
}

func (m *merger) fillHead(first, router *phase.Record) {
	l := m.line
	l.RequestID, l.ClientRequestID, l.Router, l.Model = first.RequestID, first.ClientRequestID, first.Router, first.Model
	l.Style, l.Traceparent, l.Streamed = first.Style, first.Traceparent, first.Streamed
	l.Outcome, l.FinishReason, l.Error = first.Outcome, first.FinishReason, first.Error
	l.Violations, l.Spans = []Violation{}, []Span{}
	l.Attempts, l.Phases = make([]Attempt, 0, len(m.sources)), make([]Phase, 0, len(m.sources))
	for _, s := range m.sources {
		r := s.Record
		if r.Role == phase.Disagg {
			m.unreported(r)
			continue
		}
		l.Attempts = append(l.Attempts, Attempt{Role: r.Role, Node: r.Node, Sub: r.Sub, Attempt: r.Attempt, Outcome: r.Outcome, Error: r.Error})
		if router == nil { // without the router's word: what the nodes did
			l.Tokens.Prompt = max(l.Tokens.Prompt, r.Tokens.Prompt)
			l.Tokens.Output += r.Tokens.Output
			if r.Role == phase.Ctx || r.Style == styleAggregated {
				l.Tokens.Cached += r.Tokens.Cached
			}
		}
	}
	if router == nil {
		l.Outcome = worstOutcome(m.sources)
		return
	}
	l.Router, l.Decision, l.Tokens = router.Node, router.Decision, router.Tokens
	m.fillSeams(router)
}

// fillSeams adds what only the router knows of the legs: where an answer went on, and what was released between them.
func (m *merger) fillSeams(router *phase.Record) {
	l := m.line
	i := slices.IndexFunc(m.sources, func(s *source) bool { return s.Record == router })
	own := m.sources[i]
	for _, leg := range router.Legs {
		for j := range l.Attempts {
			a := &l.Attempts[j]
			if a.Role == leg.Role && a.Node == leg.Node && a.Sub == leg.Sub && a.Attempt == leg.Attempt {
				a.Given = leg.Given
				if p := own.stamp(leg.ReleasedNS); p.ok {
					at := p.at // of its own: p itself stays off the heap
					a.ReleasedNS = &at
				}
			}
		}
	}
	for _, s := range router.Resumes {
		cut, token := own.place(s.CutNS), own.place(s.TokenNS)
		if cut.ok && token.ok {
			l.Resumes = append(l.Resumes, phase.Resume{Sub: s.Sub, Attempt: s.Attempt, Tokens: s.Tokens, CutNS: cut.at, TokenNS: token.at})
		}
	}
}

// unreported adds the legs of a router's record that have no record of their node, with the outcome that the router saw.
func (m *merger) unreported(r *phase.Record) {
	for _, leg := range Legs(r) {
		reported := slices.ContainsFunc(m.sources, func(s *source) bool { return isLeg(s.Record, leg) })
		if !reported {
			a := Attempt{Role: leg.Role, Node: leg.Node, Sub: leg.Sub, Attempt: leg.Attempt, Outcome: r.Outcome, Error: r.Error}
			if leg.Outcome != "" {
				a.Outcome = leg.Outcome
			}
			m.line.Attempts = append(m.line.Attempts, a)
		}
	}
}

func isLeg(r *phase.Record, leg phase.Leg) bool {
	return r.Role == leg.Role && r.Sub == leg.Sub && r.Attempt == leg.Attempt && (leg.Node == "" || r.Node == leg.Node)
}

func worstOutcome(sources []*source) phase.Outcome {
	worst := phase.Finished
	for _, s := range sources {
		if s.Record.Outcome != phase.Finished {
			worst = s.Record.Outcome
		}
	}
	return worst
}

// Missing lists the records that must come and are not in parts.
func Missing(parts []Part) []string {
	var missing []string
	router := routerRecord(parts)
	if router == nil {
		return []string{string(phase.Disagg)}
	}
	for _, leg := range Legs(router) {
		there := slices.ContainsFunc(parts, func(p Part) bool { return isLeg(p.Record, leg) })
		if leg.Records && !there {
			missing = append(missing, missingLeg(leg))
		}
	}
	for _, p := range parts {
		if n := p.Record.StepMessages; n > 0 && p.Steps == nil {
			missing = append(missing, fmt.Sprintf("steps of %s %s sub %d attempt %d", p.Record.Role, p.Record.Node, p.Record.Sub, p.Record.Attempt))
		}
	}
	return missing
}

// missingLeg names a leg whose record is missing.
func missingLeg(leg phase.Leg) string {
	return fmt.Sprintf("%s %s sub %d attempt %d", leg.Role, leg.Node, leg.Sub, leg.Attempt)
}

// Legs are the legs of a router's record: those that it lists, else what its style and its dispatch stamps tell.
func Legs(router *phase.Record) []phase.Leg {
	if router.Legs != nil || router.Decision == nil {
		return router.Legs
	}
	var legs []phase.Leg
	d := router.Decision
	if router.Stamps.CtxDispatchNS != nil && d.Ctx != "" {
		legs = append(legs, phase.Leg{Role: phase.Ctx, Node: d.Ctx, Sub: router.Sub, Attempt: router.Attempt, Records: true})
	}
	if router.Stamps.GenDispatchNS != nil && d.Gen != "" {
		legs = append(legs, phase.Leg{Role: phase.Gen, Node: d.Gen, Sub: router.Sub, Attempt: router.Attempt, Records: true})
	}
	return legs
}

func (m *merger) fillPhases() {
	for _, s := range m.sources {
		r := s.Record
		p := Phase{
			Role: r.Role, Node: r.Node, Sub: r.Sub, Attempt: r.Attempt, Disagg: r.DisaggRequestID, Tokens: r.Tokens, KV: r.KV,
			Iters: r.Iters, DPRank: r.DPRank, Preemptions: r.Preemptions, PreemptedNS: r.PreemptedNS, PushedNS: r.PushedOffsetNS, EnergyJ: r.EnergyJ,
		}
		refs := new([transferPoint + len(transferNames)]int64) // one allocation for all
		p.Stamps = make([]Stamp, 0, 14)
		for i, f := range r.Stamps.All() {
			p.Stamps = s.appendStamp(p.Stamps, i, *f.NS, refs)
		}
		if t := r.Transfer; t != nil {
			p.Peer, p.Bytes = t.Peer, t.Bytes
			if r.Style == styleAggregated {
				p.Fetched = t.Tokens
			}
			p.Transfer = make([]Stamp, 0, len(transferNames))
			for i, ns := range [...]*int64{t.RequestedNS, t.StartNS, t.LastByteNS, t.InstalledNS} {
				p.Transfer = s.appendStamp(p.Transfer, transferPoint+i, ns, refs)
			}
		}
		p.Chunks, p.Steps = s.chunkColumns(), s.stepColumns()
		if s.Steps != nil {
			p.Truncated = s.Steps.Truncated + int64(len(s.Steps.Iter)-len(p.Steps.Column("iter")))
		} else {
			p.StepMessages = r.StepMessages
		}
		p.Clock, p.Rank = s.phaseClock(), s.rank
		m.line.Phases = append(m.line.Phases, p)
	}
	m.line.DisaggRequestID = m.line.Phases[0].Disagg
}

// appendStamp appends the stamp that is point i, if it exists.
func (s *source) appendStamp(list []Stamp, i int, ns *int64, refs *[transferPoint + len(transferNames)]int64) []Stamp {
	if ns == nil {
		return list
	}
	st := Stamp{Name: pointNames[i], Raw: *ns}
	if p := s.points[i]; p.ok {
		refs[i] = p.at
		st.Ref = &refs[i]
	}
	return append(list, st)
}

func (s *source) phaseClock() PhaseClock {
	c := PhaseClock{ID: s.clock.ID, State: stateNone}
	if s.ok {
		off, bound := s.est.OffsetNS, s.bound
		c.State, c.OffsetNS, c.SkewPPB, c.BoundNS, c.Via = s.est.State, &off, s.est.SkewPPB, &bound, s.est.Via
		if c.SkewPPB != 0 {
			c.AtNS = s.est.AtNS
		}
	}
	return c
}
