// Package rows owns what an engine tells operators of its iterations: the row of statistics in TensorRT-LLM's key names
// with its codec, and the ring that any number of readers follow. It is pure: plain data, no engine, no HTTP, no
// metrics. It does not measure: gpu/stats makes rows.
//
// In a row every key is present. null says that the value does not apply or was not collected; 0 is a measured zero.
package rows

// Schema is the version of a row. Changes are additive.
const Schema = "meridian.rows/1"

// Int is a number that may be unknown. The zero value is unknown, which JSON says as null.
type Int struct {
	V  int64
	OK bool
}

// Some is a known number.
func Some[T int | int32 | int64](v T) Int { return Int{int64(v), true} }

// add adds a number if it is known.
func (n *Int) add(m Int) {
	if m.OK {
		n.V, n.OK = n.V+m.V, true
	}
}

// Span is a duration in ns that may be unknown; JSON has it in milliseconds.
type Span struct {
	NS int64
	OK bool
}

// SomeSpan is a known duration.
func SomeSpan(ns int64) Span { return Span{ns, true} }

// Ratio is a quotient that may be undefined.
type Ratio struct {
	V  float64
	OK bool
}

// RatioOf is a/b, unknown if b is 0.
func RatioOf(a, b int64) Ratio {
	if b == 0 {
		return Ratio{}
	}
	return Ratio{float64(a) / float64(b), true}
}

// Static is what all rows of one engine have in common.
type Static struct {
	Node           string
	ClockID        string // of Row.StartNS, but where the row names another
	Mode           string // schedulerMode: "overlap" or "non_overlap"
	MaxBatchSize   int64
	MaxNumTokens   int64
	TokensPerBlock int64
	BlockBytes     int64   // of one KV block of the first group
	Window         int64   // tokens that a query of the first group sees, at most the context
	Groups         []Group // groups of layers that have KV blocks of their own; nil: one, which sees everything
	Tier           string  // where KV is: "gpu" or "host"
	HostTier       string  // "host" where evicted KV is kept there; empty: nowhere
	DiskTier       string  // "disk" likewise
}

// Group is a group of layers that have KV blocks of their own: a pool group, with one life cycle, of TensorRT-LLM. There is one
// kind so far, attention; state-space layers would be another, "ssm", with snapshots in place of blocks.
type Group struct {
	Tokens     int64 // that a query sees, at most the context
	Window     Int   // the same; unknown where queries see everything
	BlockBytes int64
}

// MaxGroups is how many groups of a row can be read.
const MaxGroups = 8

// Row is one sampled iteration of one rank. What belongs to the queue that the ranks share (QueueLatency, and New, NewActive,
// Completed, Cancelled, Expired, Failed and Queued of Requests) is rank 0's, for all of them; in the rows of the others it is
// null, and 0 here. Counts that are sums cover everything since the row before, so that their totals do not
// depend on how many iterations are sampled.
type Row struct {
	Seq       int64  // set by the ring; the first is 1
	Rank      int64  // data-parallel rank
	Iter      int64  // the step that the row is of, numbered when its batch was built
	Drain     bool   // no iteration: the engine went idle with something to tell
	Covers    int64  // iterations since the row before, this one included
	RankClock string // id of the clock of StartNS, if that is not Static's: the rank is a process of its own
	StartNS   int64  // steady clock, when the batch was built
	WallNS    int64  // the same moment, Unix time
	// Synthetic: the rank had nothing to run in this iteration and came along. Its zeros are no measurement.
	Synthetic bool
	Dropped   int64 // rows that did not become part of a set of all ranks, since the start

	IterLatency  Span // building loop's start to consuming loop's end; with overlap two loops
	IterSpan     Span // since the batch before was built; the sum is wall time
	HostStep     Span // the loop that consumed this batch
	PrevDevice   Span // device time of the batch before
	Forward      Span // of this batch, on the device's timeline
	Sample       Span
	QueueLatency Span // sum over NewActive: how long they had waited

	Requests Requests
	Memory   Memory
	Batch    Batch
	Sums     Sums
	KV       KV    // null unless KV.Sampled; of all groups together
	Groups   []KV  // of each group, without what counts since the start; nil: there is one
	PerReq   []Req // nil: not collected
}

// Requests counts requests. Active, Queued and their limit are as of the row, the others sums.
type Requests struct {
	New, NewActive                        int64 // accepted; got their first slot
	Completed, Cancelled, Expired, Failed int64
	Suspended, Resumed                    int64 // preempted, and scheduled again
	Active, Queued, MaxActive             int64
}

// AddCounts adds the requests of another row that came and that ended.
func (q *Requests) AddCounts(of *Requests) {
	q.New += of.New
	q.NewActive += of.NewActive
	q.Completed += of.Completed
	q.Cancelled += of.Cancelled
	q.Expired += of.Expired
	q.Failed += of.Failed
}

// Memory is in bytes.
type Memory struct{ GPU, CPU, Pinned Int }

// Add adds the memory of another rank.
func (m *Memory) Add(of Memory) {
	m.GPU.add(of.GPU)
	m.CPU.add(of.CPU)
	m.Pinned.add(of.Pinned)
}

