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
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/rows"
)

// Options of a collector.
type Options struct {
	Interval   int // a row of every so many iterations; at least 1
	KVInterval int // KV statistics in the rows of every so many iterations: a multiple of Interval; 0: Interval
	MaxActive  int // requests that can be active
	BlockBytes int // of a KV block
	Put        func(*rows.Row)
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
	kv                 kvWindow
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
	c := &Collector{o: o, kv: kvWindow{blockBytes: int64(o.BlockBytes)}}
	c.row = c.fresh()
	c.kv.reset()
	return c, nil
}

// fresh is a row in which nothing has happened.
func (c *Collector) fresh() rows.Row {
	return rows.Row{Requests: rows.Requests{MaxActive: int64(c.o.MaxActive)}, QueueLatency: rows.SomeSpan(0)}
}

// Iterated takes in an iteration, and puts its row if it is a sampled one.
func (c *Collector) Iterated(it *engine.Iteration) {
	c.carry(it)
	c.row.Covers++
	c.kv.look(it)
	span := rows.Span{}
	if c.lastBuilt != 0 {
		span = rows.SomeSpan(it.BuiltNS - c.lastBuilt)
	}
	loop := max(c.lastEnd, it.BuiltNS)
	if it.Iter%int64(c.o.Interval) == 0 {
		r := &c.row
		r.Iter, r.StartNS = it.Iter, it.BuiltNS
		r.WallNS = c.o.Wall() - (it.EndNS - it.BuiltNS)
		r.IterLatency, r.IterSpan, r.HostStep = rows.SomeSpan(it.EndNS-it.BuiltNS), span, rows.SomeSpan(it.EndNS-loop)
		r.PrevDevice = c.device
		if it.Err == nil {
			r.Forward = rows.SomeSpan(it.Stamps.ForwardEndNS - it.Stamps.ForwardStartNS)
			r.Sample = rows.SomeSpan(it.Stamps.SampleEndNS - it.Stamps.ForwardEndNS)
		}
		c.batch(it)
		c.put(it, it.Iter%int64(c.o.KVInterval) == 0)
	}
	c.lastBuilt, c.lastEnd, c.device = it.BuiltNS, it.EndNS, rows.Span{}
	if it.Err == nil {
		c.device = rows.SomeSpan(it.Stamps.SampleEndNS - it.Stamps.ForwardStartNS)
	}
}

// Idled takes in what happened since the last iteration; the engine has nothing left to run. What was carried must not
// wait for work that may never come: it gets a row of its own.
func (c *Collector) Idled(it *engine.Iteration) {
	c.carry(it)
	c.kv.look(it)
	if c.carried() || c.kv.changed(&it.KV) {
		c.row.Drain, c.row.Iter, c.row.StartNS, c.row.WallNS = true, it.Iter, it.EndNS, c.o.Wall()
		c.put(it, true)
	}
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
	if it.KV.Host.Max > 0 {
		s.CachedHost = rows.Some(s.CachedHost.V + host)
	}
	if it.KV.Disk.Max > 0 {
		s.CachedDisk = rows.Some(s.CachedDisk.V + disk)
	}
	s.Context += int64(it.ContextTokens)
	s.Output += int64(it.OutputTokens)
	s.ProbeBlocks += int64(it.ProbeBlocks)
	c.kv.decoded += int64(it.DecodeBlocks)
	c.kv.copied += int64(it.CopiedBlocks)
}

func (c *Collector) carried() bool {
	q := c.row.Requests
	q.MaxActive = 0
	s := c.row.Sums
	s.CachedHost.OK, s.CachedDisk.OK = false, false // known, and nothing
	return q != rows.Requests{} || s != rows.Sums{} || c.row.Covers != 0
}

// batch fills in what the batch held when it was built.
func (c *Collector) batch(it *engine.Iteration) {
	c.row.Batch = rows.Batch{
		Scheduled: rows.Some(it.BatchSize), Context: rows.Some(it.ContextSeqs), Gen: rows.Some(it.DecodeSeqs),
		Paused: rows.Some(it.Paused), PausedKVTokens: rows.Some(it.PausedTokens),
		CtxTokens: rows.Some(it.ContextTokens), CtxKVTokens: rows.Some(it.ContextKVTokens), GenKVTokens: rows.Some(it.DecodeKVTokens),
		QueuedCtx: rows.Some(it.QueuedContext), QueuedCtxTokens: rows.Some(it.QueuedContextTokens),
		QueuedGen: rows.Some(it.QueuedDecode), QueuedGenKVTokens: rows.Some(it.QueuedDecodeTokens),
		Micro: rows.Some(0), DecodedPerIter: rows.RatioOf(int64(it.Decoded), int64(it.DecodeSeqs)),
	}
}

