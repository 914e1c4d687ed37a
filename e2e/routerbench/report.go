package routerbench

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
)

// benchLine is a turn in the format of Go's benchmarks.
func benchLine(load, subject string, s *sample) string {
	var b strings.Builder
	fmt.Fprintf(&b, "BenchmarkRouter/load=%s/router=%s %d %.1f req/s %.1f tok/s %.4f p50-ms %.4f p99-ms",
		load, subject, max(1, s.requests), s.perSecond(s.requests), s.perSecond(s.tokens), percentile(s.latency, 0.5)/1e6, percentile(s.latency, 0.99)/1e6)
	if s.cpu > 0 && s.requests > 0 {
		fmt.Fprintf(&b, " %.2f cpu-us/req", us(s)/float64(s.requests))
	}
	if s.cpu > 0 && s.tokens > 0 {
		fmt.Fprintf(&b, " %.2f cpu-us/tok", us(s)/float64(s.tokens))
	}
	if len(s.delay) > 0 {
		fmt.Fprintf(&b, " %.4f delay-p50-ms %.4f delay-p99-ms", percentile(s.delay, 0.5)/1e6, percentile(s.delay, 0.99)/1e6)
	}
	return b.String()
}

// Write prints the table, the absolute values, and the lines for benchstat.
func (r *Result) Write(w io.Writer) error {
	fmt.Fprintln(w, "Ratios are to the naive router's value of the same round, medians over the rounds; t: tokens a request, c: streams.")
	fmt.Fprintln(w)
	r.table(w, "measured", func(l Line, name string) float64 { return l.Cells[name].Compared }, true)
	fmt.Fprintln(w)
	r.table(w, "absolute", func(l Line, name string) float64 { return l.Cells[name].Value }, false)
	for name, why := range r.Skipped {
		fmt.Fprintf(w, "\n%s was not measured: %s\n", name, why)
	}
	for _, f := range r.Failures {
		fmt.Fprintf(w, "\nFAILED: %s\n", f)
	}
	fmt.Fprintln(w)
	_, err := fmt.Fprintln(w, strings.Join(r.Bench, "\n"))
	return err
}

func (r *Result) table(w io.Writer, title string, value func(Line, string) float64, goals bool) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	head := "\t" + title + "\tunit\t" + strings.Join(r.Subjects, "\t") + "\t"
	if goals {
		head += "goal\t\t"
	}
	fmt.Fprintln(t, head)
	for _, l := range r.Lines {
		line := "\t" + l.title + "\t" + l.unitOf(goals) + "\t"
		for _, name := range r.Subjects {
			line += number3(l.cell(name, value)) + "\t"
		}
		if goals {
			line += l.goalText() + "\t" + map[bool]string{true: "met", false: "missed"}[l.Met()] + "\t"
		}
		fmt.Fprintln(t, line)
	}
	_ = t.Flush() // the writer's own error comes with the last line
}

func (l Line) cell(name string, value func(Line, string) float64) float64 {
	if _, ok := l.Cells[name]; !ok {
		return math.NaN()
	}
	return value(l, name)
}

func (l Line) unitOf(compared bool) string {
	if compared && l.compare == toNaive {
		return "x naive"
	}
	return l.unit
}

func (l Line) goalText() string {
	if l.least {
		return fmt.Sprintf(">= %g", l.goal)
	}
	return fmt.Sprintf("<= %g", l.goal)
}

// number3 has three significant digits; a dash: not measured.
func number3(v float64) string {
	switch {
	case math.IsNaN(v):
		return "-"
	case math.Abs(v) >= 100:
		return fmt.Sprintf("%.0f", v)
	case math.Abs(v) >= 10:
		return fmt.Sprintf("%.1f", v)
	case math.Abs(v) >= 1:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}
