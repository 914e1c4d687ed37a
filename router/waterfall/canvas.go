package waterfall

import "strings"

// colour is a foreground colour of the 256-colour palette; 0 is the terminal's own.
type colour int

const (
	plain   colour = 0
	grey    colour = 244
	dim     colour = 240
	blue    colour = 75
	amber   colour = 214
	magenta colour = 176
	green   colour = 114
	teal    colour = 80
	red     colour = 203
)

// canvas is one line of cells.
type canvas struct {
	cells  []rune
	colour []colour
}

func newCanvas(n int) *canvas {
	c := &canvas{cells: make([]rune, n), colour: make([]colour, n)}
	for i := range c.cells {
		c.cells[i] = ' '
	}
	return c
}

func (c *canvas) set(x int, r rune, col colour) {
	if x >= 0 && x < len(c.cells) {
		c.cells[x], c.colour[x] = r, col
	}
}

// cell is the one that x lies in; what lies before the first or behind the last is in a cell beside them.
func (c *canvas) cell(x float64) int { return int(max(-1, min(x, float64(len(c.cells))))) }

// bar fills [from, to), in cells, with eighths of a cell at its end. It is never invisible, and hides nothing wider.
func (c *canvas) bar(from, to float64, col colour) {
	first, whole := c.cell(from), c.cell(to)
	if whole <= first && to-from < 1 {
		if x := min(first, len(c.cells)-1); x >= 0 && c.cells[x] == ' ' {
			c.set(x, thin(to-from), col)
		}
		return
	}
	for x := max(first, 0); x < min(whole, len(c.cells)); x++ {
		c.set(x, '█', col)
	}
	if rest := int((to - float64(whole)) * 8); rest > 0 && whole < len(c.cells) {
		c.set(whole, []rune(" ▏▎▍▌▋▊▉")[rest], col)
	}
}

// thin is a mark for a span narrower than a cell.
func thin(width float64) rune {
	return []rune("▏▏▎▍▌▋▊▉")[max(0, min(7, int(width*8)))]
}

// whisker draws how far an end at x may be off, where that can be seen.
func (c *canvas) whisker(x, bound float64, col colour) {
	if bound < 0.75 {
		return
	}
	lo, hi := c.cell(x-bound), c.cell(x+bound)
	for i := lo + 1; i < hi; i++ {
		if i >= 0 && i < len(c.cells) && c.cells[i] != '█' {
			c.set(i, '─', col)
		}
	}
	c.set(lo, '├', col)
	c.set(hi, '┤', col)
}

// style writes text, in colours where they are wanted.
type style struct{ on bool }

func (s style) paint(text string, c colour) string {
	if !s.on || c == plain || text == "" {
		return text
	}
	return "\x1b[38;5;" + itoa(int(c)) + "m" + text + "\x1b[0m"
}

func (s style) bold(text string) string {
	if !s.on {
		return text
	}
	return "\x1b[1m" + text + "\x1b[0m"
}

// line renders a canvas: runs of one colour share an escape.
func (s style) line(c *canvas) string {
	var b strings.Builder
	for i := 0; i < len(c.cells); {
		j := i
		for j < len(c.cells) && c.colour[j] == c.colour[i] {
			j++
		}
		b.WriteString(s.paint(string(c.cells[i:j]), c.colour[i]))
		i = j
	}
	return b.String()
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + string(rune('0'+n%10))
}
