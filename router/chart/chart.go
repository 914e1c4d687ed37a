// Package chart draws many timelines as pictures: bars of single requests and cumulative distributions. It gathers what it
// needs line by line and keeps a bounded sample.
package chart

import (
	"cmp"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// Errors of Draw.
var (
	// ErrKind is returned for a kind of chart that is not known.
	ErrKind = errors.New("chart: unknown kind")
	// ErrEmpty is returned when no finished request was added.
	ErrEmpty = errors.New("chart: no finished request to draw")
)

// Kinds of charts.
func Kinds() []string { return []string{"bars", "cdf", "heat"} }

// maxSample bounds what is kept. When it is full every second line is dropped, and from then on only every second is
// taken: the sample stays spread evenly over the file.
const maxSample = 4096

// Data gathers lines. The zero value is empty.
type Data struct {
	sample []sampled
	stride int
	seen   int
}

type sampled struct {
	start, ttft, e2e int64
	parts            [len(groups)]int64
}

// groups join spans that a reader wants to see as one, in the order of a request.
var groups = [...]struct {
	name  string
	color color.RGBA
	spans string
}{
	{"router", color.RGBA{0x5f, 0xaf, 0xff, 0xff}, " router_receive router_queue router_place retry ctx_retry resume gen_prepare ctx_prepare prepare relay "},
	{"network", color.RGBA{0x9a, 0x9a, 0x9a, 0xff}, " gen_dispatch gen_headers_return ctx_dispatch ctx_return dispatch return_network leg gen_leg ctx_leg remote "},
	{"admission", color.RGBA{0x87, 0xd7, 0x87, 0xff}, " gen_parse gen_admit kv_open ctx_parse ctx_admit parse admit "},
	{"queue", color.RGBA{0xd7, 0x5f, 0x5f, 0xff}, " ctx_queue queue device_queue "},
	{"prefill", color.RGBA{0xff, 0xaf, 0x00, 0xff}, " prefill prefill_wait prefill_sample prefill_sync "},
	{"hand-over", color.RGBA{0xd7, 0x87, 0xd7, 0xff}, " kv_handover kv_fetch gen_start "},
	{"emit", color.RGBA{0x3a, 0x8a, 0x5a, 0xff}, " ctx_emit gen_emit emit "},
}

// Add counts a line; only finished requests are drawn.
func (d *Data) Add(l *timeline.Line) {
	if l.Outcome != phase.Finished || l.TTFTNS == nil || l.E2ENS == nil {
		return
	}
	d.seen++
	if d.stride == 0 {
		d.stride = 1
	}
	if d.seen%d.stride != 0 {
		return
	}
	s := sampled{start: l.StartNS, ttft: *l.TTFTNS, e2e: *l.E2ENS}
	for _, sp := range l.Spans {
		for i := range groups {
			if strings.Contains(groups[i].spans, " "+sp.Name+" ") {
				s.parts[i] += sp.DurNS
			}
		}
	}
	d.sample = append(d.sample, s)
	if len(d.sample) < maxSample {
		return
	}
	for i := range len(d.sample) / 2 {
		d.sample[i] = d.sample[2*i+1]
	}
	d.sample = d.sample[:len(d.sample)/2]
	d.stride *= 2
}

// Draw writes a chart of a kind in a format: svg, png, pdf.
func (d *Data) Draw(w io.Writer, kind, format string) error {
	if len(d.sample) == 0 {
		return ErrEmpty
	}
	var p *plot.Plot
	var err error
	switch kind {
	case "bars":
		p, err = d.bars()
	case "cdf":
		p, err = d.cdf()
	case "heat":
		p, err = d.heat()
	default:
		return fmt.Errorf("%w %q: want one of %v", ErrKind, kind, Kinds())
	}
	if err != nil {
		return fmt.Errorf("draw %s: %w", kind, err)
	}
	to, err := p.WriterTo(10*vg.Inch, 5*vg.Inch, format)
	if err != nil {
		return fmt.Errorf("draw %s as %s: %w", kind, format, err)
	}
	_, err = to.WriteTo(w)
	return err
}

func newPlot(title string, d *Data) *plot.Plot {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%s (%d requests)", title, d.seen)
	p.Title.Padding = vg.Points(8)
	p.Legend.Top = true
	p.Legend.Left = true
	p.Legend.Padding = vg.Points(3)
	p.Legend.ThumbnailWidth = vg.Points(12)
	return p
}

// maxBars is how many bars can be told apart.
const maxBars = 150

// bars stacks the parts of each request's time to first token, the fastest first.
func (d *Data) bars() (*plot.Plot, error) {
	p := newPlot("Time to first token", d)
	p.Y.Label.Text = "ms"
	p.X.Label.Text = "requests, the fastest first"
	p.X.Tick.Marker = plot.ConstantTicks(nil)
	list := slices.Clone(d.sample)
	slices.SortFunc(list, func(a, b sampled) int { return cmp.Compare(a.ttft, b.ttft) })
	n := min(maxBars, len(list))
	var below *plotter.BarChart
	for g := range groups {
		values := make(plotter.Values, n)
		some := false
		for i := range values {
			values[i] = float64(list[i*len(list)/n].parts[g]) / 1e6
			some = some || values[i] != 0
		}
		if !some {
			continue
		}
		bar, err := plotter.NewBarChart(values, 9.0*vg.Inch/vg.Length(n))
		if err != nil {
			return nil, err
		}
		bar.LineStyle.Width = 0
		bar.Color = groups[g].color
		if below != nil {
			bar.StackOn(below)
		}
		below = bar
		p.Add(bar)
		p.Legend.Add(groups[g].name, bar)
	}
	return p, nil
}

// cdf draws the cumulative distribution of TTFT, E2E and the groups that matter.
func (d *Data) cdf() (*plot.Plot, error) {
	p := newPlot("Cumulative distribution", d)
	p.X.Label.Text = "ms"
	p.Y.Label.Text = "share of requests"
	p.X.Scale = plot.LogScale{}
	p.X.Tick.Marker = plot.LogTicks{Prec: -1}
	p.Y.Min, p.Y.Max = 0, 1
	p.Add(plotter.NewGrid())
	type curve struct {
		name  string
		color color.Color
		width float64
		of    func(sampled) int64
	}
	curves := []curve{
		{"time to first token", color.Black, 2, func(s sampled) int64 { return s.ttft }},
		{"end to end", color.RGBA{0x5f, 0xd7, 0xd7, 0xff}, 2, func(s sampled) int64 { return s.e2e }},
	}
	for g := range groups {
		curves = append(curves, curve{groups[g].name, groups[g].color, 1, func(s sampled) int64 { return s.parts[g] }})
	}
	for _, c := range curves {
		values := make([]float64, 0, len(d.sample))
		for _, s := range d.sample {
			if v := c.of(s); v > 0 { // a logarithmic axis has no zero
				values = append(values, float64(v)/1e6)
			}
		}
		if len(values) == 0 {
			continue
		}
		slices.Sort(values)
		points := make(plotter.XYs, len(values))
		for i, v := range values {
			points[i] = plotter.XY{X: v, Y: float64(i+1) / float64(len(values))}
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return nil, err
		}
		line.LineStyle = draw.LineStyle{Color: c.color, Width: vg.Points(c.width)}
		p.Add(line)
		p.Legend.Add(c.name, line)
	}
	logRange(&p.X)
	return p, nil
}

// logRange makes sure that a logarithmic axis has a range above zero; requests that took no time at all, or all the same,
// give none.
func logRange(x *plot.Axis) {
	switch {
	case !(x.Min > 0) || math.IsInf(x.Min, 0):
		x.Min, x.Max = 0.001, 1000
	case x.Max <= x.Min:
		x.Min, x.Max = x.Min/2, x.Min*2
	}
}
