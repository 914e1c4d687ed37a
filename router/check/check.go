// Package check says what is wrong with timelines: sums that do not close, effects before causes, tokens that do not add
// up, requests that are there twice. A request that is incomplete, or failed, is no fault as long as its line says so.
package check

import (
	"fmt"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// Checker checks lines one after the other and remembers only which requests it saw, and what their messages prove of the
// clocks. It belongs to one goroutine.
type Checker struct {
	seen   map[string]string // request id -> where
	clocks Clocks
	// Lines and Incomplete count what was checked.
	Lines, Incomplete int64
}

// New returns a checker.
func New() *Checker { return &Checker{seen: map[string]string{}} }

// rule returns a sentence for what it finds, "" if all is well.
type rule func(l *timeline.Line) string

// rules in the order of a reader's interest.
var rules = []rule{causality, negative, sums, order, completeness, tokens, bytesMoved, conversion}

// Line checks one line, read at a place, and returns a sentence for every violation.
func (c *Checker) Line(l *timeline.Line, at string) (faults []string) {
	c.Lines++
	if !l.Complete {
		c.Incomplete++
	}
	if l.RequestID == "" {
		faults = append(faults, "the line has no request_id")
	} else if first, ok := c.seen[l.RequestID]; ok {
		faults = append(faults, fmt.Sprintf("request %s has two lines: the first is at %s", l.RequestID, first))
	} else {
		c.seen[strings.Clone(l.RequestID)] = at // a key must not keep the text of its line
	}
	for _, r := range rules {
		if s := r(l); s != "" {
			faults = append(faults, fmt.Sprintf("request %s: %s", l.RequestID, s))
		}
	}
	c.clocks.Add(l)
	return faults
}

// Finish says what all lines together show, a sentence for each violation.
func (c *Checker) Finish() (faults []string) {
	for _, v := range c.clocks.Verdicts() {
		faults = append(faults, fmt.Sprintf("clocks seen by %s: %s", v.Router, v))
	}
	return faults
}

func causality(l *timeline.Line) string {
	if len(l.Violations) == 0 {
		return ""
	}
	v := l.Violations[0]
	if v.Cause == v.Event {
		return fmt.Sprintf("all its messages together contradict the clock bounds by %d ns, though each one alone could be explained", v.ExcessNS)
	}
	return fmt.Sprintf("%s at %d ns lies before its cause %s at %d ns, %d ns more than the bound of %d ns allows (%d such pairs)", v.Event, v.EventNS, v.Cause,
		v.CauseNS, v.ExcessNS, v.BoundNS, len(l.Violations))
}

func negative(l *timeline.Line) string {
	n, unexplained := 0, 0
	first := ""
	for _, s := range l.Spans {
		if s.DurNS >= 0 {
			continue
		}
		n++
		if -s.DurNS > s.BoundNS {
			if unexplained++; unexplained == 1 {
				first = fmt.Sprintf("span %s of %s lasts %d ns, which its bound of %d ns does not explain", s.Name, s.Node, s.DurNS, s.BoundNS)
			}
		}
	}
	switch {
	case n != l.NegativeSpans:
		return fmt.Sprintf("negative_spans says %d, the line has %d", l.NegativeSpans, n)
	case unexplained > 0:
		return fmt.Sprintf("%s (%d such spans)", first, unexplained)
	}
	return ""
}

// sums: the spans and what is unaccounted make up the whole.
func sums(l *timeline.Line) string {
	if l.E2ENS == nil || l.UnaccountedNS == nil {
		return ""
	}
	sum := *l.UnaccountedNS
	for _, s := range l.Spans {
		sum += s.DurNS
	}
	if sum != *l.E2ENS {
		return fmt.Sprintf("spans and unaccounted sum to %d ns, e2e_ns is %d", sum, *l.E2ENS)
	}
	return ""
}

func order(l *timeline.Line) string {
	switch {
	case l.TTFTNS != nil && *l.TTFTNS < 0:
		return fmt.Sprintf("ttft_ns is %d", *l.TTFTNS)
	case l.TTFTNS != nil && l.E2ENS != nil && *l.TTFTNS > *l.E2ENS:
		return fmt.Sprintf("ttft_ns %d is more than e2e_ns %d", *l.TTFTNS, *l.E2ENS)
	case l.Outcome == phase.Finished && l.E2ENS == nil && l.Complete:
		return "a finished request has no e2e_ns"
	}
	return ""
}

func completeness(l *timeline.Line) string {
	switch {
	case l.Complete && len(l.Missing) > 0:
		return fmt.Sprintf("it says complete, and that %s is missing", l.Missing[0])
	case !l.Complete && len(l.Missing) == 0:
		return "it says incomplete, and not what is missing"
	}
	return ""
}

// tokens: what the nodes produced is what the client was given.
func tokens(l *timeline.Line) string {
	if !l.Complete || l.Outcome != phase.Finished {
		return ""
	}
	produced, nodes := 0, 0
	given := map[int]int{} // by sub-request: what legs that were cut had given before
	last := map[int]int{}  // by sub-request: the attempt whose tokens the client got
	for _, a := range l.Attempts {
		last[a.Sub] = max(last[a.Sub], a.Attempt)
	}
	prefilled := map[int]bool{}
	for _, p := range l.Phases {
		if p.Role == phase.Disagg || !finished(l, &p) || p.Attempt != last[p.Sub] { // a prefill whose other leg failed is no part of the answer
			continue
		}
		if p.Role == phase.Ctx {
			if prefilled[p.Sub] { // two sampled the first token, one of them gave it
				continue
			}
			prefilled[p.Sub] = true
		}
		nodes++
		produced += p.Tokens.Output
		if p.Tokens.Cached > p.Tokens.Prompt {
			return fmt.Sprintf("%s reused %d of %d prompt tokens", p.Node, p.Tokens.Cached, p.Tokens.Prompt)
		}
	}
	for _, a := range l.Attempts {
		if a.Outcome == phase.Finished {
			given[a.Sub] = max(given[a.Sub], a.Given)
		}
	}
	for _, n := range given {
		produced += n
	}
	if nodes > 0 && produced != l.Tokens.Output {
		return fmt.Sprintf("the nodes produced %d tokens, the client got %d", produced, l.Tokens.Output)
	}
	return ""
}

func finished(l *timeline.Line, p *timeline.Phase) bool {
	for _, a := range l.Attempts {
		if a.Role == p.Role && a.Node == p.Node && a.Sub == p.Sub && a.Attempt == p.Attempt {
			return a.Outcome == phase.Finished
		}
	}
	return false
}

// bytesMoved: both sides of a hand-over counted the same.
func bytesMoved(l *timeline.Line) string {
	if !l.Complete || l.Outcome != phase.Finished {
		return ""
	}
	for i := range l.Phases {
		g := &l.Phases[i]
		if g.Role != phase.Gen || len(g.Transfer) == 0 || !finished(l, g) {
			continue
		}
		for j := range l.Phases {
			c := &l.Phases[j]
			if c.Role == phase.Ctx && c.Sub == g.Sub && c.Attempt == g.Attempt && c.Disagg == g.Disagg && len(c.Transfer) > 0 && finished(l, c) && !l.Beside(c) && c.Bytes != g.Bytes {
				return fmt.Sprintf("%s sent %d bytes of KV, %s received %d", c.Node, c.Bytes, g.Node, g.Bytes)
			}
		}
	}
	return ""
}

// conversion: every converted stamp follows from its raw one.
func conversion(l *timeline.Line) string {
	for i := range l.Phases {
		p := &l.Phases[i]
		if p.Clock.OffsetNS == nil {
			continue
		}
		for _, s := range p.Stamps {
			if s.Ref == nil {
				continue
			}
			skew := int64(float64(s.Raw-p.Clock.AtNS) * float64(p.Clock.SkewPPB) * 1e-9)
			if want := s.Raw + *p.Clock.OffsetNS + skew - l.StartNS; want-*s.Ref > 1 || *s.Ref-want > 1 {
				return fmt.Sprintf("%s.%s is converted to %d, its raw stamp and offset give %d", p.Node, s.Name, *s.Ref, want)
			}
		}
	}
	return ""
}
