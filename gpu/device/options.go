// Package device opens what a node computes with: a model, the back end that --device names, and the engine on it. It
// owns the options of all three, their defaults and their refusal; kong reads their tags, this package does not parse
// command lines.
package device

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/bytesize"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// Options of a device, with the tags of the command line. The zero value is filled by the tags' defaults.
type Options struct {
	Model          string        `help:"Checkpoint folder in Hugging Face's form. Empty: the embedded model meridian-tiny." type:"path" placeholder:"DIR"`
	Device         string        `help:"What computes: cpu, sim (no arithmetic, a cost model of time) or cuda." enum:"cpu,sim,cuda" default:"cpu"`
	GPUs           []int         `help:"Numbers of the cards of --device cuda, such as 0,1: stages of --pp and ranks take them in turn." default:"0" name:"gpu"`
	Deterministic  bool          `help:"cuda computes in float32 with sums that do not depend on the batch: equal texts in every batch, at a fraction of the speed."`
	Threads        int           `help:"Goroutines of the cpu device, of each stage of each rank. 0: one a processor, shared by them." default:"0"`
	MaxNumTokens   int           `help:"Tokens of one step; longer prompts are cut into chunks. More: prefill is faster, decode of others waits longer." default:"2048"`
	MaxBatchSize   int           `help:"Sequences that run at the same time." default:"64"`
	MaxWaiting     int           `help:"Requests that may wait for a place; more are refused with 503." default:"1024"`
	TokensPerBlock int           `help:"Tokens of one KV block: the unit of reuse." default:"32"`
	KVBlocks       int           `help:"KV blocks. 0: as many as --kv-memory holds." default:"0" name:"kv-blocks"`
	KVMemory       bytesize.Size `help:"Memory for KV, such as 512MiB; at least one full context. 0: 128MiB, or two full contexts if that is more." default:"0" name:"kv-memory"`
	WeightType     string        `help:"cuda: type of the elements of the layers' matrices: bf16, or fp8 (E4M3 with a scale for each output): half the memory." enum:"bf16,fp8" default:"bf16"`
	KVType         string        `help:"cuda: type of the elements of KV: bf16, or fp8 (E4M3 with a scale for each head): twice the tokens in the same memory. Nodes that hand KV over must have the same." enum:"bf16,fp8" default:"bf16" name:"kv-type"`
	MemoryFraction float64       `help:"cuda: part of a card's memory, from 0 to 1, that this node may hold, shared equally by its ranks and stages there; KV gets what model and activations leave. 0: see --kv-memory." default:"0" name:"gpu-memory-fraction"`
	KernelCache    string        `help:"cuda: folder of compiled kernels. Empty: in the user's cache folder." type:"path" placeholder:"DIR"`
	KVHostMemory   bytesize.Size `help:"Memory of the host that keeps KV blocks which the device evicts, such as 4GiB; they are loaded again when a prompt needs them. 0: none." default:"0" name:"kv-host-memory"`
	KVDisk         DirSize       `help:"Folder that keeps KV blocks beyond the life of the node, and how much, such as /var/lib/meridian/kv 100GiB. One node a folder; its ranks share it, each with files of its own. What another model has left there is discarded." name:"kv-disk" type:"pair" placeholder:"DIR SIZE"`
	Ranks          int           `help:"Data-parallel ranks: each has a device of its own, its own KV and its own batch, of the sizes given here." default:"1"`
	RankProcesses  bool          `help:"Each rank but the first is a process of its own, which the node starts and ends: one that crashes or hangs is named."`
	Rank           int           `help:"This process is that rank of the node that started it." hidden:"" env:"-"`
	RankDeadline   time.Duration `help:"Time that the slowest rank may come later to an iteration than the first; then it counts as lost." default:"30s"`
	StepDeadline   time.Duration `help:"Time that a step, or a copy of KV, may take; then the device counts as hung, and the node ends. Where steps lately took more than a tenth of it, ten times that." default:"1m"`
	PP             int           `help:"Pipeline stages of each rank: each has a device that owns a part of the layers, and they work on different steps at the same time." default:"1" name:"pp"`
	Overlap        bool          `help:"Prepare the next step while the device runs one." default:"true" negatable:""`
	PrefixReuse    bool          `help:"Reuse the KV of prompts that begin alike." default:"true" negatable:""`
	Sim            Sim           `embed:"" prefix:"sim-"`

	ProfileStartStop string `help:"Iterations to profile, such as 10-20,30." placeholder:"RANGES"`
	ProfileDir       string `help:"Folder of profiles that name none. Empty: the working folder." type:"path" placeholder:"DIR"`

	ClockID  clock.ID            `kong:"-"` // of the clock that stamps
	Sink     rows.Sink           `kong:"-"` // where statistics of iterations go, and which
	KVEvents func(kvevent.Event) `kong:"-"` // told what the cache stores and drops; must not block; nil: nobody
	KVEpoch  int64               `kong:"-"` // of KVEvents
}

