// Command tailbench measures what disaggregation does to the tail: two devices serve the same streams and long prompts, once
// as a context node and a generation node, once as two nodes that do both, in turn. It owns the runs and their files;
// package tail owns the load and the numbers.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/tail"
	"meridian.internal/shared/serve"
)

func main() {
	os.Exit(serve.Run("tailbench", &options{}, serve.About("Compare the tail of token gaps with and without disaggregation, on two devices.")))
}

type options struct {
	Model    string        `help:"Checkpoint folder, with room for the long prompts; randmodel writes one." placeholder:"DIR" type:"path" required:""`
	Device   string        `help:"What the nodes compute with. cuda: the first node on card 0, the second on card 1." enum:"cpu,sim,cuda" default:"cuda"`
	OneCard  bool          `help:"cuda: both nodes on card 0, half of it each."`
	NodeFlag []string      `help:"Further option of every node; may be given several times." placeholder:"FLAG" sep:"none"`
	Streams  []int         `help:"Streams that run at any time; one comparison for each." default:"32,128"`
	Prompt   int           `help:"Tokens in of a stream." default:"1024"`
	Output   int           `help:"Tokens out of a stream." default:"512"`
	Long     int           `help:"Tokens in of a prompt that disturbs." default:"8192"`
	LongOut  int           `help:"Tokens out of it." default:"16"`
	Busy     float64       `help:"Part of its time that the context node computes prompts." default:"0.7"`
	Vocab    int           `help:"Token ids of prompts are below this." default:"2000"`
	Warm     time.Duration `help:"Time before each measurement." default:"5s"`
	Time     time.Duration `help:"Time of each measurement." default:"15s"`
	Rounds   int           `help:"Runs of each mode." default:"2"`
	Seed     uint64        `help:"Of prompts and arrivals." default:"1"`
	Out      string        `help:"Folder for figures, timelines and pictures." default:"tailbench" type:"path"`
}

// Run makes all comparisons; a missed goal is a figure, not an error.
func (o *options) Run(ctx context.Context, log *slog.Logger) error {
	if o.Rounds < 1 {
		return fmt.Errorf("--rounds %d: want at least 1", o.Rounds)
	}
	bin, err := cluster.Binaries()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.Out, 0o755); err != nil {
		return fmt.Errorf("make the folder of the results: %w", err)
	}
	for _, n := range o.Streams {
		c := comparison{options: o, bin: bin, log: log, shape: tail.Shape{
			Streams: n, Prompt: o.Prompt, Out: o.Output, Long: o.Long, LongOut: o.LongOut, Busy: o.Busy, Vocab: o.Vocab,
			Warm: o.Warm, Time: o.Time, Seed: o.Seed,
		}}
		if err := c.shape.Check(); err != nil {
			return err
		}
		if err := c.run(ctx); err != nil {
			return fmt.Errorf("%d streams: %w", n, err)
		}
	}
	return nil
}

// comparison is the runs with one number of streams.
type comparison struct {
	*options
	bin   string
	log   *slog.Logger
	shape tail.Shape
	rate  float64 // of long prompts; set by the first run

	quiet, disturbed []tail.Window
}

func (c *comparison) run(ctx context.Context) error {
	for round := range c.Rounds {
		modes := []string{tail.Disaggregated, tail.Aggregated}
		if round%2 == 1 {
			modes = []string{tail.Aggregated, tail.Disaggregated}
		}
		for _, mode := range modes {
			if err := c.one(ctx, mode, round); err != nil {
				return fmt.Errorf("%s, round %d: %w", mode, round+1, err)
			}
		}
	}
	r := tail.Comparison{Quiet: byMode(c.quiet), Disturbed: byMode(c.disturbed)}
	table := r.Table()
	fmt.Println(table)
	all, err := json.MarshalIndent(append(c.quiet, c.disturbed...), "", "  ")
	if err != nil {
		return err
	}
	name := filepath.Join(c.Out, fmt.Sprintf("streams-%d", c.shape.Streams))
	return errors.Join(os.WriteFile(name+".md", []byte(table), 0o644), os.WriteFile(name+".json", all, 0o644))
}

func byMode(all []tail.Window) map[string]tail.Window {
	split := map[string][]tail.Window{}
	for _, w := range all {
		split[w.Mode] = append(split[w.Mode], w)
	}
	out := map[string]tail.Window{}
	for mode, ws := range split {
		out[mode] = tail.Join(ws)
	}
	return out
}

const startTimeout = 2 * time.Minute

// one starts a cluster in a mode, measures undisturbed and disturbed, stops it and looks at its timelines.
func (c *comparison) one(ctx context.Context, mode string, round int) error {
	dir := filepath.Join(c.Out, fmt.Sprintf("streams-%d-%s-%d", c.shape.Streams, mode, round+1))
	if err := makeAnew(dir); err != nil {
		return fmt.Errorf("make the folder of a run: %w", err)
	}
	start, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cl, err := cluster.Start(start, c.config(mode, dir))
	if err != nil {
		return err
	}
	t := tail.Target{URL: cl.URL(), Mode: mode, Round: round + 1, Progress: os.Stderr}
	if t.Model, err = firstModel(ctx, t.URL); err == nil {
		err = c.measure(ctx, t)
	}
	if err := errors.Join(err, cl.Stop()); err != nil {
		return err
	}
	return c.look(ctx, dir, cl.Traces())
}

