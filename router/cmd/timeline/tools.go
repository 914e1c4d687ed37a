package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"meridian.internal/router/export"
	"meridian.internal/router/summary"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
	"meridian.internal/router/waterfall"
	"meridian.internal/shared/rows"
)

type exportCmd struct {
	Format  string   `help:"chrome, csv, otlp, parquet, perfetto or trtllm. chrome and perfetto open in ui.perfetto.dev, with what rows beside the timelines count." enum:"chrome,csv,otlp,parquet,perfetto,trtllm" default:"chrome"`
	Profile []string `help:"Trace of a profile window of a node; may be given several times. chrome and perfetto draw its iterations in the cluster's time, beside the requests." type:"existingfile" sep:"none" placeholder:"FILE"`
	Output  string   `short:"o" help:"File to write. -: standard output." default:"-" placeholder:"FILE"`
	files
}

// Run exports.
func (c *exportCmd) Run(ctx context.Context) (err error) {
	s, rowNames, err := c.openAll(os.Stderr)
	if err != nil {
		return err
	}
	w := io.Writer(os.Stdout)
	if c.Output != "-" {
		if err := spare(c.Output, slices.Concat(s.Files, s.Amends, rowNames, c.Profile)); err != nil {
			return err
		}
		f, err := os.Create(c.Output)
		if err != nil {
			return fmt.Errorf("--output: %w", err)
		}
		defer func() {
			if e := f.Close(); err == nil {
				err = e
			}
		}()
		w = f
	} else if (c.Format == "perfetto" || c.Format == "parquet") && terminal(os.Stdout).tty {
		return fmt.Errorf("--format %s is binary: give --output FILE", c.Format)
	}
	x, err := export.New(c.Format, w)
	if err != nil {
		return err
	}
	lines, bad := 0, countBad(s)
	done := progress(s, os.Stderr)
	err = s.Each(ctx, true, func(l *timeline.Line, _ traces.Position) error {
		lines++
		return x.Line(l)
	})
	done()
	if err == nil && *bad > 0 && lines == 0 {
		err = noTimeline(s, *bad)
	}
	if err == nil {
		err = addRows(x, rowNames, s.Bad)
	}
	if err == nil {
		err = addWindows(x, c.Profile)
	}
	if err != nil {
		return unreadable(err)
	}
	return x.Close()
}

// spare refuses to write over one of the files that are read.
func spare(output string, read []string) error {
	out, err := os.Stat(output)
	if err != nil {
		return nil // there is nothing to write over
	}
	for _, name := range read {
		if in, err := os.Stat(name); err == nil && os.SameFile(in, out) {
			return fmt.Errorf("--output %s: it is one of the files to export", output)
		}
	}
	return nil
}

// addRows adds the rows of iterations that lie beside the timelines, where the format shows them.
func addRows(x export.Exporter, names []string, bad func(traces.Position, error)) error {
	to, ok := x.(export.Joiner)
	if !ok {
		return nil
	}
	codec := rows.NewCodec()
	return eachRow(names, bad, func(b []byte, at traces.Position) error {
		static, row, err := codec.Parse(b)
		if errors.Is(err, rows.ErrSchema) { // counters of a node, or of a later version
			return nil
		}
		if err != nil {
			bad(at, err)
			return nil
		}
		return to.Row(&static, &row)
	})
}

// addWindows adds profile windows of nodes.
func addWindows(x export.Exporter, names []string) error {
	to, ok := x.(export.Joiner)
	if !ok && len(names) > 0 {
		return errors.New("--profile: only chrome and perfetto show profile windows")
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("--profile: %w", err)
		}
		w, err := export.ReadWindow(bufio.NewReaderSize(f, 256<<10))
		_ = f.Close() // it was only read
		if err == nil {
			err = to.Window(w)
		}
		if err != nil {
			return fmt.Errorf("--profile %s: %w", name, err)
		}
	}
	return nil
}

type diffCmd struct {
	A     string `arg:"" help:"File or folder to compare from."`
	B     string `arg:"" help:"File or folder to compare to."`
	Color string `help:"Colours: auto, always, never." enum:"auto,always,never" default:"auto"`
	JSON  bool   `help:"Print JSON." name:"json"`
}