// put completes the row, hands it over and begins the next.
func (c *Collector) put(it *engine.Iteration, kv bool) {
	r := &c.row
	r.Requests.Active, r.Requests.Queued = int64(it.Running), int64(it.Waiting)
	if c.o.Memory != nil {
		r.Memory = c.o.Memory()
	}
	if kv {
		r.KV = c.kv.sample(&it.KV)
	}
	r.PerReq = requests(it.Requests)
	c.o.Put(r)
	c.row = c.fresh()
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

// kvWindow is what happened in the block pool since the last row that says so.
type kvWindow struct {
	blockBytes                        int64
	last                              kv.Stats
	decoded, copied                   int64
	peakFree, peakUsed, peakEvictable int
}

func (w *kvWindow) reset() {
	w.decoded, w.copied, w.peakFree, w.peakUsed, w.peakEvictable = 0, 0, 0, 0, 0
}

func (w *kvWindow) look(it *engine.Iteration) {
	s := &it.KV
	w.peakFree = max(w.peakFree, s.Free+s.Cached)
	w.peakUsed = max(w.peakUsed, s.Used+s.Leased)
	w.peakEvictable = max(w.peakEvictable, s.Cached)
}

// changed tells whether blocks were handed out, given back or moved since: without a row of it, readers would go on seeing
// blocks in use that are not.
func (w *kvWindow) changed(s *kv.Stats) bool {
	l := &w.last
	return s.Totals != l.Totals || s.Used+s.Leased != l.Used+l.Leased || s.Host.Moved != l.Host.Moved || s.Disk.Moved != l.Disk.Moved
}

// moved is a number of blocks, and their bytes.
func (w *kvWindow) moved(blocks int64) (n, bytes rows.Int) {
	return rows.Some(int(blocks)), rows.Some(int(blocks * w.blockBytes))
}

// minus is what was counted between two totals.
func minus(a, b kv.Totals) kv.Totals {
	return kv.Totals{
		Allocated: a.Allocated - b.Allocated, Reused: a.Reused - b.Reused, Loaded: a.Loaded - b.Loaded, Partial: a.Partial - b.Partial,
		Missed: a.Missed - b.Missed, Evicted: a.Evicted - b.Evicted, Freed: a.Freed - b.Freed,
	}
}

// between is what a tier moved between two states.
func between(a, b kv.Moved) kv.Moved {
	return kv.Moved{Stored: a.Stored - b.Stored, Loaded: a.Loaded - b.Loaded, Dropped: a.Dropped - b.Dropped, Broken: a.Broken - b.Broken}
}

func (w *kvWindow) sample(s *kv.Stats) rows.KV {
	d := minus(s.Totals, w.last.Totals)
	all, reused := s.Reused+s.Loaded+s.Partial, d.Reused+d.Loaded+d.Partial
	k := rows.KV{
		Sampled: true, Max: int64(s.Max), Free: int64(s.Free + s.Cached), Used: int64(s.Used + s.Leased), Evictable: int64(s.Cached),
		PeakFree: int64(w.peakFree), PeakUsed: int64(w.peakUsed), PeakEvictable: int64(w.peakEvictable),
		AllocTotal: s.Allocated + s.Reused, AllocNew: s.Allocated, Reused: all, Missed: s.Missed, Freed: s.Freed,
		DAllocTotal: d.Allocated + d.Reused, DAllocNew: d.Allocated, DReused: reused, DFullReused: d.Reused + d.Loaded, DPartialReused: d.Partial,
		DMissed: d.Missed, DGenAlloc: w.decoded, HitRate: rows.RatioOf(all, all+s.Missed), DHitRate: rows.RatioOf(reused, reused+d.Missed),
	}
	k.IntraCopyBlocks, k.IntraCopyBytes = w.moved(w.copied)
	if h := &s.Host; h.Max > 0 {
		d := between(h.Moved, w.last.Host.Moved)
		k.SecondaryMax, k.SecondaryFree, k.SecondaryUsed = rows.Some(h.Max), rows.Some(h.Max-h.Used), rows.Some(h.Used)
		k.OnboardBlocks, k.OnboardBytes = w.moved(d.Loaded)
		k.OffloadBlocks, k.OffloadBytes = w.moved(d.Stored)
		k.HostDropped, k.HostDroppedBytes = w.moved(d.Dropped)
	}
	if t := &s.Disk; t.Max > 0 {
		d := between(t.Moved, w.last.Disk.Moved)
		k.DiskMax, k.DiskUsed, k.DiskLoaded, k.DiskStored = rows.Some(t.Max), rows.Some(t.Used), rows.Some(d.Loaded), rows.Some(d.Stored)
		k.DiskDropped, k.DiskBroken = rows.Some(d.Dropped), rows.Some(d.Broken)
	}
	w.last = *s
	w.reset()
	return k
}