// makeAnew makes the folder of a run. What an earlier run of the same name left there goes: its timelines would be taken for ours.
func makeAnew(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.MkdirAll(dir, 0o755)
}

func (c *comparison) config(mode, dir string) cluster.Config {
	cfg := cluster.Config{
		Bin: c.bin, Dir: dir, Ctx: 1, Gen: 1, Model: c.Model, Device: c.Device, Logger: c.log, Places: map[string]cluster.Place{},
		NodeArgs: append([]string{fmt.Sprintf("--max-batch-size=%d", c.shape.Streams+16)}, c.NodeFlag...),
	}
	second := "gen0"
	if mode == tail.Aggregated {
		cfg.Ctx, cfg.Gen, cfg.Schedules, second = 0, 2, []string{tail.Aggregated}, "gen1"
	}
	if c.Device == "cuda" {
		share := 0.9
		if c.OneCard {
			share = 0.45
		} else {
			cfg.Places[second] = cluster.Place{Args: []string{"--gpu=1"}}
		}
		cfg.NodeArgs = append(cfg.NodeArgs, fmt.Sprintf("--gpu-memory-fraction=%v", share))
	}
	return cfg
}

func firstModel(ctx context.Context, url string) (string, error) {
	cl := client.New(url, 1)
	defer cl.Close()
	var models struct{ Data []struct{ ID string } }
	if err := cl.Get(ctx, "/v1/models", &models); err != nil {
		return "", fmt.Errorf("list the models: %w", err)
	}
	if len(models.Data) == 0 {
		return "", errors.New("the router lists no model")
	}
	return models.Data[0].ID, nil
}

func (c *comparison) measure(ctx context.Context, t tail.Target) error {
	fmt.Fprintf(os.Stderr, "%d streams, %s, round %d: undisturbed\n", c.shape.Streams, t.Mode, t.Round)
	longPrefill, err := t.Alone(ctx, c.shape, c.shape.Long)
	if err != nil {
		return err
	}
	streamPrefill, err := t.Alone(ctx, c.shape, c.shape.Prompt)
	if err != nil {
		return err
	}
	quiet, err := t.Measure(ctx, c.shape, 0)
	if err != nil {
		return err
	}
	c.quiet = append(c.quiet, quiet)
	if c.rate == 0 { // the first run is disaggregated; all others get the same load
		if c.rate, err = tail.LongRate(c.shape, quiet.StreamsPerS(), streamPrefill, longPrefill); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "a prompt of %d tokens takes %v, one of %d %v: %.2f long prompts a second keep the context node busy %.0f %% of its time\n",
			c.shape.Long, longPrefill, c.shape.Prompt, streamPrefill, c.rate, 100*c.Busy)
	}
	fmt.Fprintf(os.Stderr, "%d streams, %s, round %d: %.2f long prompts a second\n", c.shape.Streams, t.Mode, t.Round, c.rate)
	disturbed, err := t.Measure(ctx, c.shape, c.rate)
	if err != nil {
		return err
	}
	c.disturbed = append(c.disturbed, disturbed)
	return nil
}

// look checks the timelines of a run, and keeps what they say beside them. Timelines that do not add up are an error.
func (c *comparison) look(ctx context.Context, dir, traces string) error {
	var all error
	for _, v := range []struct {
		name string
		args []string
	}{
		{"check.txt", []string{"check"}}, {"summary.txt", []string{"summary"}}, {"advise.txt", []string{"advise"}},
		{"", []string{"plot", "--kind", "cdf", "-o", filepath.Join(dir, "cdf.svg")}},
		{"", []string{"plot", "--kind", "heat", "-o", filepath.Join(dir, "heat.svg")}},
		{"", []string{"export", "--format", "perfetto", "-o", filepath.Join(dir, "perfetto.pftrace")}},
	} {
		out, err := exec.CommandContext(ctx, filepath.Join(c.bin, "timeline"), append(v.args, traces)...).CombinedOutput()
		if err != nil {
			all = errors.Join(all, fmt.Errorf("timeline %s %s: %w\n%s", strings.Join(v.args, " "), traces, err, last(out)))
		}
		if v.name == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, v.name), out, 0o644); err != nil {
			return fmt.Errorf("keep what timeline %s said: %w", v.args[0], err)
		}
		if v.name == "advise.txt" {
			if _, err := os.Stderr.Write(out); err != nil {
				return err
			}
		}
	}
	return all
}

// last is the end of a long text.
func last(b []byte) []byte { return b[max(0, len(b)-2000):] }