// Sim is the cost model of --device sim.
type Sim struct {
	Step            time.Duration `help:"Time of every step." default:"2ms"`
	PrefillToken    time.Duration `help:"Time of a prompt token in a step." default:"20us"`
	Decode          time.Duration `help:"Time of a sequence that decodes in a step." default:"100us"`
	KVToken         time.Duration `help:"Time of a token of KV that a step reads." default:"0s" name:"kv-token"`
	CopyByte        float64       `help:"Nanoseconds of a byte of KV copied in or out." default:"0"`
	Shallow         bool          `help:"Compute a token from its predecessor's KV alone: cheaper with long contexts, but lost KV goes mostly unseen."`
	FaultHangAt     int64         `help:"Test mode: the step of this number never ends." placeholder:"STEP"`
	FaultHangCopyAt int64         `help:"Test mode: the copy of KV of this number, out or in, never ends." placeholder:"COPY"`
}

// DirSize is a folder and the bytes that may be kept there, written as "DIR SIZE". The zero value is none.
type DirSize struct {
	Dir  string
	Size bytesize.Size
}

// UnmarshalText reads a folder and a size.
func (d *DirSize) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	at := strings.LastIndexAny(text, " \t")
	if at < 0 {
		return fmt.Errorf("%q: want a folder and a size, such as /var/lib/meridian/kv 100GiB", b)
	}
	if err := d.Size.UnmarshalText([]byte(text[at+1:])); err != nil {
		return err
	}
	if d.Size == 0 {
		return fmt.Errorf("%q: the size must be more than 0", b)
	}
	d.Dir = strings.TrimSpace(text[:at])
	return nil
}

// cards are the numbers of the cards, at least one.
func (o *Options) cards() []int {
	if len(o.GPUs) == 0 {
		return []int{0}
	}
	return o.GPUs
}

// rankCards are the cards of each rank, by their places among all in order: as WatchGPU reads them.
func (o *Options) rankCards() [][]int {
	cards := o.cards()
	order := slices.Compact(slices.Sorted(slices.Values(cards)))
	out := make([][]int, o.Ranks)
	for i := range o.Ranks * o.PP {
		if rank, card := i/o.PP, slices.Index(order, cards[i%len(cards)]); !slices.Contains(out[rank], card) {
			out[rank] = append(out[rank], card)
		}
	}
	return out
}

// fp8 is a value of --weight-type and --kv-type.
const fp8 = "fp8"

// part is one stage of one rank.
type part struct {
	stage backend.Stage
	card  int     // of --device cuda
	share float64 // of the card's memory that it may hold; 0: see room
}

// parts are the stages of a rank of a model of so many layers.
func (o *Options) parts(rank, layers int) []part {
	cards, devices := o.cards(), map[int]int{}
	for i := range o.Ranks * o.PP {
		devices[cards[i%len(cards)]]++
	}
	parts := make([]part, o.PP)
	for i := range parts {
		card := cards[(rank*o.PP+i)%len(cards)]
		parts[i] = part{backend.Stage{First: layers * i / o.PP, End: layers * (i + 1) / o.PP}, card, o.MemoryFraction / float64(devices[card])}
	}
	return parts
}

// ErrUnavailable is returned when an option asks for what this build does not have.
var ErrUnavailable = errors.New("not available in this build")

