package export

import (
	"io"

	"github.com/parquet-go/parquet-go"

	"meridian.internal/router/timeline"
)

// request is a row of the Parquet file. Absent numbers are null.
type request struct {
	RequestID       string        `parquet:"request_id"`
	ClientRequestID string        `parquet:"client_request_id"`
	Router          string        `parquet:"router,dict"`
	Model           string        `parquet:"model,dict"`
	Style           string        `parquet:"style,dict"`
	Outcome         string        `parquet:"outcome,dict"`
	FinishReason    string        `parquet:"finish_reason,dict"`
	ErrorStage      *string       `parquet:"error_stage,optional"`
	ErrorMessage    *string       `parquet:"error_message,optional"`
	Complete        bool          `parquet:"complete"`
	Streamed        bool          `parquet:"streamed"`
	WallNS          *int64        `parquet:"wall_ns,optional"`
	TTFTNS          *int64        `parquet:"ttft_ns,optional"`
	E2ENS           *int64        `parquet:"e2e_ns,optional"`
	UnaccountedNS   *int64        `parquet:"unaccounted_ns,optional"`
	MaxBoundNS      *int64        `parquet:"max_bound_ns,optional"`
	NegativeSpans   int64         `parquet:"negative_spans"`
	Violations      int64         `parquet:"causality_violations"`
	PromptTokens    *int64        `parquet:"prompt_tokens,optional"`
	CachedTokens    *int64        `parquet:"cached_tokens,optional"`
	OutputTokens    int64         `parquet:"output_tokens"`
	KVBytes         *int64        `parquet:"kv_bytes,optional"`
	KVHiddenNS      *int64        `parquet:"kv_hidden_ns,optional"`
	CriticalSpan    string        `parquet:"critical_span,dict"`
	Spans           []requestSpan `parquet:"spans,list"`
}

// requestSpan is a span of a row.
type requestSpan struct {
	Name    string `parquet:"name,dict"`
	Node    string `parquet:"node,dict"`
	StartNS int64  `parquet:"start_ns"`
	DurNS   int64  `parquet:"dur_ns"`
	BoundNS int64  `parquet:"bound_ns"`
}

// rowGroup is how many requests are kept in memory until they are written.
const rowGroup = 20_000

// columns writes a Parquet file with one row a request and its spans as a list.
type columns struct {
	w *parquet.GenericWriter[request]
	n int
}

func newParquet(w io.Writer) *columns {
	return &columns{w: parquet.NewGenericWriter[request](w, parquet.Compression(&parquet.Zstd))}
}

// Line adds a row.
func (c *columns) Line(l *timeline.Line) error {
	if _, err := c.w.Write([]request{rowOf(l)}); err != nil {
		return err
	}
	if c.n++; c.n%rowGroup == 0 {
		return c.w.Flush()
	}
	return nil
}

// Close writes what is left and the footer.
func (c *columns) Close() error { return c.w.Close() }

func rowOf(l *timeline.Line) request {
	prompt, cached := l.Tokens.Known()
	r := request{
		RequestID: l.RequestID, ClientRequestID: l.ClientRequestID, Router: l.Router, Model: l.Model, Style: l.Style, Outcome: string(l.Outcome),
		FinishReason: l.FinishReason, Complete: l.Complete, Streamed: l.Streamed, TTFTNS: l.TTFTNS, E2ENS: l.E2ENS, UnaccountedNS: l.UnaccountedNS,
		MaxBoundNS: l.MaxBoundNS, NegativeSpans: int64(l.NegativeSpans), Violations: int64(len(l.Violations)), PromptTokens: prompt,
		CachedTokens: cached, OutputTokens: int64(l.Tokens.Output), CriticalSpan: l.CriticalSpan, Spans: make([]requestSpan, len(l.Spans)),
	}
	if l.WallNS != 0 {
		r.WallNS = &l.WallNS
	}
	if l.Error != nil {
		r.ErrorStage, r.ErrorMessage = &l.Error.Stage, &l.Error.Message
	}
	if h := l.Handover; h != nil {
		r.KVBytes, r.KVHiddenNS = &h.Bytes, h.HiddenNS
	}
	for i, s := range l.Spans {
		r.Spans[i] = requestSpan(s)
	}
	return r
}
