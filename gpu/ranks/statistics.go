package ranks

import (
	"slices"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/rows"
)

// keepStatistics connects an engine that runs alone to the makers of rows and of the iteration log that the sink asks for.
func keepStatistics(cfg *engine.Config, s rows.Sink, info backend.Info, cards []int) error {
	c, err := collect(cfg, s, info, cards)
	if c != nil {
		cfg.OnIdle = c.Idled
	}
	return err
}

// own are the accelerators of a rank that no other uses: their counters are its own. Of a shared one nobody can say what is whose.
func (o *Options) own(rank int) []int {
	if rank >= len(o.Cards) {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(o.Cards[rank]), func(card int) bool {
		for other, cards := range o.Cards {
			if other != rank && slices.Contains(cards, card) {
				return true
			}
		}
		return false
	})
}

// cardMemory leaves the memory of the process out: the first of the ranks in it tells of that.
func cardMemory(read func([]int) rows.Memory) func([]int) rows.Memory {
	if read == nil {
		return nil
	}
	return func(cards []int) rows.Memory { return rows.Memory{GPU: read(cards).GPU} }
}

// collect makes the collector of an engine with accelerators of its own, nil if no rows are asked for.
func collect(cfg *engine.Config, s rows.Sink, info backend.Info, cards []int) (*stats.Collector, error) {
	if cfg.Energy = nil; s.Energy != nil {
		cfg.Energy = func() (float64, bool) { return s.Energy(cards) }
	}
	var memory func() rows.Memory
	if s.Memory != nil {
		memory = func() rows.Memory { return s.Memory(cards) }
	}
	var each []func(*engine.Iteration)
	var c *stats.Collector
	rank := cfg.Rank
	if s.Interval > 0 {
		var err error
		c, err = stats.New(stats.Options{
			Interval: s.Interval, KVInterval: s.KVInterval, MaxActive: cfg.MaxBatchSize, Put: s.Put, Memory: memory, Rank: cfg.Rank,
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
	rank      int
	clock     string              // id of the clock of its rows, if it is not the node's
	align     func([]rows.Row)    // of rank 0: takes in what all ranks say
	gathered  func([]engine.Word) // of rank 0: takes in a round of rows
	collector *stats.Collector    // nil: no rows
	rows      []rows.Row          // made, and not told yet
	measured  bool                // one that was made since the last word is of work, or counts some
	gathers   bool                // they are gathered in rounds of their own
	told      int64               // rows that were gathered
	end       engine.Iteration    // how things were when the engine ended
	carried   bool                // and whether there were counts that no row has told
}

// put takes a row from the collector.
func (m *member) put(r *rows.Row) {
	m.rows = append(m.rows, *r)
	m.rows[len(m.rows)-1].RankClock = m.clock
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
	if m.measured = false; m.gathers {
		w.Made = m.told + int64(len(m.rows))
		return
	}
	w.Rows = m.taken()
}

// taken gives the rows that are not told yet, once.
func (m *member) taken() []rows.Row {
	list := m.rows
	m.rows = nil
	return list
}

// hear takes in a round: when all are idle and any has counts that no row has told, every rank makes a row of its own.
func (m *member) hear(words []engine.Word, it *engine.Iteration) {
	if m.collector == nil {
		return
	}
	carried := false
	for i := range words {
		carried = carried || words[i].Carried
		if m.align != nil && !m.gathers {
			m.align(words[i].Rows)
		}
	}
	if m.gathered != nil && m.gathers && len(words) > 0 {
		m.gathered(words)
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

// Left implements executor.
func (m *member) Left() (list []rows.Row, carried bool, iter int64) {
	return m.taken(), m.carried, m.end.Iter
}

// Last implements executor.
func (m *member) Last(iter int64) []rows.Row {
	m.end.Iter = iter
	m.collector.Drain(&m.end)
	return m.taken()
}

// flush tells what is left when all engines have ended, without another round. They may have ended an iteration apart, and some in a
// round that rank 0 did not hear the end of. The sets of a rank that was lost with what it had to tell stay open.
func (g *Group) flush() {
	if g.aligner == nil {
		return
	}
	for _, words := range g.hub.Unheard(0) {
		for i := range words {
			g.align(words[i].Rows)
		}
	}
	carries, last := make([]bool, len(g.ranks)), int64(0)
	for rank, k := range g.ranks {
		list, carried, iter := k.Left()
		carries[rank], last = carried, max(last, iter)
		g.align(list)
	}
	for _, e := range g.remotes {
		if e.Lost() {
			return
		}
	}
	for _, r := range g.aligner.Missing() {
		if r.Drain { // others drained after the round in which this one ended
			g.align(g.ranks[r.Rank].Last(r.Iter))
			carries[r.Rank] = false
		} else {
			g.align([]rows.Row{*r})
		}
	}
	if !slices.Contains(carries, true) {
		return
	}
	for _, k := range g.ranks {
		g.align(k.Last(last))
	}
}

// align takes in rows of one rank, on the goroutine of rank 0's engine while that runs. It changes copies: the words of a round are
// still being sent to ranks that are processes.
func (g *Group) align(list []rows.Row) {
	for i := range list {
		for _, r := range g.aligner.Add(g.kept(&list[i])) {
			g.put(r)
		}
	}
}

// kept is a copy of a row. On its way between processes a list without entries becomes none, which would say that it was not collected.
func (g *Group) kept(r *rows.Row) *rows.Row {
	row := *r
	if g.states && row.PerReq == nil {
		row.PerReq = []rows.Req{}
	}
	return &row
}
