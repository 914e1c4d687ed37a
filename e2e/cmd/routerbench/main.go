// Command routerbench measures what the router costs against other routers on this machine, and prints the goals with
// what was reached. It starts itself for the mocks.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/routerbench"
	"meridian.internal/shared/serve"
)

const about = `Measure the router against the plainest Go router, httputil.ReverseProxy and nginx, with mock workers, in one run.`

type options struct {
	Run          runCommand     `cmd:"" default:"withargs" help:"Measure and print the table."`
	Workers      workersCommand `cmd:"" help:"Serve the mock workers."`
	Naive        hopCommand     `cmd:"" help:"Serve the plainest two-leg router."`
	Reverseproxy hopCommand     `cmd:"" help:"Serve one hop of httputil.ReverseProxy."`
}

type runCommand struct {
	Rounds  int           `help:"Rounds; the subjects take turns in each." default:"3"`
	Turn    time.Duration `help:"Length of one load against one subject." default:"2s"`
	Streams int           `help:"Open streams of the memory row." default:"1000"`
	Leaves  int           `help:"Clients that leave, in prefill and in generation each." default:"50"`
	Only    string        `help:"One load by its name in the benchmark lines, e.g. t1-c16, or held: open streams and clients that leave. Empty: all." placeholder:"LOAD"`
	Against []string      `help:"Subjects to measure beside ours: direct, nginx, reverseproxy, naive. Empty: all." placeholder:"NAME"`
	Router  string        `help:"The router's binary. Empty: in the folder of the built binaries." type:"path" placeholder:"FILE"`
	Strict  bool          `help:"Exit with 1 when a goal is missed."`
}

type workersCommand struct{}

type hopCommand struct {
	Ctx string `help:"URL of the context worker." placeholder:"URL"`
	Gen string `help:"URL of the generation worker." placeholder:"URL"`
}

func main() { os.Exit(serve.Run("routerbench", &options{}, serve.About(about))) }

// Run measures.
func (c *runCommand) Run(ctx context.Context, _ *slog.Logger) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if c.Router == "" {
		bin, err := cluster.Binaries()
		if err != nil {
			return err
		}
		c.Router = filepath.Join(bin, "router")
	}
	dir, err := os.MkdirTemp("", "routerbench-")
	if err != nil {
		return err
	}
	res, err := routerbench.Run(ctx, routerbench.Plan{
		Bench: routerbench.Bench{Self: self, Router: c.Router, Dir: dir}, Rounds: c.Rounds, Turn: c.Turn, Streams: c.Streams, Leaves: c.Leaves,
		Only: c.Only, Against: c.Against, Log: os.Stderr,
	})
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		return err
	}
	return errors.Join(res.Write(os.Stdout), c.verdict(res))
}

func (c *runCommand) verdict(r *routerbench.Result) error {
	if len(r.Failures) > 0 {
		return fmt.Errorf("%d wrong answers", len(r.Failures))
	}
	missed := 0
	for _, l := range r.Lines {
		if !l.Met() {
			missed++
		}
	}
	if c.Strict && missed > 0 {
		return fmt.Errorf("%d of %d goals missed", missed, len(r.Lines))
	}
	return nil
}

// Run serves the workers.
func (workersCommand) Run(ctx context.Context, _ *slog.Logger) error {
	return routerbench.ServeWorkers(ctx, io.Writer(os.Stdout))
}

// Run serves one of the two hops, by the name of the command.
func (h *hopCommand) Run(ctx context.Context, _ *slog.Logger) error {
	if len(os.Args) > 1 && os.Args[1] == "naive" {
		return routerbench.ServeHandler(ctx, os.Stdout, routerbench.Naive(h.Ctx, h.Gen))
	}
	p, err := routerbench.ReverseProxy(h.Gen)
	if err != nil {
		return err
	}
	return routerbench.ServeHandler(ctx, os.Stdout, p)
}