// Run compares.
func (c *diffCmd) Run(ctx context.Context) error {
	var sums [2]*summary.Summary
	for i, name := range []string{c.A, c.B} {
		var err error
		if sums[i], err = sum(ctx, files{File: []string{name}}, 0); err != nil {
			return err
		}
	}
	list := summary.Diff(sums[0], sums[1])
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(list)
	}
	return summary.WriteDiff(os.Stdout, list, terminal(os.Stdout).colors(c.Color))
}

// sum reads files into a summary.
func sum(ctx context.Context, f files, top int) (*summary.Summary, error) {
	s, err := f.open(os.Stderr)
	if err != nil {
		return nil, err
	}
	parts := make([]*summary.Summary, runtime.GOMAXPROCS(0))
	workers := make([]func(*timeline.Line), len(parts))
	for i := range parts {
		parts[i] = summary.New(top)
		workers[i] = parts[i].Add
	}
	bad := countBad(s)
	done := progress(s, os.Stderr)
	err = s.Spread(ctx, workers)
	done()
	for _, p := range parts[1:] {
		parts[0].Merge(p)
	}
	if err == nil && *bad > 0 && parts[0].Result().Requests == 0 {
		err = noTimeline(s, *bad)
	}
	return parts[0], unreadable(err)
}

// countBad counts what s calls bad from now on.
func countBad(s *traces.Set) *int {
	bad, say := new(int), s.Bad
	s.Bad = func(at traces.Position, err error) {
		*bad++
		say(at, err)
	}
	return bad
}

// noTimeline is the error for files that hold nothing but bad lines.
func noTimeline(s *traces.Set, bad int) error {
	return fmt.Errorf("no timeline in %s: %d bad lines", strings.Join(s.Files, ", "), bad)
}

type adviseCmd struct {
	Color string `help:"Colours: auto, always, never." enum:"auto,always,never" default:"auto"`
	JSON  bool   `help:"Print JSON." name:"json"`
	files
}

// Run advises.
func (c *adviseCmd) Run(ctx context.Context) error {
	s, err := sum(ctx, c.files, 0)
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(s.Advise())
	}
	return summary.WriteAdvice(os.Stdout, s.Advise(), terminal(os.Stdout).colors(c.Color))
}

type followCmd struct {
	Dir string `arg:"" optional:"" help:"Folder of timelines." default:"traces"`
}

const followEvery = 250 * time.Millisecond

// Run prints requests as they end.
func (c *followCmd) Run(ctx context.Context) error {
	return unreadable(traces.Follow(ctx, c.Dir, followEvery, func(l *timeline.Line) error {
		_, err := fmt.Println(oneLine(l))
		return err
	}))
}

// oneLine is a request in one row: outcome, times, and the span that took most of the time to first token.
func oneLine(l *timeline.Line) string {
	opt := func(v *int64) string {
		if v == nil {
			return "–"
		}
		return waterfall.Duration(*v)
	}
	prompt := "–"
	if n, _ := l.Tokens.Known(); n != nil {
		prompt = strconv.FormatInt(*n, 10)
	}
	var most timeline.Span
	for _, s := range l.Spans {
		if s.Name != "decode" && s.Name != "finish" && s.DurNS > most.DurNS {
			most = s
		}
	}
	parts := []string{
		time.Unix(0, l.WallNS).UTC().Format("15:04:05.000"), fmt.Sprintf("%-9s", waterfall.Clean(string(l.Outcome), 9)), fmt.Sprintf("TTFT %8s", opt(l.TTFTNS)),
		fmt.Sprintf("E2E %8s", opt(l.E2ENS)), fmt.Sprintf("%5s → %-5d", prompt, l.Tokens.Output), fmt.Sprintf("%-28s", waterfall.Clean(l.RequestID, 28)),
		fmt.Sprintf("%s %s on %s", waterfall.Duration(most.DurNS), waterfall.Clean(most.Name, 20), waterfall.Clean(most.Node, 30)),
	}
	if !l.Complete {
		parts = append(parts, "incomplete")
	}
	return strings.Join(parts, "  ")
}
