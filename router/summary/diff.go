package summary

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"

	"meridian.internal/router/waterfall"
)

// Change is what became of one measure from A to B. A change is sure when the 95 % intervals of both medians do not
// overlap, and both have enough values for one.
type Change struct {
	Name     string `json:"name"`
	A        Median `json:"a"`
	B        Median `json:"b"`
	DeltaNS  int64  `json:"delta_ns"` // of the medians
	MeanNS   int64  `json:"mean_delta_ns"`
	Sure     bool   `json:"sure"`
	OnlySide string `json:"only,omitempty"` // "a" or "b": the other has none
}

// leastInterval is from how many values on their least and largest hold the median between them with 95 % probability:
// 1 - 2^(1-n).
const leastInterval = 6

// Median is a median with its 95 % interval, by order statistics: no assumption about the distribution. Of less than
// leastInterval values it is from the least to the largest, and may well not hold the median.
type Median struct {
	N    int64 `json:"n"`
	NS   int64 `json:"ns"`
	LoNS int64 `json:"lo_ns"`
	HiNS int64 `json:"hi_ns"`
}

// median gives the interval between the ranks n/2 ± 1.96·√n/2, where the median lies with 95 % probability.
func (h *histogram) median() Median {
	m := Median{N: h.n}
	if h.n == 0 {
		return m
	}
	half := 1.96 * math.Sqrt(float64(h.n)) / 2
	mid := float64(h.n) / 2
	m.LoNS, m.NS, m.HiNS = h.rank(mid-half), h.rank(mid), h.rank(mid+half)
	return m
}

// Diff compares two summaries: TTFT, E2E, time per token, then the spans by how much they moved the mean.
func Diff(a, b *Summary) []Change {
	list := []Change{change("time to first token", &a.ttft, &b.ttft), change("end to end", &a.e2e, &b.e2e), change("per token", &a.token, &b.token)}
	names := slices.Clone(a.order)
	for _, n := range b.order {
		if !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	var spans []Change
	for _, n := range names {
		spans = append(spans, change(n, at(a.spans, n), at(b.spans, n)))
	}
	slices.SortStableFunc(spans, func(x, y Change) int { return cmp.Compare(magnitude(y.MeanNS), magnitude(x.MeanNS)) })
	return append(list, spans...)
}

func magnitude(v int64) int64 { return max(v, -v) }

func change(name string, a, b *histogram) Change {
	c := Change{Name: name, A: a.median(), B: b.median()}
	c.DeltaNS = c.B.NS - c.A.NS
	c.MeanNS = b.quantiles().Mean - a.quantiles().Mean
	switch {
	case a.n == 0 && b.n > 0:
		c.OnlySide = "b"
	case b.n == 0 && a.n > 0:
		c.OnlySide = "a"
	default:
		c.Sure = min(a.n, b.n) >= leastInterval && (c.A.HiNS < c.B.LoNS || c.B.HiNS < c.A.LoNS)
	}
	return c
}

// WriteDiff writes changes as a table.
func WriteDiff(w io.Writer, list []Change, color bool) error {
	p := &page{Writer: bufio.NewWriter(w), color: color}
	p.printf("\n%s\n", p.grey(fmt.Sprintf("%s%10s%10s%11s%9s   %s", left("median", 22), "A", "B", "change", "", "95 % intervals")))
	for _, c := range list {
		if c.A.N == 0 && c.B.N == 0 {
			continue
		}
		mark, percent := " ", ""
		if c.Sure {
			mark = p.arrow(c.DeltaNS)
		}
		if c.A.NS != 0 && c.OnlySide == "" {
			percent = relative(c.A.NS, c.B.NS)
		}
		note := fmt.Sprintf("%s – %s, %s – %s", waterfall.Duration(c.A.LoNS), waterfall.Duration(c.A.HiNS), waterfall.Duration(c.B.LoNS), waterfall.Duration(c.B.HiNS))
		if c.OnlySide != "" {
			note = "only in " + c.OnlySide
		}
		delta := waterfall.Duration(c.DeltaNS)
		if c.DeltaNS > 0 {
			delta = "+" + delta
		}
		p.printf("%s%s%s%11s%9s %s %s\n", left(waterfall.Clean(c.Name, 21), 22), right(c.A.NS), right(c.B.NS), delta, percent, mark, p.grey(note))
	}
	p.printf("\n%s\n\n", p.grey("▲ slower, ▼ faster: the intervals of the medians do not overlap, and are of 6 requests at least. Without a mark the change may be chance."))
	return p.Flush()
}

// relative is the change from a to b: in per cent, or, where that is a large number, as what multiple of a is b.
func relative(a, b int64) string {
	if times := float64(b) / float64(a); times >= 10 {
		return fmt.Sprintf("× %.0f", times)
	}
	return fmt.Sprintf("%+.1f %%", 100*float64(b-a)/float64(a))
}

func (p *page) arrow(delta int64) string {
	mark, c := "▲", "203"
	if delta < 0 {
		mark, c = "▼", "114"
	}
	if !p.color {
		return mark
	}
	return "\x1b[38;5;" + c + "m" + mark + "\x1b[0m"
}
