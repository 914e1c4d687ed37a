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
	ClockID        string // of Row.StartNS
	Mode           string // schedulerMode: "overlap" or "non_overlap"
	MaxBatchSize   int64
	MaxNumTokens   int64
	TokensPerBlock int64
	BlockBytes     int64  // of one KV block
	Window         int64  // tokens of context: the one window size
	Tier           string // where KV is: "gpu" or "host"
	HostTier       string // "host" where evicted KV is kept there; empty: nowhere
	DiskTier       string // "disk" likewise
	Rank           int64
}

// Row is one sampled iteration. Counts that are sums cover everything since the row before, so that their totals do not
// depend on how many iterations are sampled.
type Row struct {
	Seq     int64 // set by the ring; the first is 1
	Iter    int64 // the step that the row is of, numbered when its batch was built
	Drain   bool  // no iteration: the engine went idle with something to tell
	Covers  int64 // iterations since the row before, this one included
	StartNS int64 // steady clock, when the batch was built
	WallNS  int64 // the same moment, Unix time

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
	KV       KV    // null unless KV.Sampled
	PerReq   []Req // nil: not collected
}

// Requests counts requests. Active, Queued and their limit are as of the row, the others sums.
type Requests struct {
	New, NewActive                        int64 // accepted; got their first slot
	Completed, Cancelled, Expired, Failed int64
	Suspended, Resumed                    int64 // preempted, and scheduled again
	Active, Queued, MaxActive             int64
}

// Memory is in bytes.
type Memory struct{ GPU, CPU, Pinned Int }

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
