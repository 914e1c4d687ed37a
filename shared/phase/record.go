// Package phase owns the phase record: what one process knows of one attempt at one request, with raw stamps. It holds
// the schema and its codec; it does not convert stamps (router/timeline does) and does not publish (shared/bus does).
//
// A field that is absent does not apply; null means that it applies but was not collected; 0 is a measured zero.
package phase

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

// Schema is the version of Record. Changes are additive.
const Schema = "meridian.phase/1"

// Role says which process wrote a record.
type Role string

// The roles. An aggregated attempt is written by the node that ran it, under that node's own role, with Style aggregated.
const (
	Disagg Role = "disagg" // the router
	Ctx    Role = "ctx"
	Gen    Role = "gen"
)

// Outcome is the end of an attempt.
type Outcome string

// The outcomes. Every attempt that reached a process has exactly one.
const (
	Finished  Outcome = "finished"
	Failed    Outcome = "failed"
	Cancelled Outcome = "cancelled"
	Rejected  Outcome = "rejected" // refused before any work: bad input, overload, incompatible pair
	Expired   Outcome = "expired"  // its deadline passed
)

// Record is one phase record.
type Record struct {
	Schema          string          `json:"schema"`
	Role            Role            `json:"role"`
	Node            string          `json:"node"`       // name of the process that wrote it
	Instance        clock.ID        `json:"instance"`   // its clock id
	Router          string          `json:"router"`     // name of the router that sent the leg; "none" for a direct request
	RequestID       string          `json:"request_id"` // the router's own
	ClientRequestID string          `json:"client_request_id,omitempty"`
	DisaggRequestID int64           `json:"disagg_request_id,string,omitempty"` // absent: aggregated or rejected before it was minted
	Sub             int             `json:"sub"`                                // index of the sub-request (prompt x choice)
	Attempt         int             `json:"attempt"`                            // 0 is the first try of this sub-request on this role
	Traceparent     string          `json:"traceparent,omitempty"`
	Probe           bool            `json:"probe,omitempty"`
	Style           string          `json:"style"` // generation_first, context_first, aggregated
	Model           string          `json:"model"`
	Streamed        bool            `json:"streamed"`
	Outcome         Outcome         `json:"outcome"`
	FinishReason    string          `json:"finish_reason,omitempty"`
	Error           *Error          `json:"error,omitempty"`
	Clocks          []Clock         `json:"clocks"`
	PushedOffsetNS  *int64          `json:"pushed_offset_ns,omitempty"` // offset that the node applied on its own faces
	Stamps          Stamps          `json:"stamps"`
	Tokens          Tokens          `json:"tokens"`
	KV              *infer.KVCounts `json:"kv,omitempty"`
	Transfer        *Transfer       `json:"transfer,omitempty"`
	Iters           *Iters          `json:"iters,omitempty"`
	DPRank          *int            `json:"dp_rank,omitempty"` // whose iterations these are; absent: the engine has one rank
	Preemptions     int             `json:"preemptions"`
	PreemptedNS     int64           `json:"preempted_ns"`
	Chunks          []infer.Chunk   `json:"chunks,omitempty"`        // stamps of the engine's clock
	Decision        *Decision       `json:"decision,omitempty"`      // router only
	Legs            []Leg           `json:"legs,omitempty"`          // router only: every leg that was sent
	Resumes         []Resume        `json:"resumes,omitempty"`       // router only: where the answer went on after a cut
	StepMessages    int             `json:"step_messages,omitempty"` // step column messages that belong to this record
	EnergyJ         *float64        `json:"energy_j,omitempty"`
}

// Error says what failed.
type Error struct {
	Stage     string `json:"stage"` // parse, place, ctx, kv, gen, relay, engine
	Type      string `json:"type"`
	Message   string `json:"message"`
	Retryable bool   `json:"retryable"`
}

// Clock is an entry of the clocks table; a group of stamps names its entry by index.
type Clock struct {
	ID       clock.ID        `json:"id"`
	Kind     string          `json:"kind"`               // mono, gpu, rank
	Estimate *clock.Estimate `json:"estimate,omitempty"` // newest estimate that the process knew; the merge uses its own
}

// Stamps are raw stamps in ns of the clock with index Clock. Absent: the point was not reached or does not apply.
//
// A stamp of something that leaves the process (dispatch, headers_sent, first_token_sent, end) is taken before the write,
// and one of something that arrives after the read: then a reader's stamp is never before the writer's.
type Stamps struct {
	Clock int `json:"clock"`
	// EngineClock is the index of the clock of what the engine stamps, where that is another: first_scheduled, first_token, last_token,
	// chunks and steps are of a rank that is a process of its own. 0: it is the same.
	EngineClock int `json:"engine_clock,omitempty"`

	// On every role.
	ReceiveNS        *int64 `json:"receive_ns,omitempty"`          // request headers read
	ParsedNS         *int64 `json:"parsed_ns,omitempty"`           // body read, validated and tokenized, legs made
	AdmittedNS       *int64 `json:"admitted_ns,omitempty"`         // let in (router), slot and blocks reserved (gen), accepted by the engine (ctx)
	FirstTokenNS     *int64 `json:"first_token_ns,omitempty"`      // router: first token read from the gen leg; node: sampled or taken over
	FirstTokenSentNS *int64 `json:"first_token_sent_ns,omitempty"` // first token byte handed to the socket
	LastTokenNS      *int64 `json:"last_token_ns,omitempty"`
	EndNS            *int64 `json:"end_ns,omitempty"` // last byte handed to the socket, or the attempt ended

	// Nodes.
	StartedNS        *int64 `json:"started_ns,omitempty"`         // handed to the role's own code
	QueuedNS         *int64 `json:"queued_ns,omitempty"`          // handed to the engine's queue
	FirstScheduledNS *int64 `json:"first_scheduled_ns,omitempty"` // first batch that held it was built
	HeadersSentNS    *int64 `json:"headers_sent_ns,omitempty"`    // before 200 is flushed

	// Router.
	PlacedNS      *int64 `json:"placed_ns,omitempty"`       // the pair was chosen
	GenPrepareNS  *int64 `json:"gen_prepare_ns,omitempty"`  // gen leg: the making of its body begins
	GenDispatchNS *int64 `json:"gen_dispatch_ns,omitempty"` // gen leg: before the write
	GenHeadersNS  *int64 `json:"gen_headers_ns,omitempty"`  // gen leg: response headers read
	CtxPrepareNS  *int64 `json:"ctx_prepare_ns,omitempty"`
	CtxDispatchNS *int64 `json:"ctx_dispatch_ns,omitempty"`
	CtxDoneNS     *int64 `json:"ctx_done_ns,omitempty"` // ctx leg: response read
}

