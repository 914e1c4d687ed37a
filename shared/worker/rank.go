package worker

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/hardware"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
	"meridian.internal/shared/serve"
)

// Rank is what a rank that is a process of its own has of a node: a clock, credentials, and where its statistics come from. It has no
// face, no bus and no place in the registry.
type Rank struct {
	Steady  *clock.Steady
	Cluster *serve.Cluster
	Sink    rows.Sink // without Put
}

// RunRank makes it from the options of the node and calls serve, which lasts as long as the node wants. A signal that goes to all
// processes of a node is for the node: it ends its ranks after the last request.
func RunRank(ctx context.Context, f Flags, role phase.Role, log *slog.Logger, serve func(context.Context, *Rank) error) error {
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	if err := f.Validate(); err != nil {
		return err
	}
	steady, err := clock.New(f.Clock.Options())
	if err != nil {
		return err
	}
	cluster, err := f.ClusterFlags.Open()
	if err != nil {
		return err
	}
	h := hardware.New(hardware.Options{Logger: log})
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var sampling sync.WaitGroup
	sampling.Go(func() { _ = h.Run(inner) })
	defer sampling.Wait()
	defer cancel()
	return serve(inner, &Rank{Steady: steady, Cluster: cluster, Sink: f.sink(f.nameOf(role), h, log)})
}
