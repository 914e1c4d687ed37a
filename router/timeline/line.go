// Package timeline merges the phase records of one request into one line: every stamp in one clock, spans that tile what
// the client waited for, and what does not add up, with both numbers. It is pure: no clock, no file, no bus.
//
// One function converts stamps (Clocks.place). Nothing is clamped: a negative span is reported as it is and counted.
package timeline

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// Schema is the version of Line. Changes are additive.
const Schema = "meridian.timeline/1"

// Line is one request. All times but raw stamps are ns after StartNS, which is a stamp of the clock Reference. A pointer
// is nil where the value could not be known.
type Line struct {
	Schema          string         `json:"schema"`
	RequestID       string         `json:"request_id"`
	ClientRequestID string         `json:"client_request_id"`
	Amends          bool           `json:"amends,omitempty"` // replaces the line of this request that was written before
	Router          string         `json:"router"`
	Model           string         `json:"model"`
	Style           string         `json:"style"`
	Traceparent     string         `json:"traceparent,omitempty"`
	DisaggRequestID int64          `json:"disagg_request_id,string,omitempty"` // of the first phase
	Reference       clock.ID       `json:"reference"`
	StartNS         int64          `json:"start_ns"`
	WallNS          int64          `json:"wall_ns,omitempty"` // UTC of StartNS, from the router's wall clock; absent: not known
	Outcome         phase.Outcome  `json:"outcome"`
	FinishReason    string         `json:"finish_reason,omitempty"`
	Error           *phase.Error   `json:"error,omitempty"`
	Complete        bool           `json:"complete"`
	Missing         []string       `json:"missing,omitempty"` // "ctx ctx0 sub 0 attempt 0"
	Streamed        bool           `json:"streamed"`
	TTFTNS          *int64         `json:"ttft_ns"`
	E2ENS           *int64         `json:"e2e_ns"`
	UnaccountedNS   *int64         `json:"unaccounted_ns"` // e2e minus the sum of the spans, with its sign
	MaxBoundNS      *int64         `json:"max_bound_ns"`   // largest bound of a span
	NegativeSpans   int            `json:"negative_spans"`
	Violations      []Violation    `json:"violations"`
	Tokens          phase.Tokens   `json:"tokens"`
	Handover        *Handover      `json:"handover,omitempty"`
	Decode          *Decode        `json:"decode,omitempty"`
	CriticalSpan    string         `json:"critical_span,omitempty"` // that took most of the time to the first token
	Spans           []Span         `json:"spans"`
	Attempts        []Attempt      `json:"attempts"`
	Resumes         []phase.Resume `json:"resumes,omitempty"` // times as those of the line
	Phases          []Phase        `json:"phases"`

	Decision *phase.Decision `json:"decision,omitempty"`
}

// Span is a part of the time that the client waited. The spans of a line are its critical path: each ends in the event that
// let the next begin. What ran beside it, such as KV that travelled while prefill ran, is in Handover and in the phases.
type Span struct {
	Name    string `json:"name"`
	Node    string `json:"node"` // where the work was; "a>b" on the way between two
	StartNS int64  `json:"start_ns"`
	DurNS   int64  `json:"dur_ns"`
	BoundNS int64  `json:"bound_ns,omitempty"` // how far DurNS may be from the truth; absent: one clock, exact
}

// Handover is the KV transfer of the request, as the receiver saw it. Its work overlaps prefill, so it is no span; only
// what was left after prefill is (kv_handover).
type Handover struct {
	Bytes      int64  `json:"bytes"`
	Frames     int64  `json:"frames"`
	Tokens     int    `json:"tokens"`
	TokensHeld int    `json:"tokens_held"`
	DurNS      *int64 `json:"dur_ns"`     // first byte to last region installed
	HiddenNS   *int64 `json:"hidden_ns"`  // part of it before the first token was sampled
	VisibleNS  *int64 `json:"visible_ns"` // part of it after
	WireNS     int64  `json:"wire_ns"`
	InstallNS  int64  `json:"install_ns"`
	OpenNS     *int64 `json:"open_ns,omitempty"`     // gen node: the stream to the context node opened
	AllocateNS *int64 `json:"allocate_ns,omitempty"` // gen node: slot and blocks reserved
	NotifyNS   *int64 `json:"notify_ns,omitempty"`   // from the gen node's asking to the context node's hearing it
}

