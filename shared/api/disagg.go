// Package api owns the HTTP bodies, headers and errors that the router, the nodes and foreign TensorRT-LLM workers speak:
// OpenAI's completions and chat completions, disaggregated_params, and OpenAI's error object. It parses and patches
// bytes; it serves nothing.
package api

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strconv"

	"meridian.internal/shared/jsonline"
)

// Request types of disaggregated_params.
const (
	ContextOnly          = "context_only"
	GenerationOnly       = "generation_only"
	ContextAndGeneration = "context_and_generation"
)

// Schedule styles as integers on the wire (TensorRT-LLM's enum).
const (
	ContextFirst    = 0
	GenerationFirst = 1
)

// DisaggParams is disaggregated_params on requests and on each response choice, with TensorRT-LLM's names. Fields of a
// foreign worker that we do not know are kept by whoever forwards the bytes, not by this type.
type DisaggParams struct {
	RequestType        string          `json:"request_type"`
	DisaggRequestID    *int64          `json:"disagg_request_id,omitempty"`
	CtxRequestID       *int64          `json:"ctx_request_id,omitempty"`
	FirstGenTokens     []int32         `json:"first_gen_tokens,omitempty"`
	FirstGenLogProbs   json.RawMessage `json:"first_gen_log_probs,omitempty"`
	EncodedOpaqueState *string         `json:"encoded_opaque_state,omitempty"`
	DraftTokens        []int32         `json:"draft_tokens,omitempty"`
	CtxDPRank          *int            `json:"ctx_dp_rank,omitempty"`
	CtxInfoEndpoint    *string         `json:"ctx_info_endpoint,omitempty"` // "tcp://host:port" of the ctx node's KV listener; must be a registered one
	ScheduleStyle      *int            `json:"schedule_style,omitempty"`
	ConversationID     *string         `json:"conversation_id,omitempty"`
	CtxUsage           *Usage          `json:"ctx_usage,omitempty"`
}

// ReadDisagg reads disaggregated_params that stand alone.
func ReadDisagg(r io.Reader) (*DisaggParams, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, Invalid("", "read the body: %v", err)
	}
	p := &DisaggParams{}
	if err := json.Unmarshal(b, p); err != nil {
		return nil, wrongType("disaggregated_params", err)
	}
	return p, nil
}

// wrongType says of which type a field must be, in words of JSON.
func wrongType(param string, err error) *Error {
	var bad *json.UnmarshalTypeError
	if !errors.As(err, &bad) {
		return Invalid(param, "%s: %v", param, err)
	}
	if bad.Field != "" {
		param += "." + bad.Field
	}
	want := "an integer of 64 bits"
	switch bad.Type.Kind() {
	case reflect.Struct:
		want = "an object"
	case reflect.Slice:
		want = "an array of token ids"
	case reflect.String:
		want = "a string"
	case reflect.Int32:
		want = "a token id"
	}
	return Invalid(param, "%s must be %s", param, want)
}

// LegParams are the disaggregated_params that a router makes itself.
type LegParams struct {
	Type     string
	ID       int64
	CtxID    int64 // 0: absent
	Style    int
	Endpoint string // of the context node's KV; "": absent
}

// Append appends them as JSON.
func (p LegParams) Append(b []byte) []byte {
	b = append(append(append(b, `{"request_type":"`...), p.Type...), `","disagg_request_id":`...)
	b = strconv.AppendInt(b, p.ID, 10)
	if p.CtxID != 0 {
		b = strconv.AppendInt(append(b, `,"ctx_request_id":`...), p.CtxID, 10)
	}
	if p.Endpoint != "" {
		b = jsonline.AppendString(append(b, `,"ctx_info_endpoint":`...), p.Endpoint)
	}
	b = strconv.AppendInt(append(b, `,"schedule_style":`...), int64(p.Style), 10)
	return append(b, '}')
}

// Usage is OpenAI's usage object.
type Usage struct {
	PromptTokens        int                  `json:"prompt_tokens"` // null, as the total is, and 0 here: NoPrompt
	CompletionTokens    int                  `json:"completion_tokens"`
	TotalTokens         int                  `json:"total_tokens"`
	PromptTokensDetails *PromptTokensDetails `json:"prompt_tokens_details,omitempty"`

	NoPrompt     bool `json:"-"` // a foreign worker does not tell PromptTokens
	NoCompletion bool `json:"-"` // nor CompletionTokens
}

// PromptTokensDetails splits prompt tokens.
type PromptTokensDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

// Headers between the router and the nodes. Clients cannot set those that begin with X-Meridian, but for the deadline: the
// router makes them itself.
const (
	HeaderRequestID     = "X-Request-Id"           // from and to clients: the client's id, or the router's when there was none
	HeaderRouter        = "X-Meridian-Router"      // name of the router; names the subject of the record
	HeaderRouterRequest = "X-Meridian-Request"     // the router's own request id
	HeaderSub           = "X-Meridian-Sub"         // index of the sub-request
	HeaderAttempt       = "X-Meridian-Attempt"     // attempt number of the leg
	HeaderProbe         = "X-Meridian-Probe"       // "1": qualification, warm-up, health generation
	HeaderDeadline      = "X-Meridian-Deadline-Ms" // milliseconds that the request may still take
	HeaderStreamed      = "X-Meridian-Streamed"    // "1" when the client asked for a stream
	HeaderKVWait        = "X-Meridian-Kv-Wait-Ms"  // milliseconds that a generation leg may wait for another source when its KV breaks off
	HeaderTraceparent   = "Traceparent"
	HeaderReturnMetrics = "X-TRTLLM-return-metrics" // exactly "1"
	HeaderClockSync     = "X-TRTLLM-Clock-Sync"
)
