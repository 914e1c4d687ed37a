// Command localcluster runs a whole cluster as processes on this machine: up keeps one, demo shows one at work, verify
// compares the texts of the three serving styles. It owns the commands; package cluster owns the processes.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/serve"
)

type options struct {
	Up     up     `cmd:"" help:"Start a cluster and keep it until SIGINT or SIGTERM."`
	Demo   demo   `cmd:"" help:"Start a cluster, send streamed prompts, show the texts, a waterfall and a summary, and stop it."`
	Verify verify `cmd:"" help:"Send the same prompts in every serving style and compare the texts."`
}

func main() {
	os.Exit(serve.Run("localcluster", &options{}, serve.About("Run a Meridian cluster as processes on this machine.")))
}

// layout are the options that all commands share.
type layout struct {
	Ctx    int    `help:"Context nodes." default:"1"`
	Gen    int    `help:"Generation nodes." default:"1"`
	Model  string `help:"Checkpoint folder; empty: the embedded model." placeholder:"DIR" type:"path"`
	Device string `help:"What the nodes compute with." enum:"cpu,sim" default:"cpu"`
	Traces string `help:"Folder for timelines; empty: traces in the run folder." placeholder:"DIR" type:"path"`
	Dir    string `help:"Run folder for logs and state; empty: a new one for temporary files." placeholder:"DIR" type:"path"`
}

// config makes the run folder and the part of the configuration that all commands share.
func (l layout) config(log *slog.Logger) (cluster.Config, error) {
	if l.Ctx < 1 || l.Gen < 1 {
		return cluster.Config{}, fmt.Errorf("--ctx %d --gen %d: want at least one of each", l.Ctx, l.Gen)
	}
	bin, err := cluster.Binaries()
	if err != nil {
		return cluster.Config{}, err
	}
	dir := l.Dir
	if dir == "" {
		dir, err = os.MkdirTemp("", "meridian-")
	} else {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return cluster.Config{}, fmt.Errorf("make the run folder: %w", err)
	}
	traces := l.Traces
	if traces == "" {
		traces = filepath.Join(dir, "traces")
	}
	return cluster.Config{
		Bin: bin, Dir: dir, Traces: traces, Ctx: l.Ctx, Gen: l.Gen, Model: l.Model, Device: l.Device, Logger: log,
	}, nil
}
