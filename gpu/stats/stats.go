// Package stats makes the iteration ledger: of what the engine reports of each step it makes rows (shared/rows), one of
// every N iterations, so that the sums over the rows are exact at any N; and the line of the iteration log. It owns the
// carry-over between rows and nothing else: it keeps no rows, exports no metrics, reads one clock.
//
// All methods are called on the engine's goroutine; a Collector has no lock and allocates nothing.
package stats

import (
	"fmt"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/rows"
)

// Options of a collector.
type Options struct {
	Interval   int         // a row of every so many iterations; at least 1
	KVInterval int         // KV statistics in the rows of every so many iterations: a multiple of Interval; 0: Interval
	MaxActive  int         // requests that can be active
	BlockBytes []int       // of a KV block of each group of layers; 0 for one without layers, which is not counted
	Violated   func(error) // told once that KV blocks were lost or made up; the rows count it. nil: nobody is
	Put        func(*rows.Row)
	Rank       int                // of the engine
	Memory     func() rows.Memory // newest reading; nil: unknown. It must not block
	Wall       func() int64       // Unix time in ns; nil: the system's clock
}

// CheckIntervals refuses intervals that would lose counts, naming both.
func CheckIntervals(rows, kv int) error {
	switch {
	case rows < 1:
		return fmt.Errorf("iteration interval %d: must be at least 1", rows)
	case kv < rows || kv%rows != 0:
		return fmt.Errorf("KV interval %d: must be a multiple of the iteration interval, %d", kv, rows)
	}
	return nil
}

// Collector makes rows of one engine's iterations.
type Collector struct {
	o Options

	row                rows.Row // of the interval so far: sums carried over
	lastBuilt, lastEnd int64    // of the iteration before; 0: there was none
	device             rows.Span
	worked             bool // the interval holds an iteration that ran something
	kv                 kvLedger
}

// New makes a collector.
func New(o Options) (*Collector, error) {
	if o.KVInterval == 0 {
		o.KVInterval = o.Interval
	}
	if err := CheckIntervals(o.Interval, o.KVInterval); err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	if o.Wall == nil {
		o.Wall = func() int64 { return time.Now().UnixNano() }
	}
	if len(o.BlockBytes) == 0 {
		o.BlockBytes = []int{1}
	}
	c := &Collector{o: o, kv: kvLedger{bytes: o.BlockBytes, violated: o.Violated}}
	c.kv.groups = make([]kvGroup, len(o.BlockBytes))
	if o.BlockBytes[0] == 0 {
		c.kv.groups = c.kv.groups[1:]
	}
	c.row = c.fresh()
	return c, nil
}

// fresh is a row in which nothing has happened.
func (c *Collector) fresh() rows.Row {
	return rows.Row{Rank: int64(c.o.Rank), Requests: rows.Requests{MaxActive: int64(c.o.MaxActive)}, QueueLatency: rows.SomeSpan(0)}
}

// Iterated takes in an iteration, and puts its row if it is a sampled one.
func (c *Collector) Iterated(it *engine.Iteration) {
	c.carry(it)
	c.row.Covers++
	c.worked = c.worked || !it.Synthetic
	span := rows.Span{}
	if c.lastBuilt != 0 {
		span = rows.SomeSpan(it.BuiltNS - c.lastBuilt)
	}
	loop := max(c.lastEnd, it.BuiltNS)
	if it.Iter%int64(c.o.Interval) == 0 {
		r := &c.row
		r.Iter, r.StartNS = it.Iter, it.BuiltNS
		r.WallNS = c.o.Wall() - (it.EndNS - it.BuiltNS)
		r.IterSpan, r.PrevDevice = span, c.device
		if r.Synthetic = it.Synthetic; !it.Synthetic {
			r.IterLatency, r.HostStep = rows.SomeSpan(it.EndNS-it.BuiltNS), rows.SomeSpan(it.EndNS-loop)
		}
		if it.Err == nil && !it.Synthetic {
			r.Forward = rows.SomeSpan(it.Stamps.ForwardEndNS - it.Stamps.ForwardStartNS)
			r.Sample = rows.SomeSpan(it.Stamps.SampleEndNS - it.Stamps.ForwardEndNS)
		}
		c.batch(it)
		c.put(it, it.Iter%int64(c.o.KVInterval) == 0)
	}
	c.lastBuilt, c.lastEnd, c.device = it.BuiltNS, it.EndNS, rows.Span{}
	if it.Err == nil && !it.Synthetic {
		c.device = rows.SomeSpan(it.Stamps.SampleEndNS - it.Stamps.ForwardStartNS)
	}
}

// Idled takes in what happened since the last iteration; the engine has nothing left to run. What was carried must not
// wait for work that may never come: it gets a row of its own.
func (c *Collector) Idled(it *engine.Iteration) {
	if c.Carry(it) {
		c.drain(it)
	}
}

