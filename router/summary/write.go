package summary

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"meridian.internal/router/waterfall"
)

// Write writes the result as tables for a terminal.
func (r Result) Write(w io.Writer, color bool) error {
	p := &page{Writer: bufio.NewWriter(w), color: color}
	p.counts(r)
	if r.TTFT.N > 0 || r.E2E.N > 0 {
		p.latencies(r)
		p.spans(r)
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
	for _, m := range []map[string]int64{r.Outcomes, r.Styles} {
		keys := make([]string, 0, len(m))
		for k := range m {
			keys = append(keys, k)
		}
		slices.SortFunc(keys, func(a, b string) int { return int(m[b] - m[a]) })
		for _, k := range keys {
			parts = append(parts, fmt.Sprintf("%s %s", waterfall.Count(m[k]), waterfall.Clean(k, 30)))
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
	p.printf("\n%s\n", p.grey(fmt.Sprintf("%s%8s%10s%10s%10s%10s%10s", left(name, 22), "n", "p50", "p90", "p99", "max", "mean")))
}

func (p *page) quantiles(name string, q Quantiles, tail string) {
	p.printf("%s%8s%s%s%s%s%s%s\n", left(waterfall.Clean(name, 21), 22), waterfall.Count(q.N), right(q.P50), right(q.P90), right(q.P99), right(q.Max), right(q.Mean), tail)
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
	n := int(share * width * 8)
	s := strings.Repeat("█", max(0, n/8))
	if n > 0 && n%8 > 0 {
		s += string([]rune(" ▏▎▍▌▋▊▉")[n%8])
	}
	return s + p.grey(fmt.Sprintf(" %.1f %%", 100*share))
}

// groups shows TTFT by who served or when, if there is more than one.
func (p *page) groups(what string, list []Named) {
	if len(list) < 2 {
		return
	}
	p.header("TTFT by " + what)
	for _, g := range list {
		p.quantiles(g.Name, g.Quantiles, "")
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
