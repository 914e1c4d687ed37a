// Package waterfall draws one timeline for a terminal: what the client waited for, on which node, with the error of every
// gap between two clocks. It reads a merged line and computes nothing that the line does not say.
package waterfall

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// Options of a drawing.
type Options struct {
	Width int  // columns; 0: 100
	Color bool // ANSI colours
}

const (
	minWidth = 60
	maxWidth = 200
)

// Render draws l.
func Render(w io.Writer, l *timeline.Line, o Options) error {
	if o.Width == 0 {
		o.Width = 100
	}
	d := &drawing{Writer: bufio.NewWriter(w), l: l, width: max(minWidth, min(o.Width, maxWidth)), style: style{o.Color}}
	d.head()
	d.toFirstToken()
	d.afterFirstToken()
	d.handover()
	d.trouble()
	d.clocks()
	return d.Flush()
}

type drawing struct {
	*bufio.Writer
	style
	l     *timeline.Line
	width int
}

func (d *drawing) printf(format string, a ...any) { fmt.Fprintf(d.Writer, format, a...) }

// head says what the request was and how long it took.
func (d *drawing) head() {
	l := d.l
	title := Clean(l.RequestID, 60)
	if l.ClientRequestID != "" && l.ClientRequestID != l.RequestID {
		title += "  (" + Clean(l.ClientRequestID, 40) + ")"
	}
	d.printf("\n%s  %s", d.bold(title), d.outcome())
	if l.Amends {
		d.printf("  %s", d.paint("amended", grey))
	}
	where := []string{Clean(l.Model, 30), Clean(l.Style, 20), Clean(path(l), 60)}
	if l.WallNS != 0 {
		where = append(where, time.Unix(0, l.WallNS).UTC().Format("2006-01-02 15:04:05.000 UTC"))
	}
	d.printf("\n%s\n\n", d.paint(strings.Join(where, " · "), grey))
	fact := func(name, value string, c colour) { d.printf("%s %s   ", d.paint(name, grey), d.paint(value, c)) }
	fact("TTFT", optional(l.TTFTNS), plain)
	fact("E2E", optional(l.E2ENS), plain)
	if n := l.Tokens.Output; n > 1 && l.TTFTNS != nil && l.E2ENS != nil {
		fact("per token", Duration((*l.E2ENS-*l.TTFTNS)/int64(n-1)), plain)
	}
	if u := l.UnaccountedNS; u != nil {
		c := plain
		if l.E2ENS != nil && *u*20 > *l.E2ENS {
			c = red
		}
		fact("unaccounted", Duration(*u), c)
	}
	if l.MaxBoundNS != nil {
		fact("clock", "±"+Duration(*l.MaxBoundNS), plain)
	}
	cached := ""
	if l.Tokens.Cached > 0 {
		cached = fmt.Sprintf(" (%s cached)", Count(int64(l.Tokens.Cached)))
	}
	prompt := "unknown"
	if n, _ := l.Tokens.Known(); n != nil {
		prompt = Count(*n)
	}
	d.printf("%s\n", d.paint(fmt.Sprintf("%s%s → %s tokens", prompt, cached, Count(int64(l.Tokens.Output))), grey))
}

func (d *drawing) outcome() string {
	l := d.l
	text, c := string(l.Outcome), green
	if l.FinishReason != "" {
		text += ", " + l.FinishReason
	}
	if l.Outcome != phase.Finished {
		c = red
	}
	if !l.Streamed {
		text += ", not streamed"
	}
	return d.paint("● "+Clean(text, 40), c)
}

func optional(ns *int64) string {
	if ns == nil {
		return "–"
	}
	return Duration(*ns)
}

