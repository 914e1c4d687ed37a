// Package device opens what a node computes with: a model, the back end that --device names, and the engine on it. It
// owns the options of all three, their defaults and their refusal; kong reads their tags, this package does not parse
// command lines.
package device

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// Options of a device, with the tags of the command line. The zero value is filled by the tags' defaults.
type Options struct {
	Model          string        `help:"Checkpoint folder in Hugging Face's form. Empty: the embedded model meridian-tiny." type:"path" placeholder:"DIR"`
	Device         string        `help:"What computes: cpu, sim (no arithmetic, a cost model of time) or cuda." enum:"cpu,sim,cuda" default:"cpu"`
	GPU            int           `help:"Number of the card of --device cuda." default:"0" name:"gpu"`
	Deterministic  bool          `help:"cuda computes in float32 with sums that do not depend on the batch: equal texts in every batch, at a fraction of the speed."`
	Threads        int           `help:"Goroutines of the cpu device, of each stage of each rank. 0: one a processor, shared by them." default:"0"`
	MaxNumTokens   int           `help:"Tokens of one step; longer prompts are cut into chunks. More: prefill is faster, decode of others waits longer." default:"2048"`
	MaxBatchSize   int           `help:"Sequences that run at the same time." default:"64"`
	MaxWaiting     int           `help:"Requests that may wait for a place; more are refused with 503." default:"1024"`
	TokensPerBlock int           `help:"Tokens of one KV block: the unit of reuse." default:"32"`
	KVBlocks       int           `help:"KV blocks. 0: as many as --kv-memory holds." default:"0" name:"kv-blocks"`
	KVMemory       Size          `help:"Memory for KV, such as 512MiB; at least one full context. 0: 128MiB, or two full contexts if that is more." default:"0" name:"kv-memory"`
	MemoryFraction float64       `help:"cuda: part of the card's memory, from 0 to 1, that this node may hold; KV gets what model and activations leave. 0: see --kv-memory." default:"0" name:"gpu-memory-fraction"`
	KernelCache    string        `help:"cuda: folder of compiled kernels. Empty: in the user's cache folder." type:"path" placeholder:"DIR"`
	KVHostMemory   Size          `help:"Memory of the host that keeps KV blocks which the device evicts, such as 4GiB; they are loaded again when a prompt needs them. 0: none." default:"0" name:"kv-host-memory"`
	KVDisk         DirSize       `help:"Folder that keeps KV blocks beyond the life of the node, and how much, such as /var/lib/meridian/kv 100GiB. One node a folder. What another model has left there is discarded." name:"kv-disk" type:"pair" placeholder:"DIR SIZE"`
	Ranks          int           `help:"Data-parallel ranks: each has a device of its own, its own KV and its own batch, of the sizes given here. cpu and sim." default:"1"`
	RankDeadline   time.Duration `help:"Time that the slowest rank may come later to an iteration than the first; then it counts as lost." default:"30s"`
	PP             int           `help:"Pipeline stages of each rank: each has a device that owns a part of the layers, and they work on different steps at the same time. cpu and sim." default:"1" name:"pp"`
	Overlap        bool          `help:"Prepare the next step while the device runs one." default:"true" negatable:""`
	PrefixReuse    bool          `help:"Reuse the KV of prompts that begin alike." default:"true" negatable:""`
	Sim            Sim           `embed:"" prefix:"sim-"`

	ProfileStartStop string `help:"Iterations to profile, such as 10-20,30." placeholder:"RANGES"`
	ProfileDir       string `help:"Folder of profiles that name none. Empty: the working folder." type:"path" placeholder:"DIR"`

	Sink     rows.Sink           `kong:"-"` // where statistics of iterations go, and which
	KVEvents func(kvevent.Event) `kong:"-"` // told what the cache stores and drops; must not block; nil: nobody
	KVEpoch  int64               `kong:"-"` // of KVEvents
}

// Sim is the cost model of --device sim.
type Sim struct {
	Step         time.Duration `help:"Time of every step." default:"2ms"`
	PrefillToken time.Duration `help:"Time of a prompt token in a step." default:"20us"`
	Decode       time.Duration `help:"Time of a sequence that decodes in a step." default:"100us"`
	KVToken      time.Duration `help:"Time of a token of KV that a step reads." default:"0s" name:"kv-token"`
	CopyByte     float64       `help:"Nanoseconds of a byte of KV copied in or out." default:"0"`
	Shallow      bool          `help:"Compute a token from its predecessor's KV alone: cheaper with long contexts, but lost KV goes mostly unseen."`
}

// Size is a number of bytes, written as 1048576, 1024KiB, 1MiB or 1GiB.
type Size int64

// UnmarshalText reads a size.
func (s *Size) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	shift := 0
	for _, u := range []struct {
		suffix string
		shift  int
	}{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}} {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			text, shift = strings.TrimSpace(rest), u.shift
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > 1<<62>>shift {
		return fmt.Errorf("size %q: want a number of bytes, or one with KiB, MiB, GiB or TiB", b)
	}
	*s = Size(n << shift)
	return nil
}

// DirSize is a folder and the bytes that may be kept there, written as "DIR SIZE". The zero value is none.
type DirSize struct {
	Dir  string
	Size Size
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

// ErrUnavailable is returned when an option asks for what this build does not have.
var ErrUnavailable = errors.New("not available in this build")

// Validate refuses what cannot be, naming option and value. It is called before anything is loaded.
func (o *Options) Validate() error {
	for _, f := range []struct {
		option     string
		value, min int
	}{
		{"--threads", o.Threads, 0}, {"--max-num-tokens", o.MaxNumTokens, 1}, {"--max-batch-size", o.MaxBatchSize, 1},
		{"--max-waiting", o.MaxWaiting, 1}, {"--tokens-per-block", o.TokensPerBlock, 1}, {"--kv-blocks", o.KVBlocks, 0},
		{"--ranks", o.Ranks, 1}, {"--pp", o.PP, 1},
	} {
		if f.value < f.min {
			return fmt.Errorf("%s %d: must be at least %d", f.option, f.value, f.min)
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
	case o.Ranks > ranks.Max:
		return fmt.Errorf("--ranks %d: must be at most %d", o.Ranks, ranks.Max)
	case o.Ranks > 1 && o.Device == "cuda":
		return fmt.Errorf("--ranks %d with --device cuda: %w; 1 is", o.Ranks, ErrUnavailable)
	case o.Ranks > 1 && o.KVDisk != (DirSize{}):
		return fmt.Errorf("--ranks %d with --kv-disk %s: %w; one node a folder", o.Ranks, o.KVDisk.Dir, ErrUnavailable)
	case o.RankDeadline < 0:
		return fmt.Errorf("--rank-deadline %s: must not be negative", o.RankDeadline)
	case o.PP > 1 && o.Device == "cuda":
		return fmt.Errorf("--pp %d with --device cuda: %w; 1 is", o.PP, ErrUnavailable)
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
