package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"meridian.internal/router/check"
	"meridian.internal/router/rowcheck"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
	"meridian.internal/router/waterfall"
)

// commands are the subcommands.
type commands struct {
	Show    showCmd    `cmd:"" help:"Draw one request as a waterfall in one clock."`
	Summary summaryCmd `cmd:"" help:"Percentiles per span, node and pair, and the slowest requests."`
	Check   checkCmd   `cmd:"" help:"Check that everything adds up. Exit code 0: all holds; 1: something is violated, a sentence each; 2: a file could not be read."`
	Diff    diffCmd    `cmd:"" help:"Compare two files or folders: which span moved, and whether that may be chance."`
	Advise  adviseCmd  `cmd:"" help:"What the recorded times say about the cluster, with the arithmetic."`
	Export  exportCmd  `cmd:"" help:"Write timelines for other tools."`
	Plot    plotCmd    `cmd:"" help:"Draw many requests into a picture."`
	Rows    rowsCmd    `cmd:"" help:"Fetch the iteration statistics and counters of nodes, for check to compare with the timelines."`
	Follow  followCmd  `cmd:"" help:"Print requests as they end."`
}

// files are the timelines to read.
type files struct {
	File []string `arg:"" optional:"" help:"Files or folders of timelines. None: traces." name:"file"`
}

func (f files) open(w io.Writer) (*traces.Set, error) {
	args := f.File
	if len(args) == 0 {
		args = []string{"traces"}
	}
	s, err := traces.Open(args)
	if err != nil {
		return nil, exit{2, err}
	}
	s.Bad = skipped(w)
	return s, nil
}

// skippedListed is how many skipped lines are named.
const skippedListed = 10

// skipped says on w which lines are bad, the first few, and that there are more.
func skipped(w io.Writer) func(traces.Position, error) {
	bad := 0
	return func(at traces.Position, err error) {
		switch bad++; {
		case bad <= skippedListed:
			fmt.Fprintf(w, "%s: %v; the line is skipped\n", at, err)
		case bad == skippedListed+1:
			fmt.Fprintf(w, "%s: bad too; further ones are skipped without a word\n", at)
		}
	}
}

// exit carries an exit code up to main.
type exit struct {
	code int
	err  error
}

func (e exit) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

// Unwrap gives the error itself.
func (e exit) Unwrap() error { return e.err }

// ExitCode is what the process ends with.
func (e exit) ExitCode() int { return e.code }

// unreadable gives an error of reading its exit code.
func unreadable(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return exit{2, err}
}

type showCmd struct {
	ID    string `arg:"" help:"Request id, the router's or the client's; or last, or slowest."`
	Width int    `help:"Columns. 0: those of the terminal." default:"0"`
	Color string `help:"Colours: auto, always, never." enum:"auto,always,never" default:"auto"`
	JSON  bool   `help:"Print the line itself." name:"json"`
	files
}

// Run draws one request.
func (c *showCmd) Run(ctx context.Context) error {
	s, err := c.open(os.Stderr)
	if err != nil {
		return err
	}
	l, err := c.find(ctx, s)
	if err != nil {
		return unreadable(err)
	}
	if l == nil {
		return exit{1, fmt.Errorf("no request %q in %s", waterfall.Clean(c.ID, 80), strings.Join(s.Files, ", "))}
	}
	if c.JSON {
		_, err := os.Stdout.Write(append(timeline.Append(nil, l), '\n'))
		return err
	}
	t := terminal(os.Stdout)
	if c.Width > 0 {
		t.width = c.Width
	}
	return waterfall.Render(os.Stdout, l, waterfall.Options{Width: t.width, Color: t.colors(c.Color)})
}

