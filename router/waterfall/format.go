package waterfall

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Duration writes ns in a unit that leaves three significant digits: "812 ns", "1.32 µs", "14.1 ms", "2.05 s".
func Duration(ns int64) string {
	a := math.Abs(float64(ns))
	switch {
	case a < 1e3:
		return fmt.Sprintf("%d ns", ns)
	case a < 999.5e3:
		return three(float64(ns)/1e3) + " µs"
	case a < 999.5e6:
		return three(float64(ns)/1e6) + " ms"
	}
	return three(float64(ns)/1e9) + " s"
}

// three writes v with three significant digits.
func three(v float64) string {
	switch a := math.Abs(v); {
	case a < 9.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case a < 99.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// Bytes writes a size: "812 B", "1.25 MiB".
func Bytes(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return three(float64(n)/(1<<10)) + " KiB"
	case n < 1<<30:
		return three(float64(n)/(1<<20)) + " MiB"
	}
	return three(float64(n)/(1<<30)) + " GiB"
}

// Count writes a number with commas.
func Count(n int64) string {
	s := strconv.FormatInt(n, 10)
	neg := strings.HasPrefix(s, "-")
	s = strings.TrimPrefix(s, "-")
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	if neg {
		return "-" + s
	}
	return s
}

// Clean makes foreign text fit for a terminal: control characters, which could move the cursor or change colours, become
// '·', and what is longer than n columns is cut with '…'.
func Clean(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || (r >= 0x7f && r < 0xa0) || r == utf8.RuneError || (r >= 0x200b && r <= 0x200f) || (r >= 0x2028 && r <= 0x202e) || (r >= 0x2066 && r <= 0x2069) {
			return '·'
		}
		return r
	}, s)
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	if n < 1 {
		return ""
	}
	return string([]rune(s)[:n-1]) + "…"
}

// pad fills s with spaces to n columns, on its right or, for numbers, on its left.
func pad(s string, n int) string { return s + strings.Repeat(" ", max(0, n-utf8.RuneCountInString(s))) }

func padLeft(s string, n int) string {
	return strings.Repeat(" ", max(0, n-utf8.RuneCountInString(s))) + s
}

// Spark draws values as a line of blocks, at most width of them: each is the largest of its share of the values.
func Spark(values []int64, width int) string {
	if len(values) == 0 || width < 1 {
		return ""
	}
	n := min(width, len(values))
	cells := make([]int64, n)
	top := int64(1)
	for i := range cells {
		for _, v := range values[i*len(values)/n : (i+1)*len(values)/n] {
			cells[i] = max(cells[i], v)
		}
		top = max(top, cells[i])
	}
	levels := []rune("▁▂▃▄▅▆▇█")
	var b strings.Builder
	for _, v := range cells {
		b.WriteRune(levels[max(0, min(7, int(float64(v)/float64(top)*8)))])
	}
	return b.String()
}
