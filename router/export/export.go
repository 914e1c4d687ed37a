// Package export turns timelines into what other tools read: Chrome trace events, Perfetto, OpenTelemetry, TensorRT-LLM's
// records, CSV, Parquet. It adds nothing to a line and writes in one pass.
package export

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/rows"
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

// Joiner is an Exporter that shows, beside the requests, what rows of iterations count and what profile windows saw. They come
// after the lines, which tell where their clocks are.
type Joiner interface {
	Exporter
	Row(s *rows.Static, r *rows.Row) error
	Window(w *Window) error
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

// layout places a line: per node a track for the request, and the iterations of each rank on tracks of their own.
type layout struct {
	// seen are the iterations that are drawn: requests of one batch share them. It is emptied when it is large, which
	// draws a few iterations twice.
	seen map[iteration]struct{}
	// counters are those of the line that was placed last.
	counters []counter
	clocks   map[clock.ID]axis
	engines  map[engine]int // numbered as they come
}

// engine counts its iterations from 1: that of a rank of a process.
type engine struct {
	node  string
	clock clock.ID // of the process: the next one of the node has another
	rank  int      // -1: the node has one
}

type iteration struct {
	engine int
	iter   int64
}

// number is the engine's.
func (y *layout) number(e engine) int {
	n, ok := y.engines[e]
	if !ok {
		if y.engines == nil {
			y.engines = map[engine]int{}
		}
		n = len(y.engines)
		e.node, e.clock = strings.Clone(e.node), clock.ID(strings.Clone(string(e.clock))) // a key must not keep the text of its line
		y.engines[e] = n
	}
	return n
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
	y.counters = y.counters[:0]
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
		y.clock(l, &l.Phases[i])
		out = y.iterations(out, &l.Phases[i], at)
	}
	return out
}

func (y *layout) iterations(out []slice, p *timeline.Phase, at int64) []slice {
	if p.Clock.OffsetNS == nil {
		return out
	}
	rank := -1
	if p.DPRank != nil {
		rank = *p.DPRank
	}
	of := y.number(engine{p.Node, p.Clock.ID, rank})
	for _, c := range []struct {
		name string
		cols *timeline.Columns
	}{{"prefill step", p.Chunks}, {"decode step", p.Steps}} {
		iters, from, to, batch := c.cols.Column("iter"), c.cols.Column("forward_start_ns"), c.cols.Column("sample_end_ns"), c.cols.Column("batch_size")
		stages := c.cols.Stages()
		tracks := engineTracks(rank, len(stages))
		for i := range min(len(iters), len(from), len(to)) {
			k := iteration{of, iters[i]}
			if _, ok := y.seen[k]; ok {
				continue
			}
			if y.seen == nil || len(y.seen) > maxSeen {
				y.seen = map[iteration]struct{}{}
			}
			y.seen[k] = struct{}{}
			args := []arg{{key: "iter", num: iters[i]}}
			if i < len(batch) {
				args = append(args, arg{key: "batch_size", num: batch[i]})
				y.counters = append(y.counters, counter{p.Node, "batch" + ranked(rank), at + from[i], batch[i]})
			}
			for k, st := range stages {
				end := to[i]
				if k+1 < len(stages) {
					end = st.EndNS[i]
				}
				out = append(out, slice{process: p.Node, track: tracks[k], name: c.name, start: at + st.StartNS[i], dur: max(0, end-st.StartNS[i]), args: args})
			}
		}
	}
	return out
}

// engineTracks names the tracks of an engine's iterations: one for each stage of a pipeline, whose gaps are its bubbles.
func engineTracks(rank, stages int) []string {
	name := "engine" + ranked(rank)
	if stages < 2 {
		return []string{name}
	}
	tracks := make([]string, stages)
	for i := range tracks {
		tracks[i] = name + " stage " + strconv.Itoa(i)
	}
	return tracks
}

// ranked names a rank; "": the node has one.
func ranked(rank int) string {
	if rank < 0 {
		return ""
	}
	return " rank " + strconv.Itoa(rank)
}

func isHop(node string) bool { return strings.Contains(node, ">") }
