package tail

import (
	"fmt"
	"strings"
	"time"
)

// Modes in which two devices serve.
const (
	Disaggregated = "disaggregated"
	Aggregated    = "aggregated"
)

// Goals of a comparison.
const (
	maxTail    = 1.3 // disturbed p99 over undisturbed p99, disaggregated
	minGoodput = 1.5 // disaggregated over aggregated, both disturbed
	limitTimes = 2   // the limit of a gap, over the undisturbed median
)

// Comparison is what both modes did with one number of streams: rounds joined.
type Comparison struct {
	Quiet, Disturbed map[string]Window // by mode
}

// Limit is the longest gap that is still good: the same for both modes.
func (c Comparison) Limit() time.Duration {
	q := c.Quiet[Disaggregated]
	return limitTimes * q.ITL.Quantile(0.5)
}

// Tail is how many times the p99 gap of a mode grows when long prompts arrive.
func (c Comparison) Tail(mode string) float64 {
	q, d := c.Quiet[mode], c.Disturbed[mode]
	return float64(d.ITL.Quantile(0.99)) / float64(q.ITL.Quantile(0.99))
}

// Gain is the goodput of disaggregated over that of aggregated; ok is false when aggregated has none.
func (c Comparison) Gain() (gain float64, ok bool) {
	a := c.Disturbed[Aggregated].Goodput(c.Limit())
	if a == 0 {
		return 0, false
	}
	return c.Disturbed[Disaggregated].Goodput(c.Limit()) / a, true
}

// Table prints the comparison as Markdown, goals beside figures.
func (c Comparison) Table() string {
	var b strings.Builder
	q := c.Quiet[Disaggregated]
	fmt.Fprintf(&b, "%d streams; a gap is good up to %s (%d x the undisturbed median)\n\n", q.Streams, ms(c.Limit()), limitTimes)
	b.WriteString("| mode | long prompts /s | ITL p50 ms | p99 | p99.9 | TTFT p50 ms | p99 | long TTFT p50 ms | p99 | goodput tok/s | streams /s | failed | shed |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, mode := range []string{Disaggregated, Aggregated} {
		for _, w := range []Window{c.Quiet[mode], c.Disturbed[mode]} {
			fmt.Fprintf(&b, "| %s | %.2f | %s | %s | %s | %s | %s | %s | %s | %.0f | %.1f | %d | %d |\n", mode, w.LongRate,
				ms(w.ITL.Quantile(0.5)), ms(w.ITL.Quantile(0.99)), ms(w.ITL.Quantile(0.999)),
				ms(w.TTFT.Quantile(0.5)), ms(w.TTFT.Quantile(0.99)), orNone(w.LongTTFT, 0.5), orNone(w.LongTTFT, 0.99),
				w.Goodput(c.Limit()), w.StreamsPerS(), w.Failed, w.Shed)
		}
	}
	fmt.Fprintf(&b, "\nITL p99, disturbed over undisturbed: disaggregated %.2f (goal at most %.1f: %s), aggregated %.2f\n",
		c.Tail(Disaggregated), maxTail, verdict(c.Tail(Disaggregated) <= maxTail), c.Tail(Aggregated))
	if gain, ok := c.Gain(); ok {
		fmt.Fprintf(&b, "goodput, disaggregated over aggregated: %.2f (goal at least %.1f: %s)\n", gain, minGoodput, verdict(gain >= minGoodput))
	} else {
		fmt.Fprintf(&b, "goodput, disaggregated over aggregated: no stream of the aggregated mode was good (goal at least %.1f: %s)\n",
			minGoodput, verdict(c.Disturbed[Disaggregated].Goodput(c.Limit()) > 0))
	}
	return b.String()
}

func verdict(met bool) string {
	if met {
		return "met"
	}
	return "missed"
}

func orNone(s Sample, q float64) string {
	if len(s.values) == 0 {
		return "–"
	}
	return ms(s.Quantile(q))
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d.Microseconds())/1000) }
