// Command localcluster runs a whole cluster as processes on this machine: up keeps one, demo shows one at work, verify
// compares the texts of the three serving styles, clocks holds the measured clocks against the truth, kv measures the reuse of KV,
// serving compares a pair of nodes with one node. It owns the commands; package cluster owns the processes.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/serve"
)

type options struct {
	Up      up      `cmd:"" help:"Start a cluster and keep it until SIGINT or SIGTERM."`
	Demo    demo    `cmd:"" help:"Start a cluster, send streamed prompts, show the texts, a waterfall and a summary, and stop it."`
	Clocks  clocks  `cmd:"" help:"Hold the measured clocks against the truth while the cluster works: nodes in time namespaces and behind paths of known delay."`
	KV      reuse   `cmd:"" help:"Measure how much KV is reused: prompts with shared prefixes, chats." name:"kv"`
	Serving serving `cmd:"" help:"Compare what a context and a generation node serve with what one node that does both serves."`
	Verify  verify  `cmd:"" help:"Send the same prompts in every serving style and compare the texts."`
}

func main() {
	os.Exit(serve.Run("localcluster", &options{}, serve.About("Run a Meridian cluster as processes on this machine.")))
}

// layout are the options that all commands share.
type layout struct {
	Ctx       int                      `help:"Context nodes." default:"1"`
	Gen       int                      `help:"Generation nodes." default:"1"`
	Model     string                   `help:"Checkpoint folder; empty: the embedded model." placeholder:"DIR" type:"path"`
	Device    string                   `help:"What the nodes compute with: cpu, sim, or cuda (all on card 0; run: make build-cuda)." enum:"cpu,sim,cuda" default:"cpu"`
	Traces    string                   `help:"Folder for timelines; empty: traces in the run folder." placeholder:"DIR" type:"path"`
	TimeShift map[string]time.Duration `help:"Start a node under a clock that is ahead by whole seconds (a time namespace; needs root)." placeholder:"NODE=DURATION"`
	Shuttle   map[string]string        `help:"Start a node behind a path of known delay to it and back, and jitter (a network namespace; needs root)." placeholder:"NODE=THERE/BACK[/JITTER]"`
	NodeFlag  []string                 `help:"Further option of one node, as in gen0=--fault-clock-lie=1ms, or of all: all=--iter-publish; may be given several times. MERIDIAN_* is not passed on." placeholder:"NODE=FLAG" sep:"none"`
	Token     string                   `help:"File with the secret of the cluster: every daemon gets it as --cluster-token, and takes only those who know it." name:"cluster-token" placeholder:"FILE" type:"path"`
	Dir       string                   `help:"Run folder for logs and state; empty: a new one for temporary files." placeholder:"DIR" type:"path"`
}

// cardShare is the part of a card's memory that the nodes of a cluster share equally.
const cardShare = 0.9

// allNodes names every node in --node-flag.
const allNodes = "all"

// config makes the run folder and the part of the configuration that all commands share.
func (l layout) config(log *slog.Logger) (cluster.Config, error) {
	if l.Ctx < 1 || l.Gen < 1 {
		return cluster.Config{}, fmt.Errorf("--ctx %d --gen %d: want at least one of each", l.Ctx, l.Gen)
	}
	bin, err := cluster.Binaries()
	if err != nil {
		return cluster.Config{}, err
	}
	if ignored := cluster.Withheld(); len(ignored) > 0 {
		log.Warn("the daemons do not see these variables: their options come by --node-flag", "variables", strings.Join(ignored, " "))
	}
	places, err := l.places()
	if err != nil {
		return cluster.Config{}, err
	}
	var nodeArgs []string
	if l.Device == "cuda" {
		if _, err := os.Stat(filepath.Join(bin, "gennode-cuda")); err != nil {
			return cluster.Config{}, fmt.Errorf("--device cuda: %w (run: make build-cuda)", err)
		}
		nodeArgs = []string{fmt.Sprintf("--gpu-memory-fraction=%.3f", cardShare/float64(l.Ctx+l.Gen))}
	}
	var args []string
	if l.Token != "" {
		args = []string{"--cluster-token", l.Token}
	}
	for _, f := range l.NodeFlag {
		if flag, ok := strings.CutPrefix(f, allNodes+"="); ok {
			nodeArgs = append(nodeArgs, flag)
		}
	}
	dir := l.Dir // made last: what cannot be used leaves none behind
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
		Args: args, NodeArgs: nodeArgs, Places: places, Bin: bin, Dir: dir, Traces: traces, Ctx: l.Ctx, Gen: l.Gen, Model: l.Model, Device: l.Device, Logger: log,
		Apart: true,
	}, nil
}

// places are those of the nodes that the options name.
func (l layout) places() (map[string]cluster.Place, error) {
	places := map[string]cluster.Place{}
	for name, d := range l.TimeShift {
		p := places[name]
		p.ClockShift = d
		places[name] = p
	}
	for name, s := range l.Shuttle {
		there, back, err := cluster.ParsePath(s)
		if err != nil {
			return nil, fmt.Errorf("--shuttle %s: %w", name, err)
		}
		p := places[name]
		p.There, p.Back = there, back
		places[name] = p
	}
	for _, f := range l.NodeFlag {
		name, flag, ok := strings.Cut(f, "=")
		switch {
		case !ok:
			return nil, fmt.Errorf("--node-flag %s: want NODE=FLAG", f)
		case name == allNodes:
			continue
		}
		p := places[name]
		p.Args = append(p.Args, flag)
		places[name] = p
	}
	return places, nil
}