// Decode splits the time from the node's first token to its last by the steps that it kept.
type Decode struct {
	Steps       int   `json:"steps"`
	ComputeNS   int64 `json:"compute_ns"`             // forward passes
	SampleNS    int64 `json:"sample_ns"`              // from the end of a forward pass to its tokens
	WaitNS      int64 `json:"wait_ns"`                // the rest: for the batch, for the device, for the host
	PreemptedNS int64 `json:"preempted_ns,omitempty"` // of WaitNS, put back in the queue
}

// Attempt is one leg that reached a node, or was sent to one and never reported.
type Attempt struct {
	Role    phase.Role    `json:"role"`
	Node    string        `json:"node"`
	Sub     int           `json:"sub"`
	Attempt int           `json:"attempt"`
	Outcome phase.Outcome `json:"outcome"`
	Error   *phase.Error  `json:"error,omitempty"`
	Given   int           `json:"given,omitempty"` // output tokens of earlier attempts: it went on after them
	// ReleasedNS is when the context node acknowledged that it freed KV that nobody had claimed.
	ReleasedNS *int64 `json:"released_ns,omitempty"`
}

// Phase is one record as it entered the merge.
type Phase struct {
	Role         phase.Role      `json:"role"`
	Node         string          `json:"node"`
	Sub          int             `json:"sub"`
	Attempt      int             `json:"attempt"`
	Disagg       int64           `json:"disagg_request_id,string,omitempty"`
	Clock        PhaseClock      `json:"clock"`
	Rank         *RankClock      `json:"rank_clock,omitempty"` // nil: the engine stamps with Clock too
	Stamps       []Stamp         `json:"stamps_ns"`
	Tokens       phase.Tokens    `json:"tokens"`
	KV           *infer.KVCounts `json:"kv,omitempty"`
	Transfer     []Stamp         `json:"transfer,omitempty"`
	Peer         string          `json:"peer,omitempty"`
	Bytes        int64           `json:"bytes,omitempty"`
	Fetched      int             `json:"fetched_tokens,omitempty"` // whose KV an aggregated leg got from Peer
	Chunks       *Columns        `json:"chunks,omitempty"`
	Steps        *Columns        `json:"steps,omitempty"`
	StepMessages int             `json:"step_messages,omitempty"` // announced by the record, and not here
	Truncated    int64           `json:"truncated,omitempty"`     // steps that the node did not keep, or that its estimate does not reach
	Iters        *phase.Iters    `json:"iters,omitempty"`
	DPRank       *int            `json:"dp_rank,omitempty"`
	Preemptions  int             `json:"preemptions,omitempty"`
	PreemptedNS  int64           `json:"preempted_ns,omitempty"`
	PushedNS     *int64          `json:"pushed_offset_ns,omitempty"`
	EnergyJ      *float64        `json:"energy_j,omitempty"`
}

// PhaseClock is the clock of a phase and how it was converted: converted = raw + offset + skew·(raw − at) − start.
type PhaseClock struct {
	ID       clock.ID `json:"id"`
	State    string   `json:"state"`     // of the estimate; "none": not aligned
	OffsetNS *int64   `json:"offset_ns"` // at AtNS
	SkewPPB  int64    `json:"skew_ppb"`
	AtNS     int64    `json:"at_ns"`    // 0 where skew is: then it says nothing
	BoundNS  *int64   `json:"bound_ns"` // largest over the stamps of the phase
	Via      string   `json:"via,omitempty"`
}

// Stamp is one stamp, raw and converted.
type Stamp struct {
	Name string
	Raw  int64
	Ref  *int64 // ns after the line's start; nil: not aligned
}

// Violation is an event that lies before its cause by more than the bounds allow.
type Violation struct {
	Cause    string `json:"cause"` // "router0.ctx_dispatch_ns"
	Event    string `json:"event"` // "ctx0.receive_ns"
	CauseNS  int64  `json:"cause_ns"`
	EventNS  int64  `json:"event_ns"`
	BoundNS  int64  `json:"bound_ns"`
	ExcessNS int64  `json:"excess_ns"` // how far beyond the bound
}

// At returns the converted stamp of a name, those of the transfer under "transfer.": ns after the line's start. Not ok: it
// is absent or not aligned.
func (p *Phase) At(name string) (int64, bool) {
	list := p.Stamps
	if n := len("transfer."); len(name) > n && name[:n] == "transfer." {
		list, name = p.Transfer, name[n:]
	}
	for i := range list {
		if list[i].Name == name && list[i].Ref != nil {
			return *list[i].Ref, true
		}
	}
	return 0, false
}
