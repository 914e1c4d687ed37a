// Package ranks runs the executors of a node's data-parallel ranks in lockstep: each has a back end, a KV pool and a scheduler
// of its own, and all build their iterations together. It owns where a new request goes, and the statistics of all ranks as
// one ledger; what a rank does with its requests is gpu/engine's. Ranks are goroutines of the node, or, but for the first, processes
// (gpu/remote), each of which runs Serve.
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
	"meridian.internal/gpu/remote"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// Options of a group.
type Options struct {
	Engine   engine.Config     // of each rank; MaxWaiting and the limits of a batch are a rank's
	Backends []backend.Backend // of the ranks of this process, from rank 0 on; alike
	Remotes  []*remote.Engine  // the other ranks, which are processes. Run ends them
	Sink     rows.Sink         // where statistics go
	Cards    [][]int           // of each rank: the places of its accelerators among the node's; nil: none has any
	Deadline time.Duration     // the slowest rank may come so much later to an iteration than the first; 0: DefaultDeadline
}

// DefaultDeadline is that of a group that says none.
const DefaultDeadline = 30 * time.Second

// Group is the ranks of a node.
type Group struct {
	ranks   []executor
	hub     *collective.Hub[engine.Word] // nil of one rank
	remotes []*remote.Engine
	config  engine.Config // of rank 0
	cache   *cache        // nil of one rank, and without prefix reuse
	aligner *stats.Aligner
	put     func(*rows.Row)
	states  bool // rows have the states of requests
	drained chan struct{}

	mu   sync.Mutex // guards next
	next int        // rank that gets a request if all are alike
}

// New makes a group; Run runs it. The caller closes the back ends after Run has returned.
func New(o Options) (*Group, error) {
	n := len(o.Backends) + len(o.Remotes)
	if len(o.Backends) < 1 || n > Max {
		return nil, fmt.Errorf("ranks: %d back ends and %d processes, must be 1 back end and up to %d ranks", len(o.Backends), len(o.Remotes), Max)
	}
	if o.Deadline == 0 {
		o.Deadline = DefaultDeadline
	}
	g := &Group{put: o.Sink.Put, states: o.Sink.RequestStats, drained: make(chan struct{}), remotes: o.Remotes}
	if n == 1 {
		cfg := o.Engine
		if err := keepStatistics(&cfg, o.Sink, o.Backends[0].Info(), o.own(0)); err != nil {
			return nil, err
		}
		e, err := engine.New(cfg, o.Backends[0])
		if err != nil {
			return nil, err
		}
		g.ranks, g.config = []executor{local{Engine: e}}, e.Config()
		return g, nil
	}
	g.aligner = stats.NewAligner(n)
	if o.Engine.PrefixReuse {
		g.cache = newCache(o.Engine.KVEvents, o.Engine.Epoch, o.Backends[0].Info())
	}
	g.hub = collective.New[engine.Word](n, o.Deadline)
	bills := o.bills(len(o.Remotes) > 0)
	for rank, b := range o.Backends {
		k, err := g.local(rank, o, b, bills)
		if err != nil {
			return nil, fmt.Errorf("rank %d: %w", rank, err)
		}
		g.ranks = append(g.ranks, k)
	}
	g.config = g.ranks[0].(local).Engine.Config()
	for i, e := range o.Remotes {
		if err := alike(o.Backends[0].Info(), e.Hello().Info); err != nil {
			return nil, fmt.Errorf("rank %d: %w", len(o.Backends)+i, err)
		}
		e.Tell(g.events(len(o.Backends) + i))
		g.ranks = append(g.ranks, distant{e})
	}
	return g, nil
}

// alike refuses a rank whose model or KV is another one: they come from the same options, but read the model's files each.
func alike(a, b backend.Info) error {
	if a.ModelHash != b.ModelHash || a.TokensPerBlock != b.TokensPerBlock || a.Numerics != b.Numerics {
		return fmt.Errorf("ranks: it has model %s with KV blocks of %d tokens and numerics %q; rank 0 has %s, %d, %q",
			b.ModelHash, b.TokensPerBlock, b.Numerics, a.ModelHash, a.TokensPerBlock, a.Numerics)
	}
	return nil
}