// path is the way of the request through the cluster.
func path(l *timeline.Line) string {
	nodes := []string{l.Router}
	for _, role := range []phase.Role{phase.Ctx, phase.Gen} {
		for _, p := range l.Phases {
			if p.Role == role && !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
	}
	return strings.Join(nodes, " → ")
}

// kind gives a span its colour.
func kind(s timeline.Span) colour {
	switch {
	case s.DurNS < 0:
		return red
	case strings.HasPrefix(s.Name, "prefill"):
		return amber
	case strings.HasPrefix(s.Name, "kv_"):
		return magenta
	case strings.Contains(s.Node, ">"):
		return grey
	case s.Name == "decode":
		return teal
	case strings.HasPrefix(s.Name, "router") || s.Name == "relay" || s.Name == "finish" || s.Name == "retry" || s.Name == "ctx_retry":
		return blue
	}
	return green
}

// row is one line of the waterfall: a span, or several that belong together.
type row struct {
	name, node string
	spans      []timeline.Span
	note       string
}

func (r *row) dur() (ns, bound int64) {
	for _, s := range r.spans {
		ns += s.DurNS
		bound = max(bound, s.BoundNS)
	}
	return ns, bound
}

// rows joins the chunks of a prefill, and what lies between them, into one row.
func rows(spans []timeline.Span) (out []row) {
	for _, s := range spans {
		chunk := s.Name == "prefill" || s.Name == "prefill_wait"
		if n := len(out); chunk && n > 0 && out[n-1].name == "prefill" && out[n-1].node == s.Node {
			out[n-1].spans = append(out[n-1].spans, s)
			continue
		}
		out = append(out, row{name: s.Name, node: s.Node, spans: []timeline.Span{s}})
	}
	for i := range out {
		if n := len(out[i].spans); n > 1 {
			wait := int64(0)
			for _, s := range out[i].spans {
				if s.Name == "prefill_wait" {
					wait += s.DurNS
				}
			}
			out[i].note = fmt.Sprintf("%d chunks", (n+1)/2)
			if wait > 0 {
				out[i].note += ", " + Duration(wait) + " between"
			}
		}
	}
	return out
}

// toFirstToken draws the spans until the first token, in a scale of their own: decode would make them invisible.
func (d *drawing) toFirstToken() {
	l := d.l
	limit := int64(1)
	switch {
	case l.TTFTNS != nil && *l.TTFTNS > 0:
		limit = *l.TTFTNS
	case l.E2ENS != nil:
		limit = max(1, *l.E2ENS)
	}
	var early []timeline.Span
	for _, s := range l.Spans {
		if s.Name != "decode" && s.Name != "finish" {
			early = append(early, s)
		}
	}
	list := rows(early)
	nodes, names := 4, 4
	for _, r := range list {
		nodes, names = max(nodes, len([]rune(Clean(r.node, 18)))), max(names, len([]rune(Clean(r.name, 20))))
	}
	bars := d.width - nodes - names - 22
	scale := float64(bars) / float64(limit)
	d.printf("\n%s\n", d.axis(limit, bars, nodes+names+3))
	for _, r := range list {
		d.row(r, nodes, names, bars, scale)
	}
}

// axis is a line of round times.
func (d *drawing) axis(limit int64, bars, indent int) string {
	step := roundStep(limit, max(2, bars/14))
	c := newCanvas(bars + 12)
	for i := range limit/step + 1 { // no sum of steps: it could overflow
		t := i * step
		x := int(float64(t) / float64(limit) * float64(bars))
		label := "0"
		if t > 0 {
			label = Duration(t)
			label = strings.Replace(strings.Replace(label, ".00 ", " ", 1), ".0 ", " ", 1)
		}
		for i, r := range []rune(label) {
			c.set(x+i, r, grey)
		}
	}
	return strings.Repeat(" ", indent) + d.line(c)
}

// roundStep is the smallest of 1, 2, 5 times a power of ten that makes at most n steps.
func roundStep(limit int64, n int) int64 {
	for unit := int64(1); ; unit *= 10 {
		for _, m := range []int64{1, 2, 5} {
			if s := m * unit; limit/s <= int64(n) {
				return s
			}
		}
	}
}

func (d *drawing) row(r row, nodes, names, bars int, scale float64) {
	c := newCanvas(bars)
	for _, s := range r.spans {
		col := kind(s)
		from, to := float64(s.StartNS)*scale, float64(s.StartNS+s.DurNS)*scale
		if s.DurNS < 0 { // drawn where it is, marked as what it is
			from, to = to, from
		}
		if s.Name == "prefill_wait" {
			for x := c.cell(from) + 1; x < c.cell(to); x++ {
				c.set(x, '·', amber)
			}
			continue
		}
		c.bar(from, to, col)
		c.whisker(to, float64(s.BoundNS)*scale, dim)
	}
	ns, bound := r.dur()
	value, col := Duration(ns), plain
	if ns < 0 {
		col = red
	}
	extra := ""
	if bound > 0 {
		extra = " ±" + Duration(bound)
	}
	if r.name == d.l.CriticalSpan {
		extra += " ◀"
	}
	if r.note != "" {
		extra += "  " + r.note
	}
	d.printf("%s %s  %s %s%s\n", d.paint(pad(Clean(r.node, 18), nodes), grey), pad(Clean(r.name, 20), names), d.line(c),
		d.paint(padLeft(value, 8), col), d.paint(extra, grey))
}
