package summary

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"meridian.internal/router/waterfall"
)

// Write writes the result as tables for a terminal.
func (r Result) Write(w io.Writer, color bool) error {
	p := &page{Writer: bufio.NewWriter(w), color: color, names: r.names()}
	p.counts(r)
	if r.TTFT.N > 0 || r.E2E.N > 0 {
		p.latencies(r)
		p.spans(r)
		p.nodes(r)
		p.groups("pair", r.Pairs)
		p.groups("hour", r.Hours)
		p.slowest(r)
	}
	p.printf("\n")
	return p.Flush()
}

type page struct {
	*bufio.Writer
	color bool
	names int // columns for a name
}

// Columns for names: as many as the longest needs, within these.
const (
	leastName = 22
	mostName  = 40
)

func (r Result) names() int {
	most := leastName
	for _, list := range [][]Named{r.Spans, r.Pairs, r.Hours, r.Nodes} {
		for _, n := range list {
			most = max(most, utf8.RuneCountInString(n.label())+1)
		}
	}
	return min(most, mostName)
}

func (n *Named) label() string {
	if n.Node == "" {
		return n.Name
	}
	return n.Node + " " + n.Name
}

func (p *page) printf(format string, a ...any) { fmt.Fprintf(p.Writer, format, a...) }

func (p *page) grey(s string) string {
	if !p.color {
		return s
	}
	return "\x1b[38;5;244m" + s + "\x1b[0m"
}

func (p *page) bold(s string) string {
	if !p.color {
		return s
	}
	return "\x1b[1m" + s + "\x1b[0m"
}

func (p *page) alarm(n int64, what string) string {
	s := fmt.Sprintf("%s %s", waterfall.Count(n), what)
	if !p.color || n == 0 {
		return s
	}
	return "\x1b[38;5;203m" + s + "\x1b[0m"
}

func (p *page) counts(r Result) {
	var parts []string
	for i, m := range []map[string]int64{r.Outcomes, r.Styles} {
		what := []string{"outcome", "style"}[i] // a line without the router's record has none
		for _, k := range slices.SortedFunc(maps.Keys(m), func(a, b string) int { return cmp.Or(cmp.Compare(m[b], m[a]), cmp.Compare(a, b)) }) {
			parts = append(parts, fmt.Sprintf("%s %s", waterfall.Count(m[k]), cmp.Or(waterfall.Clean(k, 30), "of unknown "+what)))
		}
	}
	p.printf("\n%s   %s\n", p.bold(waterfall.Count(r.Requests)+" requests"), strings.Join(parts, "  "))
	bound := "–"
	if r.MaxBoundNS != nil {
		bound = "±" + waterfall.Duration(*r.MaxBoundNS)
	}
	p.printf("%s complete   %s   %s   %s   clock bound at most %s\n", waterfall.Count(r.Complete), p.alarm(r.Incomplete, "incomplete"),
		p.alarm(r.Negative, "negative spans"), p.alarm(r.Violations, "causality violations"), bound)
	p.printf("%s\n", p.grey(fmt.Sprintf("%s prompt tokens (%s cached), %s output tokens, %s of KV handed over%s", waterfall.Count(r.PromptTokens),
		waterfall.Count(r.CachedTokens), waterfall.Count(r.OutputTokens), waterfall.Bytes(r.KVBytes), hidden(r.HiddenShare))))
}

func hidden(share *float64) string {
	if share == nil {
		return ""
	}
	return fmt.Sprintf(", %.0f %% of its time behind prefill", 100**share)
}

func (p *page) header(name string) {
	p.printf("\n%s\n", p.grey(fmt.Sprintf("%s%8s%10s%10s%10s%10s%10s", left(name, p.names), "n", "p50", "p90", "p99", "max", "mean")))
}

func (p *page) quantiles(name string, q Quantiles, tail string) {
	p.printf("%s%8s%s%s%s%s%s%s\n", left(waterfall.Clean(name, p.names-1), p.names), waterfall.Count(q.N), right(q.P50), right(q.P90), right(q.P99), right(q.Max), right(q.Mean), tail)
}

func left(s string, n int) string {
	return s + strings.Repeat(" ", max(0, n-utf8.RuneCountInString(s)))
}

func right(ns int64) string {
	s := waterfall.Duration(ns)
	return strings.Repeat(" ", max(0, 10-utf8.RuneCountInString(s))) + s
}

func (p *page) latencies(r Result) {
	p.header("what the client saw")
	p.quantiles("time to first token", r.TTFT, "")
	p.quantiles("per token after it", r.PerToken, "")
	p.quantiles("end to end", r.E2E, "")
}

// spans shows where the time went, with each span's share of all.
func (p *page) spans(r Result) {
	total := float64(r.E2E.Mean) * float64(r.E2E.N)
	p.header("where the time went")
	for _, s := range r.Spans {
		share := 0.0
		if total > 0 {
			share = float64(s.Mean) * float64(s.N) / total
		}
		p.quantiles(s.Name, s.Quantiles, "  "+p.bar(share))
	}
	p.quantiles("unaccounted, absolute", r.Unaccounted, "")
}

func (p *page) bar(share float64) string {
	const width = 20
	n := int(min(max(share, 0), 1) * width * 8) // where a clock is wrong, a span may be of any length
	s := strings.Repeat("█", n/8)
	if n%8 > 0 {
		s += string([]rune(" ▏▎▍▌▋▊▉")[n%8])
	}
	return s + p.grey(fmt.Sprintf(" %.1f %%", 100*share))
}

// most is how many rows a table of groups has here; --json has them all.
const most = 24

// nodes shows the spans on each node in which most of the time went.
func (p *page) nodes(r Result) {
	weight := func(n Named) float64 { return float64(n.Mean) * float64(n.N) }
	list := slices.Clone(r.Nodes)
	slices.SortStableFunc(list, func(a, b Named) int { return cmp.Compare(weight(b), weight(a)) })
	total := float64(r.E2E.Mean) * float64(r.E2E.N)
	for i, n := range list { // what is below a part in a thousand says nothing
		if i == most || weight(n)*1000 < total {
			list = list[:i]
			break
		}
	}
	if len(list) == 0 {
		return
	}
	slices.SortStableFunc(list, func(a, b Named) int { return cmp.Compare(a.Node, b.Node) })
	p.header("where most went, by node")
	for _, n := range list {
		p.quantiles(n.label(), n.Quantiles, "")
	}
	p.more(len(r.Nodes) - len(list))
}

// groups shows TTFT by who served or when, if there is more than one: the last of them, which are the newest hours.
func (p *page) groups(what string, list []Named) {
	if len(list) < 2 {
		return
	}
	p.header("TTFT by " + what)
	rest := max(0, len(list)-most)
	for _, g := range list[rest:] {
		p.quantiles(g.Name, g.Quantiles, "")
	}
	p.more(rest)
}

func (p *page) more(n int) {
	if n > 0 {
		p.printf("%s\n", p.grey(fmt.Sprintf("and %s more: --json", waterfall.Count(int64(n)))))
	}
}

func (p *page) slowest(r Result) {
	if len(r.Slowest) == 0 {
		return
	}
	p.printf("\n%s\n", p.grey("slowest to the first token"))
	for _, s := range r.Slowest {
		id := s.RequestID
		if s.ClientID != "" {
			id += " (" + s.ClientID + ")"
		}
		p.printf("%s  %s  %s %s on %s\n", right(s.TTFTNS), left(waterfall.Clean(id, 48), 48), waterfall.Duration(s.SpanNS), waterfall.Clean(s.Span, 20), waterfall.Clean(s.Node, 30))
	}
}
