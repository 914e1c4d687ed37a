// Package rowcheck holds three ledgers of a node against each other: the rows of its engine's iterations, its counters as
// Prometheus reads them, and the records of its requests in timelines. It is pure: it is given lines and says what does
// not agree, with both numbers.
//
// A file of rows (*.rows.ndjson) has a line for each row, as GET /iteration_stats gives it; lines with the counters of a
// node, of which the last counts; and, where rows were lost before they were read, lines that say how many.
package rowcheck

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

// Checker takes in lines and timelines in any order. It belongs to one goroutine.
type Checker struct {
	codec  *rows.Codec
	nodes  map[key]*node
	faults []Fault
	// Rows counts the rows that were read.
	Rows int64
}

// Fault is a sentence about a place.
type Fault struct{ At, Text string }

// key is one engine: a name and the clock of its process.
type key struct{ name, clock string }

// node is what is known of one engine.
type node struct {
	at       string // where its newest row was read
	rows     int64
	first    int64 // sequence numbers
	last     int64
	lastIter int64
	lost     int64
	apart    bool     // rows were lost after the newest
	prev     rows.Row // the row before, whatever its rank
	ranks    []rank
	closed   bool // a set is complete: its ranks are all that there are
	requests rows.Requests
	sums     rows.Sums
	batches  map[place]batch

	counters   map[string]float64
	countersAt string

	records records
}

// rank is what the rows of one data-parallel rank say.
type rank struct {
	newest rows.Row
	kv     rows.KV // of the newest row that had it
	alloc  int64   // sum of the KV changes
	sums   rows.Sums
}

// place is an iteration of a rank.
type place struct{ rank, iter int64 }

// batch is what a row says of an iteration.
type batch struct{ size, context int64 }

// records are what the records say of the requests that had a place in the engine.
type records struct {
	n           int64
	ranks       map[int64]*sums
	lastIter    int64
	chunkTokens map[place]int64
	chunkSize   map[place]int64
}

// sums are those of a rank's requests.
type sums struct{ prompt, cached, output, alloc int64 }

func (r *records) of(rank int64) *sums {
	s := r.ranks[rank]
	if s == nil {
		s = new(sums)
		r.ranks[rank] = s
	}
	return s
}

// New returns a checker.
func New() *Checker { return &Checker{codec: rows.NewCodec(), nodes: map[key]*node{}} }

func (c *Checker) node(name, clock string) *node {
	k := key{name, clock}
	n := c.nodes[k]
	if n == nil {
		n = &node{batches: map[place]batch{}, records: records{ranks: map[int64]*sums{}, chunkTokens: map[place]int64{}, chunkSize: map[place]int64{}}}
		c.nodes[k] = n
	}
	return n
}

func (c *Checker) fault(at, format string, args ...any) {
	c.faults = append(c.faults, Fault{at, fmt.Sprintf(format, args...)})
}

// Line takes in a line of a file of rows, read at a place.
func (c *Checker) Line(b []byte, at string) {
	x, err := parseExtra(b)
	switch {
	case err != nil:
		c.fault(at, "the line cannot be read: %v", err)
	case x.schema == CountersSchema:
		n := c.node(x.node, x.clock)
		n.counters, n.countersAt = x.counters, at
	case x.schema == LostSchema:
		n := c.node(x.node, x.clock)
		n.lost += x.lost
		n.last += x.lost
		n.apart = true
	default:
		s, r, err := c.codec.Parse(b)
		if err != nil && !errors.Is(err, rows.ErrSchema) {
			c.fault(at, "the row cannot be read: %v", err)
		} else if err == nil {
			c.row(&s, &r, at)
		}
	}
}

