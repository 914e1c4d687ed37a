package timeline

import (
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// Append appends l as one JSON object without a newline.
func Append(dst []byte, l *Line) []byte {
	w := jsonline.Writer{B: dst}
	w.Open('{')
	appendHead(&w, l)
	w.NullInt("ttft_ns", l.TTFTNS)
	w.NullInt("e2e_ns", l.E2ENS)
	w.NullInt("unaccounted_ns", l.UnaccountedNS)
	w.NullInt("max_bound_ns", l.MaxBoundNS)
	w.Int("negative_spans", int64(l.NegativeSpans))
	w.OpenKey("violations", '[')
	for i := range l.Violations {
		appendViolation(&w, &l.Violations[i])
	}
	w.Close(']')
	phase.AppendTokens(&w, l.Tokens)
	if l.Handover != nil {
		appendHandover(&w, l.Handover)
	}
	if d := l.Decode; d != nil {
		w.OpenKey("decode", '{')
		w.Int("steps", int64(d.Steps))
		w.Int("compute_ns", d.ComputeNS)
		w.Int("sample_ns", d.SampleNS)
		w.Int("wait_ns", d.WaitNS)
		w.OptInt("preempted_ns", d.PreemptedNS)
		w.Close('}')
	}
	w.OptStr("critical_span", l.CriticalSpan)
	w.OpenKey("attempts", '[')
	for i := range l.Attempts {
		appendAttempt(&w, &l.Attempts[i])
	}
	w.Close(']')
	appendSpans(&w, l)
	phase.AppendResumes(&w, l.Resumes)
	w.OpenKey("phases", '[')
	for i := range l.Phases {
		appendPhase(&w, l, &l.Phases[i])
	}
	w.Close(']')
	if l.Decision != nil {
		appendDecision(&w, l.Decision)
	}
	w.Close('}')
	return w.B
}

func appendHead(w *jsonline.Writer, l *Line) {
	w.Str("schema", l.Schema)
	w.Str("request_id", l.RequestID)
	w.Str("client_request_id", l.ClientRequestID)
	if l.Amends {
		w.Bool("amends", true)
	}
	w.Str("router", l.Router)
	w.Str("model", l.Model)
	w.Str("style", l.Style)
	w.OptStr("traceparent", l.Traceparent)
	if l.DisaggRequestID != 0 {
		appendID(w, l.DisaggRequestID)
	}
	w.Str("reference", string(l.Reference))
	w.Int("start_ns", l.StartNS)
	w.OptInt("wall_ns", l.WallNS)
	w.Str("outcome", string(l.Outcome))
	w.OptStr("finish_reason", l.FinishReason)
	appendError(w, l.Error)
	w.Bool("complete", l.Complete)
	if len(l.Missing) > 0 {
		w.OpenKey("missing", '[')
		for _, m := range l.Missing {
			w.ItemStr(m)
		}
		w.Close(']')
	}
	w.Bool("streamed", l.Streamed)
}

func appendError(w *jsonline.Writer, e *phase.Error) {
	if e == nil {
		return
	}
	w.OpenKey("error", '{')
	w.Str("stage", e.Stage)
	w.Str("type", e.Type)
	w.Str("message", e.Message)
	w.Bool("retryable", e.Retryable)
	w.Close('}')
}

func appendViolation(w *jsonline.Writer, v *Violation) {
	w.Open('{')
	w.Str("cause", v.Cause)
	w.Str("event", v.Event)
	w.Int("cause_ns", v.CauseNS)
	w.Int("event_ns", v.EventNS)
	w.Int("bound_ns", v.BoundNS)
	w.Int("excess_ns", v.ExcessNS)
	w.Close('}')
}

func appendHandover(w *jsonline.Writer, h *Handover) {
	w.OpenKey("handover", '{')
	w.Int("bytes", h.Bytes)
	w.Int("frames", h.Frames)
	w.Int("tokens", int64(h.Tokens))
	w.Int("tokens_held", int64(h.TokensHeld))
	w.NullInt("dur_ns", h.DurNS)
	w.NullInt("hidden_ns", h.HiddenNS)
	w.Int("wire_ns", h.WireNS)
	w.Int("install_ns", h.InstallNS)
	w.PtrInt("open_ns", h.OpenNS)
	w.PtrInt("allocate_ns", h.AllocateNS)
	w.PtrInt("notify_ns", h.NotifyNS)
	w.Close('}')
}

func appendAttempt(w *jsonline.Writer, a *Attempt) {
	w.Open('{')
	w.Str("role", string(a.Role))
	w.Str("node", a.Node)
	w.OptInt("sub", int64(a.Sub))
	w.OptInt("attempt", int64(a.Attempt))
	w.Str("outcome", string(a.Outcome))
	appendError(w, a.Error)
	w.OptInt("given", int64(a.Given))
	w.PtrInt("released_ns", a.ReleasedNS)
	w.Close('}')
}

func appendColumns(w *jsonline.Writer, key string, c *Columns) {
	if c == nil {
		return
	}
	w.OpenKey(key, '{')
	for i, name := range c.Names {
		w.OpenKey(name, '[')
		for _, v := range c.Values[i] {
			w.ItemInt(v)
		}
		w.Close(']')
	}
	w.Close('}')
}
