package web

import (
	"slices"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// row is a request as the list shows it: a few hundred bytes instead of its line, so that a page can hold ten thousand.
type row struct {
	Seq      int64    `json:"seq"`
	ID       string   `json:"id"`
	ClientID string   `json:"client_id,omitempty"`
	WallNS   int64    `json:"wall_ns,omitempty"` // UTC of its start; absent: not known
	Outcome  string   `json:"outcome"`
	Complete bool     `json:"complete"`
	Style    string   `json:"style"`
	Model    string   `json:"model"`
	TTFTNS   *int64   `json:"ttft_ns"`
	E2ENS    *int64   `json:"e2e_ns"`
	Prompt   *int64   `json:"prompt"` // null: not known
	Output   int      `json:"output"`
	Nodes    []string `json:"nodes"`
	Dominant string   `json:"dominant,omitempty"` // the longest span until the first token
	Bar      []int64  `json:"bar"`                // per part: kind, start and width in thousandths of the whole
	Odd      int      `json:"odd,omitempty"`      // causality violations and negative spans
}

// Kinds of a bar's parts, in the order of the page's colours.
const (
	kindRouter = iota
	kindCtx
	kindGen
	kindNetwork
	kindKV
	kindDecode
)

// minPart is the width, in thousandths, below which a part of a list's bar is not drawn.
const minPart = 4

func newRow(l *timeline.Line) row {
	prompt, _ := l.Tokens.Known()
	r := row{
		ID: l.RequestID, ClientID: l.ClientRequestID, WallNS: l.WallNS, Outcome: string(l.Outcome), Complete: l.Complete, Style: l.Style,
		Model: l.Model, TTFTNS: l.TTFTNS, E2ENS: l.E2ENS, Prompt: prompt, Output: l.Tokens.Output, Bar: []int64{},
		Dominant: l.CriticalSpan, Odd: len(l.Violations) + l.NegativeSpans,
	}
	roles := map[string]phase.Role{}
	r.Nodes = make([]string, 0, len(l.Attempts))
	for _, a := range l.Attempts {
		roles[a.Node] = a.Role
		if !slices.Contains(r.Nodes, a.Node) {
			r.Nodes = append(r.Nodes, a.Node)
		}
	}
	if l.E2ENS == nil || *l.E2ENS <= 0 {
		return r
	}
	var room [3 * 16]int64 // for most
	bar := room[:0]
	for _, s := range l.Spans {
		start, width := 1000*s.StartNS / *l.E2ENS, 1000*s.DurNS / *l.E2ENS
		if width < minPart {
			continue
		}
		kind := int64(spanKind(s, roles))
		if n := len(bar); n > 0 && bar[n-3] == kind && start-bar[n-2]-bar[n-1] <= 1 {
			bar[n-1] = start + width - bar[n-2]
			continue
		}
		bar = append(bar, kind, start, width)
	}
	r.Bar = append(r.Bar, bar...)
	return r
}

// spanKind says whose work a span is.
func spanKind(s timeline.Span, roles map[string]phase.Role) int {
	switch {
	case strings.HasPrefix(s.Name, "decode"):
		return kindDecode
	case strings.HasPrefix(s.Name, "kv_"):
		return kindKV
	case strings.Contains(s.Node, ">"):
		return kindNetwork
	}
	switch roles[s.Node] {
	case phase.Ctx:
		return kindCtx
	case phase.Gen:
		return kindGen
	}
	return kindRouter
}