// row takes in one row.
func (c *Checker) row(s *rows.Static, r *rows.Row, at string) {
	if r.Rank < 0 || r.Rank >= infer.MaxRanks {
		c.fault(at, "row %d of %s is of rank %d", r.Seq, s.Node, r.Rank)
		return
	}
	c.Rows++
	n := c.node(s.Node, s.ClockID)
	switch {
	case n.rows == 0 && n.lost == 0:
		if n.first = r.Seq; n.first == 1 {
			c.begins(s.Node, r, at)
		}
	case r.Seq != n.last+1:
		c.fault(at, "row %d of %s follows row %d: rows are missing, or there twice", r.Seq, s.Node, n.last)
		n.lost += max(r.Seq-n.last-1, 1)
	case !n.apart:
		c.follows(n, s.Node, r, at)
	}
	n.rows++
	n.at, n.last, n.prev, n.apart = at, r.Seq, *r, false
	n.lastIter = max(n.lastIter, r.Iter)
	n.add(r)
	c.owned(s.Node, r, at)
	if f, ok := negative(r); ok {
		c.fault(at, "row %d of %s: %s", r.Seq, s.Node, f)
	}
	if k := &r.KV; k.Sampled && k.Free+k.Used != k.Max {
		c.fault(at, "row %d of %s: %d free and %d used KV blocks are not the %d that there are", r.Seq, s.Node, k.Free, k.Used, k.Max)
	}
	for i := range r.Groups {
		if k := &r.Groups[i]; k.Free+k.Used != k.Max {
			c.fault(at, "row %d of %s, layers of group %d: %d free and %d used KV blocks are not the %d that there are", r.Seq, s.Node, i, k.Free, k.Used, k.Max)
		}
	}
	if n := r.KV.Violations; n > 0 {
		c.fault(at, "row %d of %s: its KV blocks did not add up in %d rows so far", r.Seq, s.Node, n)
	}
}

// follows: the rows of an iteration lie side by side, one of each rank in order, and iterations rise.
func (c *Checker) follows(n *node, name string, r *rows.Row, at string) {
	p, same := &n.prev, r.Iter == n.prev.Iter && r.Drain == n.prev.Drain
	if r.Rank == 0 {
		n.closed = true
	}
	switch {
	case r.Rank >= int64(len(n.ranks)) && n.closed:
		c.fault(at, "row %d of %s is of rank %d in iteration %d, sets had %d ranks before", r.Seq, name, r.Rank, r.Iter, len(n.ranks))
	case r.Rank > 0 && (r.Rank != p.Rank+1 || !same), r.Rank == 0 && p.Rank != int64(len(n.ranks))-1:
		c.fault(at, "row %d of %s is of rank %d in iteration %d, the one before of rank %d in iteration %d: a rank is missing, or there twice",
			r.Seq, name, r.Rank, r.Iter, p.Rank, p.Iter)
	case r.Rank == 0 && (r.Iter < p.Iter || r.Iter == p.Iter && !r.Drain):
		c.fault(at, "row %d of %s is of iteration %d, the one before of %d", r.Seq, name, r.Iter, p.Iter)
	case r.Rank == 0 && r.Iter-p.Iter != r.Covers:
		c.fault(at, "row %d of %s tells of %d iterations, it is of iteration %d and the one before of %d", r.Seq, name, r.Covers, r.Iter, p.Iter)
	case r.Rank > 0 && r.Covers != p.Covers:
		c.fault(at, "row %d of %s: rank %d tells of %d iterations, rank %d of %d", r.Seq, name, r.Rank, r.Covers, p.Rank, p.Covers)
	}
	if r.Rank > 0 {
		c.twice(n, name, r, at)
	}
}

// begins: the first row is of rank 0 and of the first iterations.
func (c *Checker) begins(name string, r *rows.Row, at string) {
	switch {
	case r.Rank != 0:
		c.fault(at, "row 1 of %s is of rank %d: a rank is missing", name, r.Rank)
	case r.Covers != r.Iter:
		c.fault(at, "row 1 of %s tells of %d iterations, it is of iteration %d", name, r.Covers, r.Iter)
	}
}

// twice: a request has one rank.
func (c *Checker) twice(n *node, name string, r *rows.Row, at string) {
	for rank := range min(r.Rank, int64(len(n.ranks))) {
		for _, q := range n.ranks[rank].newest.PerReq {
			if slices.ContainsFunc(r.PerReq, func(p rows.Req) bool { return p.ID == q.ID }) {
				c.fault(at, "row %d of %s: request %d is on rank %d and on rank %d", r.Seq, name, q.ID, rank, r.Rank)
			}
		}
	}
}

