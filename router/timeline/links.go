package timeline

import (
	"strings"

	"meridian.internal/shared/phase"
)

// Link is a message between two nodes, as a written line tells of it: ReceivedNS may lie before SentNS by at most BoundNS.
type Link struct {
	From, To           string // nodes; Reference for the router, to whose clock the line refers
	SentNS, ReceivedNS int64
	BoundNS            int64
}

// Reference is the name of the reference clock in a Link.
const Reference = ""

// Links gives every message of the line between two clocks. Lines of one router can be held against each other by them.
func (l *Line) Links(each func(Link)) {
	for i := range l.Phases {
		r := &l.Phases[i]
		if r.Role != phase.Disagg {
			continue
		}
		pc := l.phasesOf(r)
		for _, c := range causes {
			if c.style != "" && c.style != l.Style {
				continue
			}
			a, sent, ok1 := pc.edge(c.cause)
			b, received, ok2 := pc.edge(c.event)
			if ok1 && ok2 && a.Clock.ID != b.Clock.ID {
				each(Link{From: l.clockOf(a), To: l.clockOf(b), SentNS: sent, ReceivedNS: received, BoundNS: *a.Clock.BoundNS + *b.Clock.BoundNS})
			}
		}
	}
}

func (l *Line) clockOf(p *Phase) string {
	if p.Clock.ID == l.Reference {
		return Reference
	}
	return p.Node
}

// phaseChain is a chain of a written line.
type phaseChain struct{ r, c, g, a *Phase }

func (l *Line) phasesOf(r *Phase) phaseChain {
	pc := phaseChain{r: r}
	for i := range l.Phases {
		p := &l.Phases[i]
		switch {
		case p.Role == phase.Disagg || p.Sub != r.Sub || p.Attempt != r.Attempt:
		case l.Style == styleAggregated:
			pc.a = p
		case p.Role == phase.Gen:
			pc.g = p
		case l.beside(r, p):
		default:
			pc.c = p
		}
	}
	return pc
}

// edge finds the converted stamp of an edge of causes: the first of its alternatives that exists.
func (pc phaseChain) edge(name string) (*Phase, int64, bool) {
	for name != "" {
		var one string
		one, name, _ = strings.Cut(name, "|")
		p := pc.who(one[0])
		if p == nil || p.Clock.BoundNS == nil {
			continue
		}
		at, ok := p.At(one[2:])
		if !ok {
			at, ok = p.At("transfer." + one[2:])
		}
		if ok {
			return p, at, true
		}
	}
	return nil, 0, false
}

// beside tells whether p, of the attempt that r tells of, is of a context node that computed the prompt too, where another one
// served, whose phase may be missing.
func (l *Line) beside(r, p *Phase) bool {
	asked := 0
	for i := range l.Attempts {
		if a := &l.Attempts[i]; a.Role == phase.Ctx && a.Sub == r.Sub && a.Attempt == r.Attempt {
			asked++
		}
	}
	return asked > 1 && p.Disagg != r.Disagg
}

// Beside tells whether p is of a context node that computed the prompt too, where another one served: it is no part of the answer.
func (l *Line) Beside(p *Phase) bool {
	for i := range l.Phases {
		if r := &l.Phases[i]; r.Role == phase.Disagg {
			return p.Role == phase.Ctx && p.Sub == r.Sub && p.Attempt == r.Attempt && l.beside(r, p)
		}
	}
	return false
}

// Chain gives the phases that the spans tell of: the router's, and those of the attempt that began the answer. nil: it is not there,
// or one node did both.
func (l *Line) Chain() (router, ctx, gen *Phase) {
	for i := range l.Phases {
		if r := &l.Phases[i]; r.Role == phase.Disagg {
			pc := l.phasesOf(r)
			return r, pc.c, pc.g
		}
	}
	return nil, nil, nil
}

func (pc phaseChain) who(c byte) *Phase {
	switch c {
	case 'R':
		return pc.r
	case 'C':
		return pc.c
	case 'G':
		return pc.g
	}
	return pc.a
}