// Batch is what the batch of a row held, and what waited, when it was built.
type Batch struct {
	Scheduled, Context, Gen      Int
	Paused, PausedKVTokens       Int
	CtxTokens, CtxKVTokens       Int
	GenKVTokens                  Int
	QueuedCtx, QueuedCtxTokens   Int
	QueuedGen, QueuedGenKVTokens Int
	Micro                        Int
	DecodedPerIter               Ratio
}

// Sums are since the row before.
type Sums struct {
	Prompt, Cached, Context, Output int64 // tokens
	CachedDevice                    int64 // of Cached, found on the device
	CachedHost, CachedDisk          Int   // and loaded from these tiers
	ProbeBlocks                     int64 // new KV blocks that probes took: they are among those of KV, and in no record
}

// Add adds the sums of another row.
func (s *Sums) Add(of *Sums) {
	s.Prompt += of.Prompt
	s.Cached += of.Cached
	s.Context += of.Context
	s.Output += of.Output
	s.CachedDevice += of.CachedDevice
	s.CachedHost.add(of.CachedHost)
	s.CachedDisk.add(of.CachedDisk)
	s.ProbeBlocks += of.ProbeBlocks
}

// KV is the state of the block pool: counts, totals since the start, and the changes since the last row that had it.
type KV struct {
	Sampled                                      bool
	Max, Free, Used, Evictable                   int64 // Free counts evictable blocks too: Max = Free + Used
	PeakFree, PeakUsed, PeakEvictable            int64
	AllocTotal, AllocNew, Reused, Missed, Freed  int64
	DAllocTotal, DAllocNew, DReused, DMissed     int64
	DGenAlloc                                    int64
	HitRate, DHitRate                            Ratio
	DFullReused, DPartialReused                  int64
	SecondaryMax, SecondaryFree, SecondaryUsed   Int
	DiskMax, DiskUsed                            Int
	DiskLoaded, DiskStored                       Int // blocks copied from and to the disk
	DiskDropped, DiskBroken                      Int // given up for others, and found unreadable
	OnboardBlocks, OffloadBlocks, HostDropped    Int
	IntraCopyBlocks, IntraCopyBytes              Int // copied inside the device
	OnboardBytes, OffloadBytes, HostDroppedBytes Int
	SecondaryEvictable, SecondaryPeakFree        Int
	SecondaryPeakUsed, SecondaryPeakEvictable    Int
	Violations                                   int64 // rows so far whose blocks did not add up: Free (without Evictable) + Evictable + Used = Max, AllocNew - Freed = Used + Evictable
}

// Sum makes the state and the changes those of all groups together. Peaks of a sum are not known: those of one group are its own.
func (k *KV) Sum(groups []KV) {
	if len(groups) == 1 {
		one := groups[0]
		one.Sampled, one.Violations, one.HitRate = k.Sampled, k.Violations, k.HitRate
		one.AllocTotal, one.AllocNew, one.Reused, one.Missed, one.Freed = k.AllocTotal, k.AllocNew, k.Reused, k.Missed, k.Freed
		one.DiskMax, one.DiskUsed, one.DiskLoaded, one.DiskStored, one.DiskDropped, one.DiskBroken = k.DiskMax, k.DiskUsed, k.DiskLoaded, k.DiskStored, k.DiskDropped, k.DiskBroken
		*k = one
		return
	}
	k.Max, k.Free, k.Used, k.Evictable = 0, 0, 0, 0
	for i := range groups {
		g := &groups[i]
		k.Max += g.Max
		k.Free += g.Free
		k.Used += g.Used
		k.Evictable += g.Evictable
		k.DAllocTotal += g.DAllocTotal
		k.DAllocNew += g.DAllocNew
		k.DReused += g.DReused
		k.DMissed += g.DMissed
		k.DGenAlloc += g.DGenAlloc
		k.DFullReused += g.DFullReused
		k.DPartialReused += g.DPartialReused
		k.SecondaryMax.add(g.SecondaryMax)
		k.SecondaryFree.add(g.SecondaryFree)
		k.SecondaryUsed.add(g.SecondaryUsed)
		k.SecondaryEvictable.add(g.SecondaryEvictable)
		k.OnboardBlocks.add(g.OnboardBlocks)
		k.OnboardBytes.add(g.OnboardBytes)
		k.OffloadBlocks.add(g.OffloadBlocks)
		k.OffloadBytes.add(g.OffloadBytes)
		k.HostDropped.add(g.HostDropped)
		k.HostDroppedBytes.add(g.HostDroppedBytes)
		k.IntraCopyBlocks.add(g.IntraCopyBlocks)
		k.IntraCopyBytes.add(g.IntraCopyBytes)
	}
	k.DHitRate = RatioOf(k.DReused, k.DReused+k.DMissed)
}

// AddDisk adds the files of another group.
func (k *KV) AddDisk(of *KV) {
	k.DiskMax.add(of.DiskMax)
	k.DiskUsed.add(of.DiskUsed)
	k.DiskLoaded.add(of.DiskLoaded)
	k.DiskStored.add(of.DiskStored)
	k.DiskDropped.add(of.DiskDropped)
	k.DiskBroken.add(of.DiskBroken)
}

// Req is one request as of a row.
type Req struct {
	ID                                   int64
	Stage                                string
	Prefilled, Generated                 int64 // tokens of the prompt in KV; tokens given out
	DecodedPerIter                       Ratio
	Scheduled, Paused                    bool
	AllocTotal, AllocNew, Reused, Missed int64
	HitRate                              Ratio
}
