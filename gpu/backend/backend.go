// Package backend is the contract between the one executor (gpu/engine) and the devices that run its steps: gpu/cpu,
// gpu/sim, gpu/cuda. It owns the words of a step, and what all of them do alike: the queues in front of a device (Inbox)
// and the turns of its events (EventSets). It starts nothing that runs. gpu/backendtest holds the conformance suite that
// every back end passes.
package backend

import "meridian.internal/shared/infer"

// Backend runs steps on one device, in the order in which they were submitted. All methods are safe for concurrent use,
// but only the executor's goroutine submits.
type Backend interface {
	// Info describes the device and the model on it; it never changes.
	Info() Info
	// Submit queues a step and returns at once, before the device has run it; it never blocks on the device. The back
	// end may read the batch until the step is done; the caller must not change it before.
	Submit(b *Batch) *Step
	// CopyOut queues a copy of KV regions into dst, in their order, in the canonical layout (see Region). It runs beside
	// compute, in a queue of its own; the caller makes sure that the regions are written (LayerDone, Step.Done).
	CopyOut(regions []Region, dst []byte) *Copy
	// CopyIn queues a copy of src into KV regions. A step submitted after Copy.Done sees it.
	CopyIn(regions []Region, src []byte) *Copy
	// Close waits for the queued work, then frees the device.
	Close() error
}

// Info describes a back end: what a KV hand-over handshake must compare and what a scheduler must know.
type Info struct {
	Device         string // "cpu", "sim", "cuda"
	ModelHash      string
	Vocab          int
	ContextLen     int // tokens
	Layers         int // of the whole model
	Stage          Stage
	Hidden         int
	KVHeads        int
	HeadSize       int
	KVType         string // element type of KV: "f32", "f16", "bf16", "f8e4m3"
	RoPE           string // canonical description; equal strings mean equal rotations
	TokensPerBlock int
	KVBlocks       int      // of the layers that see everything; without such layers blocks of no bytes, by which prefixes are known
	Windows        []Window // the other layers; nil: there are none, or the device keeps their KV like that of all
	MaxSlots       int
	Stages         int    // that run different steps at the same time; 0: one
	Numerics       string // equal ids promise equal bits for equal inputs
	DeviceClock    string // clock of Stamps: "mono" (the process's steady clock) or "gpu"
}

// Stage is the range of layers that this back end owns: [First, End) of Info.Layers. A stage that does not begin at
// layer 0 takes hidden states in; one that does not end at the last layer gives hidden states out and samples nothing.
type Stage struct{ First, End int }

// KVBytes is the size in bytes of one token's KV over layers [from, to) in the canonical layout.
func (i Info) KVBytes(from, to int) int {
	return (to - from) * 2 * i.KVHeads * i.HeadSize * ElementSize(i.KVType)
}

// ElementSize is the size in bytes of a KV element type, 0 for an unknown one.
func ElementSize(kvType string) int {
	switch kvType {
	case "f32":
		return 4
	case "f16", "bf16":
		return 2
	case "f8e4m3":
		return 1
	}
	return 0
}

// Batch is one step.
type Batch struct {
	Iter    int64       // the engine's iteration number, stamped when the batch was built
	Assign  []Assign    // slots that begin a sequence; applied first
	Copies  []BlockCopy // block copies inside the device (fork, copy on write); applied before the forward
	Entries []Entry
	Hidden  Hidden // of all rows of all entries: input of a stage that does not begin at layer 0
	// LayerDone, if set, is called from the device's goroutine when KV of all entries is written for layers < end. It is
	// called at least once with end = Stage.End, in rising order, before Step.Done. It must not block.
	LayerDone func(end int)
}

// Assign starts a sequence in a slot and forgets what the slot held.
type Assign struct {
	Slot     int
	Sampling infer.Sampling
	// History holds all tokens of the sequence so far, prompt first; PromptLen of them are the prompt. Both are set only
	// when Sampling.Penalized; tokens sampled later are added by the back end itself.
	History   []int32
	PromptLen int
}

// BlockCopy copies one whole KV block of a group of layers (Info.Group).
type BlockCopy struct {
	From, To int32
	Group    int
}

// Entry is one sequence's part of a step.
type Entry struct {
	Slot int
	// Tokens are the q >= 1 query tokens. Nil means q = 1 and the token is the last one that an earlier submitted step
	// sampled for this slot: the executor need not have seen it.
	Tokens []int32
	KVLen  int     // tokens in KV before the step; the position of the first query token
	Blocks []int32 // block table, covers positions [0, KVLen+q)
	// Windows are the block tables of Info.Windows. Only what the queries see is read: blocks before it may have been given back.
	Windows [][]int32
	// Logits are the query indices, rising, whose logits are wanted; each is sampled once. Empty: none (a chunk that is not
	// the last). The token sampled at query index j has position KVLen+j+1, which feeds the sampling noise.
	Logits []int
	// Mask, if set, allows token t only if bit t%32 of Mask[t/32] is set; it holds for every sampled position of the entry.
	Mask []uint32
}

// Queries is the number of query tokens of the entry.
func (e *Entry) Queries() int {
	if e.Tokens == nil {
		return 1
	}
	return len(e.Tokens)
}

// Step is a submitted batch. The back end fills the results and then closes the channel; only then may the caller read
// anything but Iter.
type Step struct {
	Iter    int64
	Outputs []Output // one per entry, in the order of the batch
	Hidden  Hidden   // output of a stage that does not end at the last layer; who takes it gives it back
	Stamps  Stamps
	Stages  []Stamps // of each stage of a pipeline; nil: there is one
	Err     error    // the device failed; outputs are not valid
	done    chan struct{}
}

// NewStep is for back ends: a step that is not done yet.
func NewStep(iter int64) *Step { return &Step{Iter: iter, done: make(chan struct{})} }

// Done is closed when the step has run and its results may be read.
func (s *Step) Done() <-chan struct{} { return s.done }

// Finish is for back ends: publishes the results. It must be called exactly once.
func (s *Step) Finish() { close(s.done) }

// Output is the result of one entry: one token per wanted position.
type Output struct {
	Tokens   []int32
	Logprobs []Logprobs // as long as Tokens when the slot's sampling asks for logprobs, else nil
}

// Logprobs belongs to one sampled token.
type Logprobs struct {
	Logprob float32         // of the sampled token
	Top     []infer.Logprob // most likely first
}

// Stamps are the three event stamps of a step, measured on the device's own timeline, in ns of Info.DeviceClock. The
// forward segment ends where logits are complete; the sample segment goes from there to tokens.
type Stamps struct{ ForwardStartNS, ForwardEndNS, SampleEndNS int64 }

// Region is a part of one KV block of the group of its layers, which must all be of one: layers [LayerFrom, LayerTo), heads [HeadFrom, HeadTo), tokens [TokenFrom, TokenTo)
// counted inside the block. Its canonical layout is, outermost first: layer, K then V, token, head, head size, elements
// of Info.KVType in little endian.
type Region struct {
	Block              int32
	LayerFrom, LayerTo int
	HeadFrom, HeadTo   int
	TokenFrom, TokenTo int
}

// Copy is a queued KV copy.
type Copy struct {
	Err            error // read only after Done
	StartNS, EndNS int64 // steady clock
	done           chan struct{}
}

// NewCopy is for back ends: a copy that is not done yet.
func NewCopy() *Copy { return &Copy{done: make(chan struct{})} }

// Done is closed when the copy has ended.
func (c *Copy) Done() <-chan struct{} { return c.done }

// Finish is for back ends: publishes the end of the copy. It must be called exactly once.
func (c *Copy) Finish() { close(c.done) }
