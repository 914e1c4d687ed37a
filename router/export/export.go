// Package export turns timelines into what other tools read: Chrome trace events, Perfetto, OpenTelemetry, TensorRT-LLM's
// records, CSV, Parquet. It adds nothing to a line and writes in one pass.
package export

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"meridian.internal/router/timeline"
)

// ErrFormat is returned for a format that is not known.
var ErrFormat = errors.New("export: unknown format")

// Formats that New knows.
func Formats() []string { return []string{"chrome", "csv", "otlp", "parquet", "perfetto", "trtllm"} }

// Exporter takes lines one after the other.
type Exporter interface {
	Line(l *timeline.Line) error
	Close() error // writes what is left; the writer below stays open
}

// New makes an exporter of a format that writes to w.
func New(format string, w io.Writer) (Exporter, error) {
	b := bufio.NewWriterSize(w, 256<<10)
	switch format {
	case "chrome":
		return newChrome(b), nil
	case "csv":
		return newCSV(b), nil
	case "otlp":
		return &otlp{w: b}, nil
	case "parquet":
		return newParquet(w), nil
	case "perfetto":
		return newPerfetto(b), nil
	case "trtllm":
		return &trtllm{w: b}, nil
	}
	return nil, fmt.Errorf("%w %q: want one of %v", ErrFormat, format, Formats())
}

// slice is one bar on a track of a trace viewer, in ns.
type slice struct {
	process, track, name string
	start, dur           int64
	bound                int64
	flow                 bool // an arrow leads here from the slice before
	args                 []arg
}

type arg struct {
	key  string
	text string
	num  int64
}

// network is the process that shows what is on its way between two nodes.
const network = "network"

// layout places a line: per node a track for the request, and the engine's iterations on a track of their own.
type layout struct {
	// seen are the iterations that are drawn: requests of one batch share them. It is emptied when it is large, which
	// draws a few iterations twice.
	seen map[iteration]struct{}
}

type iteration struct {
	node string
	iter int64
}

const maxSeen = 1 << 20

// base is the line's start on the axis of the trace: UTC where it is known, else the reference clock.
func base(l *timeline.Line) int64 {
	if l.WallNS != 0 {
		return l.WallNS
	}
	return l.StartNS
}

func (y *layout) slices(l *timeline.Line) (out []slice) {
	at := base(l)
	last := ""
	for i := range l.Spans {
		s := &l.Spans[i]
		process := s.Node
		if isHop(s.Node) {
			process = network
		}
		sl := slice{process: process, track: l.RequestID, name: s.Name, start: at + s.StartNS, dur: s.DurNS, bound: s.BoundNS, flow: process != last && i > 0}
		if s.DurNS < 0 { // viewers refuse negative durations: the slice is empty and says so
			sl.dur = 0
			sl.args = append(sl.args, arg{key: "negative_dur_ns", num: s.DurNS})
		}
		if process == network {
			sl.args = append(sl.args, arg{key: "hop", text: s.Node})
		}
		last = process
		out = append(out, sl)
	}
	for i := range l.Phases {
		out = y.iterations(out, &l.Phases[i], at)
	}
	return out
}

func (y *layout) iterations(out []slice, p *timeline.Phase, at int64) []slice {
	if p.Clock.OffsetNS == nil {
		return out
	}
	for _, c := range []struct {
		name string
		cols *timeline.Columns
	}{{"prefill step", p.Chunks}, {"decode step", p.Steps}} {
		iters, from, to, batch := c.cols.Column("iter"), c.cols.Column("forward_start_ns"), c.cols.Column("sample_end_ns"), c.cols.Column("batch_size")
		n := min(len(iters), len(from), len(to))
		for i := range n {
			k := iteration{p.Node, iters[i]}
			if _, ok := y.seen[k]; ok {
				continue
			}
			if y.seen == nil || len(y.seen) > maxSeen {
				y.seen = map[iteration]struct{}{}
			}
			y.seen[k] = struct{}{}
			s := slice{process: p.Node, track: "engine", name: c.name, start: at + from[i], dur: max(0, to[i]-from[i]), args: []arg{{key: "iter", num: iters[i]}}}
			if i < len(batch) {
				s.args = append(s.args, arg{key: "batch_size", num: batch[i]})
			}
			out = append(out, s)
		}
	}
	return out
}

func isHop(node string) bool { return strings.Contains(node, ">") }