func (c *showCmd) find(ctx context.Context, s *traces.Set) (found *timeline.Line, err error) {
	if c.ID != "last" && c.ID != "slowest" {
		return s.Find(ctx, c.ID)
	}
	err = s.Each(ctx, true, func(l *timeline.Line, _ traces.Position) error {
		later := found == nil || startOf(l) >= startOf(found)
		if c.ID == "slowest" {
			later = l.TTFTNS != nil && (found == nil || found.TTFTNS == nil || *l.TTFTNS > *found.TTFTNS)
		}
		if later {
			found = l
		}
		return nil
	})
	return found, err
}

// startOf is when a request began: in UTC where that is known, since clocks of routers begin anew with each boot.
func startOf(l *timeline.Line) int64 {
	if l.WallNS != 0 {
		return l.WallNS
	}
	return l.StartNS
}

type summaryCmd struct {
	Top   int    `help:"Slowest requests to list." default:"5"`
	Color string `help:"Colours: auto, always, never." enum:"auto,always,never" default:"auto"`
	JSON  bool   `help:"Print one JSON object." name:"json"`
	files
}

// Run sums up.
func (c *summaryCmd) Run(ctx context.Context) error {
	s, err := sum(ctx, c.files, max(0, c.Top))
	if err != nil {
		return err
	}
	r := s.Result()
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(r)
	}
	t := terminal(os.Stdout)
	return r.Write(os.Stdout, t.colors(c.Color))
}

type checkCmd struct {
	Max int `help:"Violations to print." default:"50"`
	files
}

// openAll finds timelines and rows; files of rows alone are enough.
func (f files) openAll(w io.Writer) (*traces.Set, []string, error) {
	args := f.File
	if len(args) == 0 {
		args = []string{"traces"}
	}
	rows, others, err := rowFiles(args)
	if err != nil {
		return nil, nil, exit{2, err}
	}
	if len(others) == 0 {
		return &traces.Set{Bad: skipped(w)}, rows, nil
	}
	s, err := files{File: others}.open(w)
	return s, rows, err
}

// Run checks.
func (c *checkCmd) Run(ctx context.Context) (err error) {
	out := bufio.NewWriter(os.Stdout)
	defer func() { // what was violated and is not written is still violated
		if e := out.Flush(); err == nil {
			err = e
		}
	}()
	s, rowNames, err := c.openAll(io.Discard)
	if err != nil {
		return err
	}
	faults := 0
	say := func(at, text string) {
		if faults++; faults <= c.Max {
			fmt.Fprintf(out, "%s: %s\n", at, waterfall.Clean(text, 500))
		}
	}
	bad := func(at traces.Position, err error) { say(at.String(), err.Error()) }
	s.Bad = bad
	checker, ledgers := check.New(), rowcheck.New()
	done := progress(s, os.Stderr)
	err = s.Each(ctx, true, func(l *timeline.Line, at traces.Position) error {
		for _, f := range checker.Line(l, at.String()) {
			say(at.String(), f)
		}
		ledgers.Timeline(l)
		return nil
	})
	done()
	if err == nil { // after the timelines: what is written meanwhile must not look like a request that no row knows
		err = eachRow(rowNames, bad, func(b []byte, at traces.Position) error {
			ledgers.Line(b, at.String())
			return nil
		})
	}
	if err != nil {
		return unreadable(err)
	}
	for _, f := range ledgers.Finish() {
		say(f.At, f.Text)
	}
	if faults > c.Max {
		fmt.Fprintf(out, "and %d more\n", faults-c.Max)
	}
	for _, f := range checker.Finish() { // what explains many of the others is never left out
		faults++
		fmt.Fprintln(out, waterfall.Clean(f, 500))
	}
	if len(rowNames) > 0 {
		fmt.Fprintf(out, "%s rows of iterations\n", waterfall.Count(ledgers.Rows))
	}
	fmt.Fprintf(out, "%s requests, %s incomplete, %s violations\n", waterfall.Count(checker.Lines), waterfall.Count(checker.Incomplete), waterfall.Count(int64(faults)))
	if faults > 0 {
		return exit{code: 1}
	}
	return nil
}
