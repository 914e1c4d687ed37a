// Package ranks runs the executors of a node's data-parallel ranks in lockstep: each has a back end, a KV pool and a scheduler
// of its own, and all build their iterations together. It owns where a new request goes, and the statistics of all ranks as
// one ledger; what a rank does with its requests is gpu/engine's.
//
// A Group of one rank is its engine and nothing more. Of more, each engine's goroutine tells its statistics to the others when they meet
// (gpu/collective), and rank 0's makes rows of them.
package ranks

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// Options of a group.
type Options struct {
	Engine   engine.Config     // of each rank; MaxWaiting and the limits of a batch are a rank's
	Backends []backend.Backend // of the ranks; alike
	Sink     rows.Sink         // where statistics go
	Deadline time.Duration     // the slowest rank may come so much later to an iteration than the first; 0: 30 s
}

// Group is the ranks of a node.
type Group struct {
	engines []*engine.Engine
	members []*member // nil of one rank
	cache   *cache    // nil of one rank, and without prefix reuse
	aligner *stats.Aligner
	put     func(*rows.Row)
	drained chan struct{}

	mu   sync.Mutex // guards next
	next int        // rank that gets a request if all are alike
}

// New makes a group; Run runs it. The caller closes the back ends after Run has returned.
func New(o Options) (*Group, error) {
	n := len(o.Backends)
	if n < 1 || n > Max {
		return nil, fmt.Errorf("ranks: %d back ends, must be 1 to %d", n, Max)
	}
	if o.Deadline == 0 {
		o.Deadline = 30 * time.Second
	}
	g := &Group{put: o.Sink.Put, drained: make(chan struct{})}
	if n == 1 {
		cfg := o.Engine
		if err := keepStatistics(&cfg, o.Sink, o.Backends[0].Info()); err != nil {
			return nil, err
		}
		e, err := engine.New(cfg, o.Backends[0])
		g.engines = []*engine.Engine{e}
		return g, err
	}
	g.aligner = stats.NewAligner(n)
	if o.Engine.PrefixReuse {
		g.cache = newCache(o.Engine.KVEvents, o.Engine.Epoch, o.Backends[0].Info())
	}
	hub := collective.New[engine.Word](n, o.Deadline)
	for rank, b := range o.Backends {
		if err := g.add(rank, o, b, hub.Member(rank)); err != nil {
			return nil, fmt.Errorf("rank %d: %w", rank, err)
		}
	}
	return g, nil
}

// add makes the engine of a rank.
func (g *Group) add(rank int, o Options, b backend.Backend, place collective.Member[engine.Word]) error {
	cfg := o.Engine
	m := &member{g: g, rank: rank}
	cfg.Rank = rank
	cfg.Peers = &engine.Peers{Member: place, Tell: m.tell, Hear: m.hear, Unsaid: m.unsaid}
	cfg.Energy = nil         // the device's counter cannot be told apart by ranks
	if cfg.DiskKVDir != "" { // each has files of its own
		cfg.DiskKVDir = filepath.Join(cfg.DiskKVDir, fmt.Sprintf("rank-%d", rank))
		cfg.DiskKVBytes /= int64(len(o.Backends))
	}
	cfg.KVEvents = nil
	if g.cache != nil {
		cfg.KVEvents = g.cache.of(rank)
	}
	if cfg.Profile != nil {
		p := *cfg.Profile
		p.Rank = rank
		cfg.Profile = &p
	}
	s := o.Sink
	s.Put, s.Energy = m.put, nil
	var err error
	if m.collector, err = collect(&cfg, s, b.Info()); err != nil {
		return err
	}
	e, err := engine.New(cfg, b)
	if err != nil {
		return err
	}
	g.members, g.engines = append(g.members, m), append(g.engines, e)
	return nil
}

// Run runs all ranks until ctx ends, or until one is lost: then the others end with its error.
func (g *Group) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(g.engines))
	for rank, e := range g.engines {
		wg.Go(func() {
			errs[rank] = e.Run(inner)
			if g.members != nil {
				e.Config().Peers.Member.Leave(errs[rank])
			}
		})
	}
	drain := make(chan struct{})
	go func() { // ends with the engines
		defer close(drain)
		for _, e := range g.engines {
			select {
			case <-e.Drained():
			case <-inner.Done():
				return
			}
		}
		close(g.drained)
	}()
	wg.Wait()
	cancel()
	<-drain
	g.flush()
	return errors.Join(errs...)
}

// Drain refuses new work from now on; running work goes on.
func (g *Group) Drain() {
	for _, e := range g.engines {
		e.Drain()
	}
}

// Drained is closed when no rank holds anything any more.
func (g *Group) Drained() <-chan struct{} { return g.drained }

// Ranks is the number of ranks.
func (g *Group) Ranks() int { return len(g.engines) }

// Config is the configuration of rank 0; those of the others differ in nothing that matters outside.
func (g *Group) Config() engine.Config { return g.engines[0].Config() }

// Load is that of all ranks together.
func (g *Group) Load() infer.Load {
	var sum infer.Load
	for _, l := range g.Loads() {
		sum.Running += l.Running
		sum.Waiting += l.Waiting
		sum.WaitingTokens += l.WaitingTokens
		sum.KVUsedBlocks += l.KVUsedBlocks
		sum.KVMaxBlocks += l.KVMaxBlocks
		sum.Iter = max(sum.Iter, l.Iter)
	}
	return sum
}

// Loads are those of the ranks.
func (g *Group) Loads() []infer.Load {
	out := make([]infer.Load, len(g.engines))
	for rank, e := range g.engines {
		out[rank] = e.Load()
	}
	return out
}

// LeakedBlocks counts the KV blocks that no rank accounts for; see engine.Engine.
func (g *Group) LeakedBlocks() int {
	n := 0
	for _, e := range g.engines {
		n += e.LeakedBlocks()
	}
	return n
}

// Check verifies the books of all ranks.
func (g *Group) Check() error {
	var errs []error
	for rank, e := range g.engines {
		if err := e.Check(); err != nil {
			errs = append(errs, fmt.Errorf("rank %d: %w", rank, err))
		}
	}
	return errors.Join(errs...)
}