// Tokens counts tokens of an attempt. A router knows of a foreign worker's what that tells.
type Tokens struct {
	Prompt   int  `json:"prompt"` // null, 0 here: NoPrompt
	Cached   int  `json:"cached"` // prompt tokens whose KV was reused, not computed, on this node; null, 0 here: NoCached
	Output   int  `json:"output"` // produced here (the first token counts where it was sampled)
	NoPrompt bool `json:"-"`      // Prompt is not known
	NoCached bool `json:"-"`      // Cached is not known
}

// Known are Prompt and Cached, nil where they are not known.
func (t *Tokens) Known() (prompt, cached *int64) {
	if !t.NoPrompt {
		n := int64(t.Prompt)
		prompt = &n
	}
	if !t.NoCached {
		n := int64(t.Cached)
		cached = &n
	}
	return prompt, cached
}

// Transfer is a KV hand-over as seen by one side; stamps in Clocks[0] ns. Absent stamps were not reached.
type Transfer struct {
	Peer        string `json:"peer"`
	Bytes       int64  `json:"bytes"`
	Frames      int64  `json:"frames"`
	Tokens      int    `json:"tokens"`                 // tokens whose KV travelled
	TokensHeld  int    `json:"tokens_held"`            // tokens that the receiver already had
	RequestedNS *int64 `json:"requested_ns,omitempty"` // gen: asked; ctx: was asked
	StartNS     *int64 `json:"start_ns,omitempty"`     // gen: first byte read; ctx: first byte written
	LastByteNS  *int64 `json:"last_byte_ns,omitempty"`
	InstalledNS *int64 `json:"installed_ns,omitempty"` // gen: last region copied into KV; ctx: acknowledged
	WireNS      int64  `json:"wire_ns"`                // time inside socket reads or writes
	InstallNS   int64  `json:"install_ns"`             // time inside KV copies
}

// Iters names the engine iterations of the first and the last batch that held the request.
type Iters struct {
	First int64 `json:"first"`
	Last  int64 `json:"last"`
}

// Decision says why the router chose a pair.
type Decision struct {
	Policy string `json:"policy"`
	Ctx    string `json:"ctx,omitempty"`
	Gen    string `json:"gen"`
	Reason string `json:"reason"`
	// MatchedTokens of the prompt were in the cache of the node that prefills, as the router knew; absent: it did not look.
	MatchedTokens *int64      `json:"matched_tokens,omitempty"`
	LocalNS       *int64      `json:"local_ns,omitempty"`  // estimate of prefill on gen; absent: too little was measured
	RemoteNS      *int64      `json:"remote_ns,omitempty"` // estimate of prefill on ctx and the hand-over
	Candidates    []Candidate `json:"candidates,omitempty"`
}

// Leg is one request that the router sent to a node. The merge waits for one record of each leg whose node writes records,
// and reports those that never came.
type Leg struct {
	Role    Role    `json:"role"`
	Node    string  `json:"node"`
	Sub     int     `json:"sub"`
	Attempt int     `json:"attempt"`
	Records bool    `json:"records"`           // false: a foreign worker, or the leg never reached the node
	Outcome Outcome `json:"outcome,omitempty"` // as the router saw it, where the leg's attempt did not end well
	Given   int     `json:"given,omitempty"`   // output tokens that earlier attempts gave: the leg went on after them
	// ReleasedNS is when a context node acknowledged that it freed KV that no generation leg had claimed.
	ReleasedNS *int64 `json:"released_ns,omitempty"`
}

// Resume is a seam in an answer: its stream was cut, and another attempt went on after the tokens so far.
type Resume struct {
	Sub     int   `json:"sub"`
	Attempt int   `json:"attempt"`  // that went on
	Tokens  int   `json:"tokens"`   // before the cut
	CutNS   int64 `json:"cut_ns"`   // the router knew of the cut
	TokenNS int64 `json:"token_ns"` // it read the next token
}

// Candidate is a node that was looked at.
type Candidate struct {
	Node      string  `json:"node"`
	Score     float64 `json:"score"` // lower is better; prompt tokens for ctx, sequences for gen
	Running   int     `json:"running"`
	Waiting   int     `json:"waiting"`
	LoadAgeNS *int64  `json:"load_age_ns"` // null: no load report yet
	// QueuedTokens are the prompt tokens not yet prefilled: reported, and reserved since.
	QueuedTokens  int    `json:"queued_tokens"`
	Reserved      int    `json:"reserved"`                 // legs of this router that have not ended
	MatchedTokens *int64 `json:"matched_tokens,omitempty"` // absent: the router did not look
}