// Carry takes in what happened since the last iteration, and tells whether there is something that no row has told of.
func (c *Collector) Carry(it *engine.Iteration) bool {
	c.carry(it)
	return c.carries(it)
}

func (c *Collector) carries(it *engine.Iteration) bool { return c.carried() || c.kv.changed(it) }

// Drain takes in what happened since the last iteration and puts the row of what was carried. A rank does so when any rank has
// something, and then says whether it had.
func (c *Collector) Drain(it *engine.Iteration) {
	c.carry(it)
	c.drain(it)
}

func (c *Collector) drain(it *engine.Iteration) {
	c.row.Synthetic = !c.carries(it)
	c.row.Drain, c.row.Iter, c.row.StartNS, c.row.WallNS = true, it.Iter, it.EndNS, c.o.Wall()
	c.put(it, true)
}

// carry adds the counts of an iteration.
func (c *Collector) carry(it *engine.Iteration) {
	q, s := &c.row.Requests, &c.row.Sums
	q.New += int64(it.NewRequests)
	q.NewActive += int64(it.NewActive)
	q.Completed += int64(it.Completed)
	q.Cancelled += int64(it.Cancelled)
	q.Expired += int64(it.Expired)
	q.Failed += int64(it.Failed)
	q.Suspended += int64(it.Preempted)
	q.Resumed += int64(it.Resumed)
	c.row.QueueLatency.NS += it.QueuedNS
	s.Prompt += int64(it.PromptTokens)
	s.Cached += int64(it.CachedTokens)
	host, disk := int64(it.CachedHost), int64(it.CachedDisk)
	s.CachedDevice += int64(it.CachedTokens) - host - disk
	loadedTiers(s, it)
	s.Context += int64(it.ContextTokens)
	s.Output += int64(it.OutputTokens)
	s.ProbeBlocks += int64(it.ProbeBlocks)
	c.kv.carry(it)
}

func (c *Collector) carried() bool { return c.worked || Counts(&c.row) }

// Counts tells whether a row counts anything. One of an iteration in which nothing was run may count for those before it.
func Counts(r *rows.Row) bool {
	q, s := r.Requests, r.Sums
	q.Active, q.Queued, q.MaxActive = 0, 0, 0
	s.CachedHost.OK, s.CachedDisk.OK = false, false // known, and nothing
	return q != rows.Requests{} || s != rows.Sums{}
}

// batch fills in what the batch held when it was built.
func (c *Collector) batch(it *engine.Iteration) {
	c.row.Batch = rows.Batch{
		Scheduled: rows.Some(it.BatchSize), Context: rows.Some(it.ContextSeqs), Gen: rows.Some(it.DecodeSeqs),
		Paused: rows.Some(it.Paused), PausedKVTokens: rows.Some(it.PausedTokens),
		CtxTokens: rows.Some(it.ContextTokens), CtxKVTokens: rows.Some(it.ContextKVTokens), GenKVTokens: rows.Some(it.DecodeKVTokens),
		QueuedCtx: rows.Some(it.QueuedContext), QueuedCtxTokens: rows.Some(it.QueuedContextTokens),
		QueuedGen: rows.Some(it.QueuedDecode), QueuedGenKVTokens: rows.Some(it.QueuedDecodeTokens),
		Micro: rows.Some(it.MicroBatch), DecodedPerIter: rows.RatioOf(int64(it.Decoded), int64(it.DecodeSeqs)),
	}
}

// put completes the row, hands it over and begins the next.
func (c *Collector) put(it *engine.Iteration, withKV bool) {
	r := &c.row
	r.Requests.Active, r.Requests.Queued = int64(it.Running), int64(it.Waiting)
	if c.o.Memory != nil {
		r.Memory = c.o.Memory()
	}
	if withKV {
		c.kv.sample(it, r)
	}
	r.PerReq = requests(it.Requests)
	c.o.Put(r)
	c.row, c.worked = c.fresh(), false
}

// requests copies the states of requests; nil if they are not collected.
func requests(list []engine.RequestState) []rows.Req {
	if list == nil {
		return nil
	}
	out := make([]rows.Req, 0, len(list))
	for i := range list {
		q := &list[i]
		r := rows.Req{
			ID: q.ID, Stage: string(q.Stage), Prefilled: int64(q.Computed), Generated: int64(q.Output), Scheduled: q.Scheduled,
			Paused: q.Paused, AllocTotal: int64(q.KV.AllocTotalBlocks), AllocNew: int64(q.KV.AllocNewBlocks),
			Reused: int64(q.KV.ReusedBlocks), Missed: int64(q.KV.MissedBlocks),
			HitRate: rows.RatioOf(int64(q.KV.ReusedBlocks), int64(q.KV.ReusedBlocks+q.KV.MissedBlocks)),
		}
		if q.Stage == engine.StageDecode {
			r.DecodedPerIter = rows.Ratio{V: 1, OK: true} // there is no speculation
		}
		out = append(out, r)
	}
	return out
}
