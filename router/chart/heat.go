package chart

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/palette/moreland"
	"gonum.org/v1/plot/plotter"
)

// grid is the mean time of each group in each slice of time.
type grid struct {
	cells [][]float64 // (column, group), ms; NaN: no request
	step  float64     // seconds a column
}

// Dims gives columns and rows.
func (g grid) Dims() (c, r int) { return len(g.cells), len(groups) }

// Z is the value of a cell, logarithmic: a queue of a second must not hide an admission of a millisecond.
func (g grid) Z(c, r int) float64 { return g.cells[c][r] }

// X is the middle of a column in seconds.
func (g grid) X(c int) float64 { return (float64(c) + 0.5) * g.step }

// Y is a row.
func (g grid) Y(r int) float64 { return float64(r) }

// shades are the colours of a palette.
type shades []color.Color

// Colors returns them.
func (s shades) Colors() []color.Color { return s }

const heatColumns = 60

// heat shows over time where requests spent it: a column is a slice of time, a row a part of the way to the first token.
func (d *Data) heat() (*plot.Plot, error) {
	g := d.grid()
	m := moreland.Kindlmann()
	m.SetMin(0)
	m.SetMax(1)
	h := plotter.NewHeatMap(g, shades(m.Palette(80).Colors()[:64])) // the lightest are like the paper, which says that there is nothing
	p := newPlot(fmt.Sprintf("Where the time went: means from %.2g ms (dark) to %.2g ms (light); white: no request", math.Pow(10, h.Min), math.Pow(10, h.Max)), d)
	p.X.Label.Text, p.Y.Label.Text = "s since the first request", " " // which keeps the names of rows off the edge
	labels := make(plot.ConstantTicks, len(groups))
	for i := range groups {
		labels[i] = plot.Tick{Value: float64(i), Label: groups[i].name}
	}
	p.Y.Tick.Marker = labels
	if !(h.Max > h.Min) { // one value everywhere: any range will do
		h.Min, h.Max = h.Min-1, h.Min+1
	}
	p.Add(h)
	return p, nil
}

func (d *Data) grid() grid {
	first, last := d.sample[0].start, d.sample[0].start
	for _, s := range d.sample {
		first, last = min(first, s.start), max(last, s.start)
	}
	n := min(heatColumns, len(d.sample))
	n = max(n, 2)
	width := (float64(last)-float64(first))/float64(n) + 1 // the difference of whole numbers could overflow
	g := grid{cells: make([][]float64, n), step: width / 1e9}
	count := make([]int, n)
	for i := range g.cells {
		g.cells[i] = make([]float64, len(groups))
	}
	for _, s := range d.sample {
		c := min(n-1, int((float64(s.start)-float64(first))/width))
		count[c]++
		for i, v := range s.parts {
			g.cells[c][i] += float64(v) / 1e6
		}
	}
	for c := range g.cells {
		for i := range g.cells[c] {
			g.cells[c][i] = math.Log10(max(1e-3, g.cells[c][i]/float64(max(1, count[c]))))
			if count[c] == 0 {
				g.cells[c][i] = math.NaN()
			}
		}
	}
	return g
}
