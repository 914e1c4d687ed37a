package ranks

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/rows"
)

// keepStatistics connects an engine that runs alone to the makers of rows and of the iteration log that the sink asks for.
func keepStatistics(cfg *engine.Config, s rows.Sink, info backend.Info) error {
	c, err := collect(cfg, s, info)
	if c != nil {
		cfg.OnIdle = c.Idled
	}
	return err
}

// collect makes the collector of an engine, nil if no rows are asked for.
func collect(cfg *engine.Config, s rows.Sink, info backend.Info) (*stats.Collector, error) {
	cfg.Energy = s.Energy
	var each []func(*engine.Iteration)
	var c *stats.Collector
	rank := cfg.Rank
	if s.Interval > 0 {
		var err error
		c, err = stats.New(stats.Options{
			Interval: s.Interval, KVInterval: s.KVInterval, MaxActive: cfg.MaxBatchSize, Put: s.Put, Memory: s.Memory, Rank: cfg.Rank,
			BlockBytes: blockBytes(info),
			Violated: func(err error) {
				cfg.Logger.Error("kv blocks are not conserved; rows count it", "rank", rank, "error", err)
			},
		})
		if err != nil {
			return nil, err
		}
		each = append(each, c.Iterated)
		cfg.RequestStates = s.RequestStats
	}
	if s.Log != nil {
		each = append(each, (&stats.Log{Max: cfg.MaxBatchSize, Write: s.Log, Rank: cfg.Rank}).Iterated)
	}
	switch len(each) {
	case 0:
	case 1:
		cfg.OnIteration = each[0]
	default:
		cfg.OnIteration = func(it *engine.Iteration) {
			for _, f := range each {
				f(it)
			}
		}
	}
	return c, nil
}

// blockBytes is the size of a KV block of each group of layers.
func blockBytes(info backend.Info) []int {
	bytes := []int{info.BlockBytes(0)}
	for i := range info.Windows {
		bytes = append(bytes, info.BlockBytes(i+1))
	}
	return bytes
}

// member is what a rank has to say to the others. Its engine's goroutine owns it while that runs.
type member struct {
	g         *Group
	rank      int
	collector *stats.Collector // nil: no rows
	rows      []rows.Row       // made, and not told yet
	measured  bool             // one of them is of work, or counts some
	end       engine.Iteration // how things were when the engine ended
	carried   bool             // and whether there were counts that no row has told
}

// put takes a row from the collector.
func (m *member) put(r *rows.Row) {
	m.rows = append(m.rows, *r)
	m.measured = m.measured || !r.Synthetic || stats.Counts(r)
}

func (m *member) unsaid(it *engine.Iteration) bool {
	carries := m.collector != nil && m.collector.Carry(it) // also when it is not asked for: nobody else takes it in
	return m.measured || carries
}

func (m *member) tell(w *engine.Word, it *engine.Iteration) {
	if m.collector != nil && it != nil {
		w.Carried = m.collector.Carry(it)
	}
	w.Rows, m.rows, m.measured = m.rows, nil, false
}

// hear takes in a round: when all are idle and any has counts that no row has told, every rank makes a row of its own.
func (m *member) hear(words []engine.Word, it *engine.Iteration) {
	if m.collector == nil {
		return
	}
	carried := false
	for i := range words {
		carried = carried || words[i].Carried
		if m.rank == 0 {
			m.g.align(words[i].Rows)
		}
	}
	switch {
	case it == nil:
	case carried:
		m.collector.Drain(it)
	default:
		m.carried = m.collector.Carry(it)
		m.end = engine.Iteration{Iter: it.Iter, EndNS: it.EndNS, Running: it.Running, Waiting: it.Waiting, Pool: it.Pool}
	}
}

// flush tells what is left when all engines have ended, without another round.
func (g *Group) flush() {
	carried, last := false, int64(0)
	for _, m := range g.members {
		carried, last = carried || m.carried, max(last, m.end.Iter)
		g.align(m.rows)
		m.rows = nil
	}
	if g.aligner != nil {
		for _, r := range g.aligner.Missing() {
			g.align([]rows.Row{*r})
		}
	}
	if !carried {
		return
	}
	for _, m := range g.members {
		m.end.Iter = last // they may have ended an iteration apart
		m.collector.Drain(&m.end)
	}
	for _, m := range g.members {
		g.align(m.rows)
	}
}

// align takes in rows of one rank, on the goroutine of rank 0's engine while that runs. The words of a round belong to all
// ranks, so it keeps copies.
func (g *Group) align(list []rows.Row) {
	for i := range list {
		row := list[i]
		for _, r := range g.aligner.Add(&row) {
			g.put(r)
		}
	}
}
