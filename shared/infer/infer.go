// Package infer is the vocabulary of one inference request: what a node's HTTP face asks of an engine and what the
// engine answers. It holds plain data only: no engine, no HTTP, no clock, no goroutine. It is one of the pure packages
// that module gpu may import, so that the engine and the faces share one set of words.
package infer

// Kind says which part of a request an engine runs.
type Kind int

const (
	// Aggregated runs prefill and decode on one engine.
	Aggregated Kind = iota
	// ContextOnly runs prefill, samples the first token and leaves the KV leased for a transfer.
	ContextOnly
	// GenerationOnly receives the KV of the prompt and the first token from another node and decodes.
	GenerationOnly
)

// String gives the name that TensorRT-LLM uses in disaggregated_params.request_type.
func (k Kind) String() string {
	switch k {
	case ContextOnly:
		return "context_only"
	case GenerationOnly:
		return "generation_only"
	default:
		return "context_and_generation"
	}
}

// Sampling says how a token is chosen from logits. The zero value is greedy decoding. The noise of a draw is a pure
// function of (Seed, position of the sampled token in the sequence), so the same request gives the same text whatever
// else is in the batch and on whichever node it resumes.
type Sampling struct {
	Temperature       float32 // 0 is greedy
	TopK              int     // 0 is off
	TopP              float32 // 0 or 1 is off
	MinP              float32 // 0 is off
	RepetitionPenalty float32 // 0 or 1 is off; over prompt and output tokens
	PresencePenalty   float32 // over output tokens
	FrequencyPenalty  float32 // over output tokens
	Seed              uint64
	Logprobs          bool // return the logprob of each sampled token
	TopLogprobs       int  // and of this many most likely tokens
	LogitBias         map[int32]float32
}

// Penalized tells whether the choice depends on the tokens so far.
func (s Sampling) Penalized() bool {
	return (s.RepetitionPenalty != 0 && s.RepetitionPenalty != 1) || s.PresencePenalty != 0 || s.FrequencyPenalty != 0
}

// Request is one sequence for an engine.
type Request struct {
	ID                int64 // disagg_request_id, or an id that the node minted; unique among the running requests of an engine
	Kind              Kind
	Prompt            []int32 // at least one token
	Output            []int32 // tokens that an earlier attempt already gave to the client; sampling resumes after them
	MaxTokens         int     // output tokens in all, Output included; at least 1
	Sampling          Sampling
	StopTokens        []int32 // end the sequence like EOS, also with IgnoreEOS
	IgnoreEOS         bool
	Priority          int   // higher is scheduled first; 0 is normal
	Pin               bool  // its KV stays cached before that of requests without
	DeadlineNS        int64 // steady clock of the node; 0: none. A request past it is ended with ErrDeadline
	ReturnPerfMetrics bool  // collect step records
	Probe             bool  // a health check or warm-up: in no count of requests and tokens
}

// Logprob is one token and the logarithm of its probability.
type Logprob struct {
	Token   int32
	Logprob float32
}

// Token is one sampled token.
type Token struct {
	ID      int32
	AtNS    int64     // steady clock, when the engine had the token on the host
	Logprob float32   // valid when Sampling.Logprobs
	Top     []Logprob // Sampling.TopLogprobs entries, most likely first
}

// FinishReason says why a sequence ended.
type FinishReason string

// The reasons of OpenAI's API plus those that only records show.
const (
	FinishStop      FinishReason = "stop"      // EOS or a stop token
	FinishLength    FinishReason = "length"    // MaxTokens, or the context is full; for ContextOnly: go on with generation
	FinishCancelled FinishReason = "cancelled" // the caller cancelled
	FinishExpired   FinishReason = "expired"   // DeadlineNS passed
	FinishFailed    FinishReason = "failed"    // the engine or the device failed; Done.Err says how
)

// Done ends a sequence.
type Done struct {
	Reason    FinishReason
	StopToken *int32 // the EOS or stop token that ended it, nil if none did
	Err       error  // set when Reason is failed, expired or cancelled
	Report    Report
}

// Report is what a sequence cost, with stamps of the node's steady clock in ns. A stamp of 0 means that the point was
// not reached; records turn that into an absent field.
type Report struct {
	QueuedNS         int64 // the engine accepted the request
	FirstScheduledNS int64 // first batch that held it was built
	FirstTokenNS     int64
	LastTokenNS      int64
	FinishedNS       int64
	PreemptedNS      int64 // time spent preempted, in all
	Preemptions      int
	FirstIter        int64 // engine iteration of the first and last batch that held it
	LastIter         int64
	Rank             *int // data-parallel rank that ran it; nil: there is one
	PromptTokens     int
	CachedTokens     int // prompt tokens whose KV was reused here, not computed
	OutputTokens     int // sampled here, Request.Output not counted
	KV               KVCounts
	EnergyJ          *float64     // share of the device's energy, by tokens; nil: it cannot be measured
	Chunks           []Chunk      // prefill chunks, in order; always collected
	Steps            *StepRecords // nil unless ReturnPerfMetrics
}

// KVCounts counts KV blocks of one request.
type KVCounts struct {
	AllocTotalBlocks int `json:"alloc_total_blocks"`
	AllocNewBlocks   int `json:"alloc_new_blocks"`
	ReusedBlocks     int `json:"reused_blocks"` // full plus partial
	PartialBlocks    int `json:"partial_blocks"`
	HostBlocks       int `json:"host_blocks,omitempty"` // reused ones that were loaded from host memory
	DiskBlocks       int `json:"disk_blocks,omitempty"` // and from disk
	MissedBlocks     int `json:"missed_blocks"`
}

// Chunk is one prefill chunk of a request: which step ran it and when, on the device's timeline.
type Chunk struct {
	Iter           int64 `json:"iter"`
	Tokens         int   `json:"tokens"`
	KVTokens       int   `json:"kv_tokens"` // tokens already in KV before the chunk
	BatchSize      int   `json:"batch_size"`
	ForwardStartNS int64 `json:"forward_start_ns"`
	ForwardEndNS   int64 `json:"forward_end_ns"`
	SampleEndNS    int64 `json:"sample_end_ns"`
	// StageNS are the cuts between the stages of a pipeline; see StepRow.
	StageNS []int64 `json:"stage_ns,omitempty"`
}

// Span is a part of a request's KV: layers [LayerFrom, LayerTo) of tokens [TokenFrom, TokenTo).
type Span struct {
	LayerFrom, LayerTo int
	TokenFrom, TokenTo int
}

// Load is an engine's load at one moment, safe to read from any goroutine.
type Load struct {
	Running       int   `json:"running"`        // sequences that hold a slot
	Waiting       int   `json:"waiting"`        // queued sequences
	WaitingTokens int   `json:"waiting_tokens"` // prompt tokens not yet prefilled of queued and running sequences
	KVUsedBlocks  int   `json:"kv_used_blocks"` // held by requests, transfers included; reusable cached blocks are not counted
	KVMaxBlocks   int   `json:"kv_max_blocks"`
	Iter          int64 `json:"iter"`
}
