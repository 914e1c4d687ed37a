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

// RankOptions are those of the node, and what is known of its role.
type RankOptions struct {
	Flags
	Role   phase.Role
	GPUs   func() (read func() ([]rows.GPU, error), err error) // see hardware.Sampler.Watch
	Logger *slog.Logger
}

// RunRank makes a rank and calls serve, which lasts as long as the node wants. A signal that goes to all processes of a node is for the
// node: it ends its ranks after the last request.
func RunRank(ctx context.Context, o RankOptions, serve func(context.Context, *Rank) error) error {
	signal.Ignore(os.Interrupt, syscall.SIGTERM)
	if err := o.Validate(); err != nil {
		return err
	}
	steady, err := clock.New(o.Clock.Options())
	if err != nil {
		return err
	}
	cluster, err := o.ClusterFlags.Open()
	if err != nil {
		return err
	}
	h := hardware.New(hardware.Options{Logger: o.Logger})
	h.Watch(o.GPUs)
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var sampling sync.WaitGroup
	sampling.Go(func() { _ = h.Run(inner) })
	defer sampling.Wait()
	defer cancel()
	return serve(inner, &Rank{Steady: steady, Cluster: cluster, Sink: o.sink(o.nameOf(o.Role), h, o.Logger)})
}