// Validate refuses what cannot be, naming option and value. It is called before anything is loaded.
func (o *Options) Validate() error {
	for _, f := range []struct {
		option             string
		value, least, most int
	}{
		{"--threads", o.Threads, 0, 1 << 12}, {"--max-num-tokens", o.MaxNumTokens, 1, 1 << 20}, {"--max-batch-size", o.MaxBatchSize, 1, 1 << 16},
		{"--max-waiting", o.MaxWaiting, 1, 1 << 24}, {"--tokens-per-block", o.TokensPerBlock, 1, 1 << 16}, {"--kv-blocks", o.KVBlocks, 0, math.MaxInt32},
		{"--ranks", o.Ranks, 1, ranks.Max}, {"--pp", o.PP, 1, infer.MaxStages},
	} {
		if f.value < f.least {
			return fmt.Errorf("%s %d: must be at least %d", f.option, f.value, f.least)
		}
		if f.value > f.most {
			return fmt.Errorf("%s %d: must be at most %d", f.option, f.value, f.most)
		}
	}
	if _, err := profile.ParseRanges(o.ProfileStartStop); err != nil {
		return fmt.Errorf("--profile-start-stop: %w", err)
	}
	switch {
	case o.MaxNumTokens < o.MaxBatchSize:
		return fmt.Errorf("--max-num-tokens %d: must be at least --max-batch-size, %d", o.MaxNumTokens, o.MaxBatchSize)
	case o.KVBlocks > 0 && o.KVMemory > 0:
		return fmt.Errorf("--kv-blocks %d and --kv-memory %d: give one of them", o.KVBlocks, o.KVMemory)
	case !(o.MemoryFraction >= 0 && o.MemoryFraction <= 1):
		return fmt.Errorf("--gpu-memory-fraction %g: must be from 0 to 1", o.MemoryFraction)
	case o.MemoryFraction > 0 && o.Device != "cuda":
		return fmt.Errorf("--gpu-memory-fraction %g: is for --device cuda, not %s", o.MemoryFraction, o.Device)
	case o.MemoryFraction > 0 && (o.KVBlocks > 0 || o.KVMemory > 0):
		return fmt.Errorf("--gpu-memory-fraction %g, --kv-blocks %d and --kv-memory %d: give one of them", o.MemoryFraction, o.KVBlocks, o.KVMemory)
	case o.Device == "cuda" && !cudaBuilt:
		return fmt.Errorf("--device cuda: %w", ErrUnavailable)
	case o.StepDeadline < 0:
		return fmt.Errorf("--step-deadline %s: must not be negative", o.StepDeadline)
	case o.RankDeadline < 0:
		return fmt.Errorf("--rank-deadline %s: must not be negative", o.RankDeadline)
	case (o.WeightType == fp8 || o.KVType == fp8) && (o.Device != "cuda" || o.Deterministic):
		return fmt.Errorf("--weight-type %s, --kv-type %s: fp8 is for --device cuda without --deterministic", o.WeightType, o.KVType)
	case o.Rank < 0 || o.Rank > 0 && o.Rank >= o.Ranks:
		return fmt.Errorf("--rank %d: must be less than --ranks %d", o.Rank, o.Ranks)
	case slices.Min(o.cards()) < 0:
		return fmt.Errorf("--gpu %d: must not be negative", slices.Min(o.cards()))
	case len(o.cards()) > o.Ranks*o.PP:
		return fmt.Errorf("--gpu names %d cards: --ranks %d and --pp %d use %d of them", len(o.cards()), o.Ranks, o.PP, o.Ranks*o.PP)
	case o.Device != "cuda" && !slices.Equal(o.cards(), []int{0}):
		return fmt.Errorf("--gpu %v: is for --device cuda", o.GPUs)
	case o.KVHostMemory > 0 && !o.PrefixReuse:
		return fmt.Errorf("--kv-host-memory %d keeps blocks for reuse, which --no-prefix-reuse forbids: give one of them", o.KVHostMemory)
	case o.KVDisk.Dir != "" && !o.PrefixReuse:
		return fmt.Errorf("--kv-disk %q keeps blocks for reuse, which --no-prefix-reuse forbids: give one of them", o.KVDisk.Dir)
	case o.Sim.Step < 0 || o.Sim.PrefillToken < 0 || o.Sim.Decode < 0 || o.Sim.KVToken < 0 || o.Sim.CopyByte < 0:
		return fmt.Errorf("--sim-*: a time must not be negative: %+v", o.Sim)
	}
	return nil
}

// Kinds of errors of an engine, in words that a face can map to its own.
const (
	Busy      = "busy"      // the queue is full
	Draining  = "draining"  // takes nothing new
	Stopped   = "stopped"   // the engine has ended
	TooLong   = "too_long"  // does not fit into context or KV
	Invalid   = "invalid"   // makes no sense
	Cancelled = "cancelled" // by its caller
	Deadline  = "deadline"  // its time is over
	NoToken   = "no_token"  // nothing could be sampled
)

// Kind gives the kind of an engine's error, "" if it is another's.
func Kind(err error) string {
	for _, k := range []struct {
		err  error
		kind string
	}{
		{engine.ErrStopped, Stopped}, // before the others: it wraps why
		{engine.ErrQueueFull, Busy}, {engine.ErrDraining, Draining}, {engine.ErrTooLong, TooLong}, {engine.ErrInvalid, Invalid},
		{engine.ErrDeadline, Deadline}, {engine.ErrCancelled, Cancelled}, {engine.ErrNoToken, NoToken},
	} {
		if errors.Is(err, k.err) {
			return k.kind
		}
	}
	return ""
}
