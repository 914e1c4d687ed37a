package timeline

import (
	"slices"
	"strings"

	"meridian.internal/shared/phase"
)

// fillSpans tiles what the client waited for.
func (m *merger) fillSpans(router *phase.Record) {
	if router == nil {
		return
	}
	ch := newChain(m.sources, router)
	l := m.line
	stages := stagesOf(router.Style)
	for i := range stages {
		st := &stages[i]
		if !ch.holds(st) {
			continue
		}
		if st.when == chunked {
			m.prefill(ch, st)
			continue
		}
		from, to := ch.edge(&st.start), ch.edge(&st.end)
		switch {
		case !from.ok || !to.ok:
		case st.when&resumed != 0:
			m.seams(ch, st.name, from, to)
		default:
			m.span(st.name, from, to)
		}
	}
	l.Spans = append(l.Spans, m.spans...)
	s := &router.Stamps
	first := s.FirstTokenNS
	if router.Streamed {
		first = s.FirstTokenSentNS
	}
	l.TTFTNS, l.E2ENS = since(s.ReceiveNS, first), since(s.ReceiveNS, s.EndNS)
	if l.E2ENS != nil {
		rest := *l.E2ENS
		for _, sp := range l.Spans {
			rest -= sp.DurNS
		}
		l.UnaccountedNS = &rest
	}
	l.CriticalSpan = Longest(l.Spans).Name
	m.handover(ch)
	m.decode(ch)
}

// Longest gives the span that took most of the time to the first token, with the sum of all of its name: the chunks of a prefill are
// one prefill. Its name is empty where nothing took any.
func Longest(spans []Span) (longest Span) {
	sums := make([]Span, 0, usualSpans) // by name
	for i := range spans {
		name := spans[i].Name
		if name == "decode" || name == "finish" {
			break
		}
		k := slices.IndexFunc(sums, func(s Span) bool { return s.Name == name })
		if k < 0 {
			sums = append(sums, spans[i])
		} else {
			sums[k].DurNS += spans[i].DurNS
		}
	}
	for i := range sums {
		if sums[i].DurNS > longest.DurNS {
			longest = sums[i]
		}
	}
	return longest
}

// decode splits the decode steps. Steps that the node did not keep would be taken for waiting, so then it says nothing.
func (m *merger) decode(ch chain) {
	s := ch.g
	if s == nil {
		s = ch.a
	}
	if s == nil || s.Steps == nil || s.Steps.Truncated > 0 || len(s.Steps.Iter) == 0 {
		return
	}
	total := since(s.Record.Stamps.FirstTokenNS, s.Record.Stamps.LastTokenNS)
	if total == nil {
		return
	}
	d := &Decode{Steps: len(s.Steps.Iter), WaitNS: *total, PreemptedNS: s.Record.PreemptedNS}
	for i := range s.Steps.Iter {
		compute, sample := s.Steps.ForwardEndNS[i]-s.Steps.ForwardStartNS[i], s.Steps.SampleEndNS[i]-s.Steps.ForwardEndNS[i]
		d.ComputeNS, d.SampleNS, d.WaitNS = d.ComputeNS+compute, d.SampleNS+sample, d.WaitNS-compute-sample
	}
	m.line.Decode = d
}

func since(from, to *int64) *int64 {
	if from == nil || to == nil {
		return nil
	}
	d := *to - *from
	return &d
}

func (m *merger) span(name string, from, to end) {
	sp := Span{Name: name, Node: from.src.Record.Node, StartNS: from.at, DurNS: to.at - from.at, BoundNS: from.src.same()}
	if from.src != to.src {
		sp.Node = m.way(from.src.Record.Node, to.src.Record.Node)
		sp.BoundNS = from.bound + to.bound
		if m.line.MaxBoundNS == nil || sp.BoundNS > *m.line.MaxBoundNS {
			bound := sp.BoundNS // of its own: sp itself stays off the heap
			m.line.MaxBoundNS = &bound
		}
	}
	if sp.DurNS < 0 {
		m.line.NegativeSpans++
	}
	m.spans = append(m.spans, sp)
}

