// Package chart owns the picture of a clock over time: offset residual with its bound, bound, and round trip. It reads no
// log and no clock.
package chart

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"meridian.internal/shared/clock"
)

// ErrEmpty is returned when there is nothing to draw.
var ErrEmpty = errors.New("chart: no estimates to draw")

const (
	width  = 9 * vg.Inch
	height = 8 * vg.Inch
	dpi    = 110
)

// Series is what is drawn: times in seconds before the newest estimate, values in µs.
type Series struct {
	Title    string
	T        []float64 // <= 0
	Residual []float64 // offset minus a straight line
	Lower    []float64 // bounds, minus the same line
	Upper    []float64
	Bound    []float64
	RTT      []float64
	State    []clock.State
	Steps    []int   // indices before which the clock was stepped
	SkewPPM  float64 // slope of that line, which is the best one since the newest step
}

// maxSkew is what separates a step from a fast clock, in s/s.
const maxSkew = 500e-6

// stepped says that no clock goes from a to b without a step.
func stepped(a, b clock.Published) bool {
	d := math.Abs(float64(b.OffsetNS - a.OffsetNS))
	return d > float64(a.BoundNS()+b.BoundNS())+maxSkew*math.Abs(float64(b.AtNS-a.AtNS))
}

// Of prepares the estimates of one pair of clocks, oldest first. Where the clock changed its epoch only the newest is
// drawn: two clocks have no common offset.
func Of(es []clock.Published) (Series, error) {
	if len(es) == 0 {
		return Series{}, ErrEmpty
	}
	last := es[len(es)-1]
	var use []clock.Published
	for _, e := range es {
		if e.Local.Epoch() == last.Local.Epoch() && e.Reference.Epoch() == last.Reference.Epoch() && e.LowerNS < e.UpperNS {
			use = append(use, e)
		}
	}
	if len(use) == 0 {
		return Series{}, ErrEmpty
	}
	s := Series{Title: fmt.Sprintf("%s against %s, %s", last.Node, reference(last), last.State)}
	x := func(e clock.Published) float64 { return float64(e.AtNS-last.AtNS) * 1e-9 }
	y := func(ns int64) float64 { return float64(ns-last.OffsetNS) * 1e-3 }
	for i := 1; i < len(use); i++ {
		if stepped(use[i-1], use[i]) {
			s.Steps = append(s.Steps, i)
		}
	}
	since := 0
	if n := len(s.Steps); n > 0 {
		since = s.Steps[n-1]
	}
	a, b := straight(use[since:], x, func(e clock.Published) float64 { return y(e.OffsetNS) })
	s.SkewPPM = b
	for _, e := range use {
		t := x(e)
		l := a + b*t
		s.T = append(s.T, t)
		s.Residual = append(s.Residual, y(e.OffsetNS)-l)
		s.Lower = append(s.Lower, y(e.LowerNS)-l)
		s.Upper = append(s.Upper, y(e.UpperNS)-l)
		s.Bound = append(s.Bound, float64(e.BoundNS())*1e-3)
		s.RTT = append(s.RTT, float64(e.RTTNS)*1e-3)
		s.State = append(s.State, e.State)
	}
	return s, nil
}

func reference(e clock.Published) string {
	if e.Router == "" {
		return e.By
	}
	return e.Router + " via " + e.Via
}

// straight is the least-squares line.
func straight(es []clock.Published, x, y func(clock.Published) float64) (a, b float64) {
	n := float64(len(es))
	var sx, sy, sxx, sxy float64
	for _, e := range es {
		sx, sy, sxx, sxy = sx+x(e), sy+y(e), sxx+x(e)*x(e), sxy+x(e)*y(e)
	}
	det := n*sxx - sx*sx
	if det < 1e-9 {
		return sy / n, 0
	}
	b = (n*sxy - sx*sy) / det
	return (sy - b*sx) / n, b
}

// Write draws s as svg or png.
func (s Series) Write(w io.Writer, format string) error {
	plots, err := s.plots()
	if err != nil {
		return err
	}
	switch format {
	case "svg":
		c := vgsvg.New(width, height)
		tile(draw.New(c), plots)
		_, err = c.WriteTo(w)
	case "png":
		c := vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(dpi))
		tile(draw.New(c), plots)
		_, err = vgimg.PngCanvas{Canvas: c}.WriteTo(w)
	default:
		return fmt.Errorf("chart format %q: want svg or png", format)
	}
	if err != nil {
		return fmt.Errorf("write chart: %w", err)
	}
	return nil
}

func tile(c draw.Canvas, plots []*plot.Plot) {
	grid := [][]*plot.Plot{}
	for _, p := range plots {
		grid = append(grid, []*plot.Plot{p})
	}
	t := draw.Tiles{Rows: len(plots), Cols: 1, PadTop: vg.Millimeter, PadBottom: vg.Millimeter, PadRight: 4 * vg.Millimeter, PadY: 3 * vg.Millimeter}
	for i, row := range plot.Align(grid, t, c) {
		plots[i].Draw(row[0])
	}
}