// owned: a row tells what its rank knows, and nothing else.
func (c *Checker) owned(name string, r *rows.Row, at string) {
	q, b := &r.Requests, &r.Batch
	if r.Rank > 0 && (q.New|q.NewActive|q.Completed|q.Cancelled|q.Expired|q.Failed|q.Queued != 0 || r.QueueLatency.OK ||
		b.QueuedCtx.OK || b.QueuedCtxTokens.OK || b.QueuedGen.OK || b.QueuedGenKVTokens.OK) {
		c.fault(at, "row %d of %s: rank %d tells of the queue, which is rank 0's", r.Seq, name, r.Rank)
	}
	if r.Synthetic && (b.Scheduled.V > 0 || r.IterLatency.OK || r.HostStep.OK || r.Forward.OK || r.Sample.OK) {
		c.fault(at, "row %d of %s: rank %d ran a batch of %d, and is said to have come along without one", r.Seq, name, r.Rank, b.Scheduled.V)
	}
}

func (n *node) add(r *rows.Row) {
	for int64(len(n.ranks)) <= r.Rank {
		n.ranks = append(n.ranks, rank{})
	}
	k := &n.ranks[r.Rank]
	k.newest = *r
	n.requests.AddCounts(&r.Requests)
	n.requests.Suspended += r.Requests.Suspended
	n.sums.Add(&r.Sums)
	k.sums.Add(&r.Sums)
	if r.KV.Sampled {
		k.kv = r.KV
		k.alloc += r.KV.DAllocNew
	}
	if !r.Drain {
		n.batches[place{r.Rank, r.Iter}] = batch{r.Batch.Scheduled.V, r.Batch.CtxTokens.V}
	}
}

// negative tells whether a duration or a count is below zero.
func negative(r *rows.Row) (string, bool) {
	for _, d := range []struct {
		name string
		span rows.Span
	}{{"iterLatencyMS", r.IterLatency}, {"iterSpanMS", r.IterSpan}, {"hostStepTimeMS", r.HostStep}, {"gpuForwardTimeMS", r.Forward}, {"gpuSampleTimeMS", r.Sample},
		{"prevDeviceStepTimeMS", r.PrevDevice}, {"newActiveRequestsQueueLatencyMS", r.QueueLatency}} {
		if d.span.OK && d.span.NS < 0 {
			return fmt.Sprintf("%s is %v", d.name, float64(d.span.NS)/1e6), true
		}
	}
	q := &r.Requests
	for _, v := range []int64{q.New, q.NewActive, q.Completed, q.Cancelled, q.Expired, q.Failed, r.Sums.Prompt, r.Sums.Cached, r.Sums.Context, r.Sums.Output, r.Sums.ProbeBlocks} {
		if v < 0 {
			return fmt.Sprintf("a count is %d", v), true
		}
	}
	return "", false
}

// Timeline takes in the records of one request.
func (c *Checker) Timeline(l *timeline.Line) {
	for i := range l.Phases {
		p := &l.Phases[i]
		if p.Role == phase.Disagg || p.KV == nil || p.KV.AllocTotalBlocks == 0 { // it never had a place
			continue
		}
		r := &c.node(p.Node, string(p.Clock.ID)).records
		at := place{}
		if p.DPRank != nil {
			at.rank = int64(*p.DPRank)
		}
		r.n++
		s := r.of(at.rank)
		s.prompt += int64(p.Tokens.Prompt)
		s.cached += int64(p.Tokens.Cached)
		s.output += int64(p.Tokens.Output)
		s.alloc += int64(p.KV.AllocNewBlocks)
		if p.Iters != nil {
			r.lastIter = max(r.lastIter, p.Iters.Last)
		}
		iters, tokens, sizes := p.Chunks.Column("iter"), p.Chunks.Column("tokens"), p.Chunks.Column("batch_size")
		for k := range iters {
			if at.iter = iters[k]; k < len(tokens) && k < len(sizes) {
				r.chunkTokens[at] += tokens[k]
				r.chunkSize[at] = sizes[k]
			}
		}
	}
}

// Finish compares the ledgers and returns everything that does not agree.
func (c *Checker) Finish() []Fault {
	var keys []key
	for k := range c.nodes {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.clock, b.clock)) })
	for _, k := range keys {
		if n := c.nodes[k]; n.rows > 0 {
			c.compare(k.name, n)
		}
	}
	return c.faults
}
