// Command clocktruth puts the clock estimator through simulated clocks and networks whose truth is known, prints what it
// reached beside the goals, and exits with 1 when a goal or the truth was missed.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"text/tabwriter"
	"time"

	"meridian.internal/clocksync/clocksim"
	"meridian.internal/shared/serve"
)

// truth is the command line.
type truth struct {
	Seeds int    `help:"Runs of each scenario, each with other noise." default:"100"`
	Only  string `help:"Run this scenario alone." placeholder:"NAME"`
}

func main() {
	os.Exit(serve.Run("clocktruth", &truth{}, serve.About("Holds the clock estimator against simulated truth; exit 1 when it misses.")))
}

// failed is the error of a run in which something was missed; all was printed already.
type failed struct{ n int }

func (f failed) Error() string { return fmt.Sprintf("%d goals missed", f.n) }

// Run runs all scenarios, on all cores.
func (c *truth) Run(ctx context.Context, _ *slog.Logger) error {
	if c.Seeds < 1 {
		return fmt.Errorf("--seeds %d: want at least 1", c.Seeds)
	}
	var rows []clocksim.Row
	for _, r := range clocksim.Rows() {
		if c.Only == "" || c.Only == r.Name {
			rows = append(rows, r)
		}
	}
	if len(rows) == 0 {
		return fmt.Errorf("--only %q: no such scenario", c.Only)
	}
	started := time.Now()
	sums := make([]clocksim.Summary, len(rows))
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for i, r := range rows {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if ctx.Err() == nil {
				sums[i] = r.Summarise(c.Seeds)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return show(sums, time.Since(started))
}

func show(sums []clocksim.Summary, took time.Duration) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "scenario\truns\tevaluations\tmisses\terror p50/p99 us\tgoal\thindsight p50/p99 us\tbound p50/p99 us\tgoal\tbound/error\tresult")
	var failures []string
	evaluations, misses := 0, 0
	for _, s := range sums {
		evaluations += s.Evaluations
		misses += s.Misses
		failures = append(failures, s.Failures...)
		result := "ok"
		if len(s.Failures) > 0 {
			result = "MISSED"
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%.1f\t%s\n", s.Name, s.Runs, s.Evaluations, s.Misses, pair(s.Err), goal(s.ErrP99),
			pair(s.HindErr), pair(s.Bound), goal(s.BoundP50), clocksim.P(s.Bound, .5)/clocksim.P(s.Err, .5), result)
	}
	failures = append(failures, clocksim.Across(sums)...)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}
	fmt.Printf("%d evaluations, %d outside their bound, in %v\n", evaluations, misses, took.Round(time.Second))
	for _, f := range failures {
		fmt.Println("missed:", f)
	}
	if len(failures) > 0 {
		return failed{len(failures)}
	}
	return nil
}

func pair(sorted []float64) string {
	if len(sorted) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f / %.2f", clocksim.P(sorted, .5)/1e3, clocksim.P(sorted, .99)/1e3)
}

func goal(d time.Duration) string {
	if d == 0 {
		return "covers"
	}
	return fmt.Sprintf("<= %g", float64(d)/1e3)
}
