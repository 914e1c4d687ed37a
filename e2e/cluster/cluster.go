// Package cluster starts the real binaries as processes on loopback and ends them. It owns their ports, folders and logs;
// it knows their options and health routes, and nothing of what they do with a request.
package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// Config says what to start. The zero value of a field means its default.
type Config struct {
	Bin         string           // folder of the binaries; see Binaries
	Dir         string           // run folder: logs, NATS store, spools; must exist
	Traces      string           // timelines; default Dir/traces
	Ctx, Gen    int              // nodes
	Model       string           // --model; empty: the embedded one
	Device      string           // --device; empty: the nodes' default
	Port        int              // of the first router; 0: a free one
	Schedules   []string         // one router for each, on the same nodes; empty: one router with its default
	NATS        string           // URL of a server; empty: the first router embeds one
	NoClocksync bool             // the routers measure clocks themselves
	NodeArgs    []string         // further options of every node
	Places      map[string]Place // by node; those without one run beside the others
	RouterArgs  []string
	Args        []string      // further options of every daemon
	Key         string        // API key of an administrator, where RouterArgs names a file of keys
	TLS         *tls.Config   // trust in nodes and clocksync, where Args gives them certificates; nil: they serve plain HTTP
	Apart       bool          // signals to our process group, as a terminal sends them, reach no daemon: Stop ends them in their order
	Grace       time.Duration // --grace of every daemon; 0: 5 s
	Logger      *slog.Logger  // nil: slog.Default()
}

const (
	loopback     = "127.0.0.1"
	defaultGrace = 5 * time.Second
	killSlack    = 10 * time.Second // over the grace, before a daemon is killed
)

// Cluster is a set of running processes. It is not safe for concurrent use, but for the processes' own methods.
type Cluster struct {
	cfg     Config
	spawner *spawner
	net     *network
	free    func()     // gives the ports back
	NATS    string     // URL
	Routers []*Process // in the order of Schedules
	Nodes   []*Process // ctx nodes, then gen nodes
	Clock   *Process   // nil without clocksync
}

// Start starts the processes and waits until each says that it is ready. On an error nothing is left running.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Grace == 0 {
		cfg.Grace = defaultGrace
	}
	if cfg.Traces == "" {
		cfg.Traces = filepath.Join(cfg.Dir, "traces")
	}
	if len(cfg.Schedules) == 0 {
		cfg.Schedules = []string{""}
	}
	if err := cfg.checkPlaces(); err != nil {
		return nil, err
	}
	n, err := newNetwork(cfg.Places)
	if err != nil {
		return nil, err
	}
	c := &Cluster{cfg: cfg, spawner: newSpawner(), net: n}
	if err := c.plan(); err != nil {
		c.close()
		return nil, err
	}
	c.trust(cfg.TLS)
	if err := c.start(ctx); err != nil {
		_ = c.Stop() // how the others end, hardly begun, says nothing
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	for _, p := range c.All() {
		if err := p.start(c.spawner); err != nil {
			return err
		}
	}
	return c.WaitReady(ctx)
}

// All lists the processes: routers first, since the first may hold the NATS server.
func (c *Cluster) All() []*Process {
	all := slices.Concat(c.Routers, c.Nodes)
	if c.Clock != nil {
		all = append(all, c.Clock)
	}
	return slices.DeleteFunc(all, func(p *Process) bool { return p == nil })
}

// Find returns the process with a name.
func (c *Cluster) Find(name string) *Process {
	for _, p := range c.All() {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// Traces is the folder of the first router's timelines.
func (c *Cluster) Traces() string { return c.cfg.Traces }

// URL is the address of the first router.
func (c *Cluster) URL() string { return c.Routers[0].URL }

// WaitReady waits until every process answers its readiness route and every router sees every node, or one ends, or ctx ends.
func (c *Cluster) WaitReady(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, p := range c.All() {
		g.Go(func() error { return p.WaitReady(gctx) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, r := range c.Routers {
		if err := c.waitSeen(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// Restart starts a process that has ended, at the same addresses, and waits until it is ready.
func (c *Cluster) Restart(ctx context.Context, p *Process) error {
	if p.Running() {
		return fmt.Errorf("restart %s: it still runs", p.Name)
	}
	if err := p.start(c.spawner); err != nil {
		return err
	}
	return p.WaitReady(ctx)
}

// Stop drains everything: nodes first, because their last records go through the NATS server that a router may hold. The
// error names each process that did not end with exit code 0; those that had ended before are not counted.
func (c *Cluster) Stop() error {
	grace := c.cfg.Grace + killSlack
	first := slices.DeleteFunc(append(slices.Clone(c.Nodes), c.Clock), func(p *Process) bool { return p == nil })
	err := errors.Join(terminate(first, grace), terminate(c.Routers, grace))
	c.close()
	return err
}

// close gives back what the processes were started with.
func (c *Cluster) close() {
	c.spawner.stop()
	c.net.close()
	if c.free != nil {
		c.free()
	}
}

func terminate(processes []*Process, grace time.Duration) error {
	errs := make(chan error, len(processes))
	n := 0
	for _, p := range processes {
		if p.done == nil || !p.Running() {
			continue
		}
		_ = p.Signal(syscall.SIGCONT) // a stopped one would never see SIGTERM
		n++
		go func() { errs <- p.Terminate(grace) }()
	}
	var all error
	for range n {
		all = errors.Join(all, <-errs)
	}
	return all
}

// Binaries finds the folder of the binaries: MERIDIAN_TEST_BIN, or beside the running executable.
func Binaries() (string, error) {
	dir := os.Getenv("MERIDIAN_TEST_BIN")
	if dir == "" {
		exe, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find own executable: %w", err)
		}
		dir = filepath.Dir(exe)
	}
	for _, name := range []string{"router", "ctxnode", "gennode", "clocksync", "timeline"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("binary %s: %w (run: make build)", name, err)
		}
	}
	return dir, nil
}
