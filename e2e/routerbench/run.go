package routerbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"meridian.internal/shared/clock"
)

// Plan says how much is measured.
type Plan struct {
	Bench
	Rounds  int
	Turn    time.Duration // of one load against one subject
	Streams int           // held open for the memory row
	Leaves  int           // clients that leave, for each leg
	Only    string        // one load by name, or OnlyHeld; empty: all
	Against []string      // the only subjects beside ours; empty: all
	Log     io.Writer     // progress
}

func (p *Plan) measures(name string) bool {
	return len(p.Against) == 0 || name == "ours" || slices.Contains(p.Against, name)
}

// Check says which field cannot be used.
func (p *Plan) Check() error {
	only := []string{OnlyHeld}
	for _, l := range loads() {
		only = append(only, l.name)
	}
	var against []string
	for _, m := range p.makers() {
		against = append(against, m.name)
	}
	switch {
	case p.Rounds < 1 || p.Turn <= 0:
		return fmt.Errorf("--rounds %d --turn %v: want at least 1, and a time", p.Rounds, p.Turn)
	case p.Streams < 1 || p.Leaves < 1:
		return fmt.Errorf("--streams %d --leaves %d: want at least 1 of each", p.Streams, p.Leaves)
	case p.Only != "" && !slices.Contains(only, p.Only):
		return fmt.Errorf("--only %s: want one of %s", p.Only, strings.Join(only, ", "))
	}
	for _, name := range p.Against {
		if !slices.Contains(against, name) {
			return fmt.Errorf("--against %s: want some of %s", name, strings.Join(against, ", "))
		}
	}
	return nil
}

// OnlyHeld are the rows of open streams and of clients that leave.
const OnlyHeld = "held"

// Result is what was measured.
type Result struct {
	Subjects []string          // in the order of the table
	Skipped  map[string]string // why a subject was not measured
	Lines    []Line
	Bench    []string // lines that benchstat reads, one for each turn
	Failures []string // answers that were wrong or did not come
}

// Line is a measured row.
type Line struct {
	row
	Cells map[string]Cell // by subject
}

// Ours is the value that the goal is about.
func (l Line) Ours() float64 { return l.Cells["ours"].Compared }

// Met tells whether ours reaches the goal.
func (l Line) Met() bool { return l.row.met(l.Ours()) }

// run is a bench in progress.
type run struct {
	Plan
	steady   *clock.Steady
	workers  Listening
	subjects []*subject
	samples  map[string]map[string][]*sample // load, subject, round
	result   *Result
}

// Run measures. The error says what could not be started; wrong answers are in the result.
func Run(ctx context.Context, p Plan) (_ *Result, err error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{Plan: p, samples: map[string]map[string][]*sample{}, result: &Result{Skipped: map[string]string{}}}
	if r.steady, err = clock.New(clock.Options{}); err != nil {
		return nil, err
	}
	workers, err := start(ctx, &r.workers, p.Self, "workers")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop(), stop(workers)) }()
	for _, m := range r.makers() {
		if !p.measures(m.name) {
			continue
		}
		s, err := m.start(ctx, r.workers)
		if err != nil {
			return nil, err
		}
		if s.skip != "" {
			r.result.Skipped[s.name] = s.skip
			continue
		}
		r.subjects = append(r.subjects, s)
		r.result.Subjects = append(r.result.Subjects, s.name)
	}
	if err := r.rounds(ctx); err != nil {
		return nil, err
	}
	for _, row := range rows() {
		if row.load != "" && (p.Only == "" || p.Only == row.load) {
			r.result.Lines = append(r.result.Lines, Line{row, row.cells(r.samples)})
		}
	}
	if p.Only == "" || p.Only == OnlyHeld {
		return r.result, r.extra(ctx)
	}
	return r.result, nil
}

func (r *run) stop() error {
	var errs []error
	for _, s := range r.subjects {
		errs = append(errs, stop(s.cmd))
	}
	r.subjects = nil
	return errors.Join(errs...)
}