// way names the way from one node to another, made once.
func (m *merger) way(from, to string) string {
	for _, w := range m.ways {
		if len(w) == len(from)+1+len(to) && strings.HasPrefix(w, from) && strings.HasSuffix(w, to) {
			return w
		}
	}
	m.ways = append(m.ways, from+">"+to)
	return m.ways[len(m.ways)-1]
}

// prefill makes a span of each chunk's forward, of each wait between two chunks, and of the sampling after the last. In a pipeline
// a chunk enters the first stage while the one before is in the next: its span is what follows the end of that one.
func (m *merger) prefill(ch chain, st *stage) {
	s := ch.who(st.from[0])
	at := func(ns int64) end { return end{point: s.place(ns), src: s} }
	chunks := s.Record.Chunks
	last := end{} // of the chunk before, where that has taken the start of this one
	for i := range chunks {
		c := &chunks[i]
		start, forward := at(c.ForwardStartNS), at(c.ForwardEndNS)
		if !start.ok || !forward.ok {
			return
		}
		if last.ok {
			start = last
		}
		m.span("prefill", start, forward)
		if last = (end{}); i+1 < len(chunks) {
			next := at(chunks[i+1].ForwardStartNS)
			if next.ok && next.at < forward.at && len(chunks[i+1].StageNS) > 0 {
				last = forward
			} else if next.ok {
				m.span("prefill_wait", forward, next)
			}
		} else if done := at(c.SampleEndNS); done.ok {
			m.span("prefill_sample", forward, done)
		}
	}
}

// seams makes one span, or, where the answer was cut within it, one on each side of a resume.
func (m *merger) seams(ch chain, name string, from, to end) {
	for _, s := range ch.r.Record.Resumes {
		cut, token := end{point: ch.r.place(s.CutNS), src: ch.r}, end{point: ch.r.place(s.TokenNS), src: ch.r}
		if s.Sub != ch.r.Record.Sub || !cut.ok || !token.ok || cut.at < from.at || token.at > to.at {
			continue
		}
		m.span(name, from, cut)
		m.span(resume, cut, token)
		from = token
	}
	m.span(name, from, to)
}

// handover says how much of the KV transfer was hidden behind prefill.
func (m *merger) handover(ch chain) {
	if ch.g == nil || ch.g.Record.Transfer == nil {
		return
	}
	t := ch.g.Record.Transfer
	h := &Handover{
		Bytes: t.Bytes, Frames: t.Frames, Tokens: t.Tokens, TokensHeld: t.TokensHeld, WireNS: t.WireNS, InstallNS: t.InstallNS,
		DurNS: since(t.StartNS, t.InstalledNS),
	}
	stamps := &ch.g.Record.Stamps
	h.OpenNS, h.AllocateNS = since(stamps.StartedNS, stamps.QueuedNS), since(stamps.QueuedNS, t.RequestedNS)
	if ch.c != nil && ch.c.Record.Transfer != nil {
		if asked, heard := ch.g.stamp(t.RequestedNS), ch.c.stamp(ch.c.Record.Transfer.RequestedNS); asked.ok && heard.ok {
			h.NotifyNS = since(&asked.at, &heard.at)
		}
	}
	m.line.Handover = h
	if ch.c == nil || h.DurNS == nil {
		return
	}
	start, installed, sampled := ch.g.stamp(t.StartNS), ch.g.stamp(t.InstalledNS), ch.c.stamp(ch.c.Record.Stamps.FirstTokenNS)
	if start.ok && installed.ok && sampled.ok {
		// The part of [start, installed] on each side of the first token: an intersection, not a clamped difference.
		hidden := max(0, min(installed.at, sampled.at)-start.at)
		visible := *h.DurNS - hidden
		h.HiddenNS, h.VisibleNS = &hidden, &visible
	}
}