// events takes the KV events of a rank; nil if nobody wants them.
func (g *Group) events(rank int) func(kvevent.Event) {
	if g.cache == nil {
		return nil
	}
	return g.cache.of(rank)
}

// local makes a rank of this process.
func (g *Group) local(rank int, o Options, b backend.Backend, bills map[int]*bill) (executor, error) {
	m := &member{rank: rank}
	if rank == 0 {
		m.align, m.gathered = g.align, g.gathered
	} else {
		o.Sink.Memory = cardMemory(o.Sink.Memory)
	}
	cfg, err := m.configure(o, len(o.Backends)+len(o.Remotes), b.Info(), g.hub.Member(rank))
	if err != nil {
		return nil, err
	}
	o.share(&cfg, rank, bills)
	cfg.KVEvents = g.events(rank)
	e, err := engine.New(cfg, b)
	if err != nil {
		return nil, err
	}
	return local{e, m}, nil
}

// configure is what an engine of one rank of several needs.
func (m *member) configure(o Options, ranks int, info backend.Info, place collective.Member[engine.Word]) (engine.Config, error) {
	cfg := o.Engine
	cfg.Rank = m.rank
	cfg.Peers = &engine.Peers{Member: place, Tell: m.tell, Hear: m.hear, Unsaid: m.unsaid}
	if m.gathers = o.Sink.AllRanks; m.gathers {
		cfg.Peers.Gather = m.gather
	}
	if cfg.DiskKVDir != "" { // each has files of its own
		cfg.DiskKVDir = filepath.Join(cfg.DiskKVDir, fmt.Sprintf("rank-%d", m.rank))
		cfg.DiskKVBytes /= int64(ranks)
	}
	if cfg.Profile != nil {
		p := *cfg.Profile
		p.Rank = m.rank
		cfg.Profile = &p
	}
	s := o.Sink
	s.Put = m.put
	var err error
	m.collector, err = collect(&cfg, s, info, o.own(m.rank))
	return cfg, err
}

// Run runs all ranks until ctx ends, or until one is lost: then the others end with its error.
func (g *Group) Run(ctx context.Context) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	left := g.host()
	errs := make([]error, len(g.ranks))
	var wg sync.WaitGroup
	for rank, k := range g.ranks {
		wg.Go(func() {
			errs[rank] = k.Run(inner)
			if g.hub == nil {
				return
			}
			g.hub.Member(rank).Leave(errs[rank])
			g.abandon(errs[rank])
		})
	}
	drain := make(chan struct{})
	go func() { // ends with the engines
		defer close(drain)
		for _, k := range g.ranks {
			select {
			case <-k.Drained():
			case <-inner.Done():
				return
			}
		}
		close(g.drained)
	}()
	wg.Wait()
	cancel()
	<-drain
	left() // what a rank has said in a round is at the hub then
	g.flush()
	return errors.Join(append(errs, g.close())...)
}

// Drain refuses new work from now on; running work goes on.
func (g *Group) Drain() {
	for _, k := range g.ranks {
		k.Drain()
	}
}

// Drained is closed when no rank holds anything any more.
func (g *Group) Drained() <-chan struct{} { return g.drained }

// Ranks is the number of ranks.
func (g *Group) Ranks() int { return len(g.ranks) }

// Config is the configuration of rank 0; those of the others differ in nothing that matters outside.
func (g *Group) Config() engine.Config { return g.config }

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
	out := make([]infer.Load, len(g.ranks))
	for rank, k := range g.ranks {
		out[rank] = k.Load()
	}
	return out
}

// LeakedBlocks counts the KV blocks that no rank accounts for; see engine.Engine.
func (g *Group) LeakedBlocks() int {
	n := 0
	for _, k := range g.ranks {
		n += k.LeakedBlocks()
	}
	return n
}

// Check verifies the books of all ranks.
func (g *Group) Check() error {
	var errs []error
	for rank, k := range g.ranks {
		if err := k.Check(); err != nil {
			errs = append(errs, fmt.Errorf("rank %d: %w", rank, err))
		}
	}
	return errors.Join(errs...)
}