// rounds lets the subjects take turns.
func (r *run) rounds(ctx context.Context) error {
	scraped := r.scrape(ctx)
	defer scraped()
	for round := range r.Rounds {
		for _, l := range loads() {
			if r.Only != "" && r.Only != l.name {
				continue
			}
			if err := r.workers.setPace(ctx, l.pace); err != nil {
				return err
			}
			for _, s := range r.subjects {
				fmt.Fprintf(r.Log, "round %d of %d: %s, %s\n", round+1, r.Rounds, l.name, s.name)
				if err := r.turn(ctx, l, s); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (r *run) turn(ctx context.Context, l load, s *subject) error {
	var got *sample
	for d := r.Turn; ; d *= 2 { // a machine that had no time for us is asked again, for longer
		var err error
		if got, err = l.turn(ctx, r.steady, s, d); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if got.failed > 0 || got.tokens > 0 || d >= 16*r.Turn {
			break
		}
	}
	if got.failed > 0 || got.tokens == 0 {
		r.result.Failures = append(r.result.Failures, fmt.Sprintf("%s, %s: %d tokens, %d requests failed: %v", l.name, s.name, got.tokens, got.failed, got.err))
	}
	if r.samples[l.name] == nil {
		r.samples[l.name] = map[string][]*sample{}
	}
	r.samples[l.name][s.name] = append(r.samples[l.name][s.name], got)
	r.result.Bench = append(r.result.Bench, benchLine(l.name, s.name, got))
	return nil
}

// scrapeEvery is a common scrape interval of Prometheus.
const scrapeEvery = time.Second

// scrape reads the router's metrics as Prometheus would, until stop is called.
func (r *run) scrape(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(scrapeEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for _, s := range r.subjects {
				if s.name == "ours" {
					scrapeOnce(ctx, s.addr)
				}
			}
		}
	}()
	return func() { cancel(); <-done }
}

func scrapeOnce(ctx context.Context, addr string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return
	}
	if res, err := http.DefaultClient.Do(req); err == nil {
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
}

// extra measures memory and leaving, each subject as a process of its own that has done nothing before.
func (r *run) extra(ctx context.Context) error {
	if err := r.stop(); err != nil {
		return err
	}
	memory, leaving := Line{row: extraRow(memoryTitle), Cells: map[string]Cell{}}, Line{row: extraRow(leavingTitle), Cells: map[string]Cell{}}
	for _, m := range r.makers()[1:] { // direct has no process
		if !r.measures(m.name) {
			continue
		}
		s, err := m.start(ctx, r.workers)
		if err != nil {
			return err
		}
		if s.skip != "" {
			continue
		}
		fmt.Fprintf(r.Log, "open streams and clients that leave: %s\n", s.name)
		memory.Cells[s.name], leaving.Cells[s.name] = r.one(ctx, s)
		if err := stop(s.cmd); err != nil {
			return err
		}
	}
	r.result.Lines = append(r.result.Lines, memory, leaving)
	return nil
}

func extraRow(title string) row {
	for _, r := range rows() {
		if r.title == title {
			return r
		}
	}
	return row{title: title}
}

func (r *run) one(ctx context.Context, s *subject) (memory, leaving Cell) {
	memory, leaving = missing, missing
	fail := func(err error) { r.result.Failures = append(r.result.Failures, fmt.Sprintf("%s: %v", s.name, err)) }
	bytes, err := s.streamBytes(ctx, r.workers, r.Streams, min(settleTime, 10*r.Turn))
	if err != nil {
		fail(err)
	} else {
		memory = Cell{bytes / 1024, bytes / 1024}
		r.result.Bench = append(r.result.Bench, fmt.Sprintf("BenchmarkRouter/load=open-stream/router=%s 1 %.1f KiB/stream", s.name, bytes/1024))
	}
	if s.name != "naive" && s.name != "ours" {
		return memory, leaving // one hop: it has no context leg
	}
	time.Sleep(min(settleTime, 10*r.Turn)) // the workers see that the open streams are closed
	ms, err := s.leaving(ctx, r.workers, r.steady.Now, r.Leaves)
	if err != nil {
		fail(err)
		return memory, leaving
	}
	slowest := ms[len(ms)-1]
	r.result.Bench = append(r.result.Bench, fmt.Sprintf("BenchmarkRouter/load=leaving/router=%s %d %.3f p50-ms %.3f slowest-ms", s.name, len(ms), ms[len(ms)/2], slowest))
	return memory, Cell{slowest, slowest}
}
