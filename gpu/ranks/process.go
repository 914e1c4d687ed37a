package ranks

import (
	"context"
	"errors"
	"sync"

	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/remote"
	"meridian.internal/shared/clock"
)

// host seats the ranks of other processes at the meeting point, until they leave it or are gone.
func (g *Group) host() (left func()) {
	var hosts sync.WaitGroup
	for i, e := range g.remotes {
		rank := len(g.ranks) - len(g.remotes) + i
		hosts.Go(func() {
			if err := g.hub.Host(context.Background(), rank, e.Process().Rounds); err != nil {
				g.hub.Member(rank).Leave(e.Process().Why(err))
			}
		})
	}
	return hosts.Wait
}

// close ends the processes.
func (g *Group) close() error {
	var errs []error
	for _, e := range g.remotes {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// abandon gives up the processes that have missed a round: nothing more is expected of them, nor waited for.
func (g *Group) abandon(err error) {
	var missed *collective.MissedError
	if !errors.As(err, &missed) {
		return
	}
	for _, rank := range missed.Ranks {
		if d, ok := g.ranks[rank].(distant); ok {
			d.Abandon(missed)
		}
	}
}

// ServeOptions are those of a rank that is a process.
type ServeOptions struct {
	Options                            // as the node has them; Backends is the rank's own
	Rank       int                     // 1 or more
	Ranks      int                     // of the node
	ClockID    clock.ID                // of the stamps
	ClockAddr  string                  // where that clock answers
	CardClocks func() []clock.Estimate // of the clocks of the rank's cards to that clock; nil: they have none of their own
	Links      remote.Links
}

// Serve runs the rank until its node ends it or is gone. The caller closes the back end.
func Serve(ctx context.Context, o ServeOptions) error {
	if o.Deadline == 0 {
		o.Deadline = DefaultDeadline
	}
	s := remote.NewServer(o.Links, remote.ServerOptions{Deadline: o.Deadline, Now: o.Engine.Now, Cards: o.CardClocks})
	m := &member{rank: o.Rank, clock: string(o.ClockID)}
	info := o.Backends[0].Info()
	cfg, err := m.configure(o.Options, o.Ranks, info, collective.Join[engine.Word](o.Links.Rounds, o.Rank))
	if err != nil {
		return err
	}
	o.share(&cfg, o.Rank, o.bills(true))
	if cfg.KVEvents = nil; cfg.PrefixReuse {
		cfg.KVEvents = s.KVEvent
	}
	cfg.OnLoad = s.LoadChanged
	e, err := engine.New(cfg, o.Backends[0])
	if err != nil {
		return err
	}
	return s.Serve(ctx, e, m, remote.Hello{Info: info, ClockAddr: o.ClockAddr})
}