var (
	ink   = color.RGBA{0x1f, 0x4e, 0x79, 0xff}
	shade = color.RGBA{0xc9, 0xdc, 0xee, 0xff}
	alarm = color.RGBA{0xc0, 0x39, 0x2b, 0xff}
	amber = color.RGBA{0xd6, 0x89, 0x10, 0xff}
)

// marks are the states that are shown on the curves, and how.
var marks = []struct {
	name   string
	color  color.Color
	states []clock.State
}{
	{"orange: holdover or joining", amber, []clock.State{clock.Holdover, clock.Joining}},
	{"red: suspect, quarantined or void", alarm, []clock.State{clock.Suspect, clock.Quarantined, clock.Void}},
}

func (s Series) plots() ([]*plot.Plot, error) {
	var out []*plot.Plot
	for i, c := range []struct {
		title, y string
		values   []float64
	}{
		{fmt.Sprintf("%s: offset minus a line of %+.3f ppm, with its bound", s.Title, s.SkewPPM), "µs", s.Residual},
		{"stated bound" + s.legend(), "µs", s.Bound},
		{"least round trip of the burst", "µs", s.RTT},
	} {
		p := plot.New()
		p.Title.Text, p.Y.Label.Text = c.title, c.y
		if i == 2 {
			p.X.Label.Text = "s before the newest estimate"
		}
		if i > 0 {
			p.Y.Min = 0
		}
		p.Add(plotter.NewGrid())
		if err := s.curve(p, c.values, i == 0); err != nil {
			return nil, fmt.Errorf("draw %s: %w", c.title, err)
		}
		if p.Y.Max <= p.Y.Min || math.IsInf(p.Y.Max, 0) {
			p.Y.Max = p.Y.Min + 1
		}
		room := (p.Y.Max - p.Y.Min) / 20 // a flat line would lie on the frame
		p.Y.Max += room
		if i == 0 {
			p.Y.Min -= room
		}
		if p.X.Max <= p.X.Min {
			p.X.Min, p.X.Max = -1, 0
		}
		if err := s.marked(p, c.values); err != nil {
			return nil, fmt.Errorf("draw %s: %w", c.title, err)
		}
		out = append(out, p)
	}
	return out, nil
}

// legend says what the marks mean, those that there are. It is a part of a title, where it hides nothing.
func (s Series) legend() string {
	text := ""
	if len(s.Steps) > 0 {
		text += "; dashed: a step"
	}
	for _, m := range marks {
		if slices.ContainsFunc(s.State, func(st clock.State) bool { return slices.Contains(m.states, st) }) {
			text += "; " + m.name
		}
	}
	return text
}

// curve draws values, interrupted where the clock was stepped, over the band of the bounds.
func (s Series) curve(p *plot.Plot, values []float64, band bool) error {
	from := 0
	for _, to := range append(s.Steps[:len(s.Steps):len(s.Steps)], len(s.T)) {
		if band {
			b, err := plotter.NewPolygon(s.band(from, to))
			if err != nil {
				return err
			}
			b.Color = shade
			b.LineStyle.Width = 0
			p.Add(b)
		}
		line, err := plotter.NewLine(points(s.T[from:to], values[from:to]))
		if err != nil {
			return err
		}
		line.Color = ink
		p.Add(line)
		from = to
	}
	return nil
}

// marked draws a dashed line at each step, and a dot at each estimate of a state that is not as it should be.
func (s Series) marked(p *plot.Plot, values []float64) error {
	for _, at := range s.Steps {
		x := (s.T[at-1] + s.T[at]) / 2
		line, err := plotter.NewLine(plotter.XYs{{X: x, Y: p.Y.Min}, {X: x, Y: p.Y.Max}})
		if err != nil {
			return err
		}
		line.Color, line.Dashes = alarm, []vg.Length{vg.Points(4), vg.Points(3)}
		p.Add(line)
	}
	for _, m := range marks {
		var xy plotter.XYs
		for i, st := range s.State {
			if slices.Contains(m.states, st) {
				xy = append(xy, plotter.XY{X: s.T[i], Y: values[i]})
			}
		}
		if len(xy) == 0 {
			continue
		}
		dots, err := plotter.NewScatter(xy)
		if err != nil {
			return err
		}
		dots.Color, dots.Radius, dots.Shape = m.color, vg.Points(1.8), draw.CircleGlyph{}
		p.Add(dots)
	}
	return nil
}

// band runs along the lower bounds and back along the upper ones.
func (s Series) band(from, to int) plotter.XYs {
	xy := points(s.T[from:to], s.Lower[from:to])
	for i := to - 1; i >= from; i-- {
		xy = append(xy, plotter.XY{X: s.T[i], Y: s.Upper[i]})
	}
	return xy
}

func points(x, y []float64) plotter.XYs {
	xy := make(plotter.XYs, len(x))
	for i := range x {
		xy[i] = plotter.XY{X: x[i], Y: y[i]}
	}
	return xy
}
