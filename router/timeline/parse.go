package timeline

import (
	"errors"
	"fmt"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// Errors of Parse.
var (
	// ErrBadLine is returned when a text is no JSON object of a timeline's shape.
	ErrBadLine = errors.New("timeline: bad line")
	// ErrSchema is returned when a line is of another schema than meridian.timeline/1.
	ErrSchema = errors.New("timeline: unknown schema")
)

// Parse reads one line. Unknown members are skipped. Its errors are ErrBadLine and ErrSchema.
func Parse(b []byte) (*Line, error) { return parse(b, true) }

// ParseSpans reads one line without its phases and its decision, for whoever goes through many. They are passed over unread:
// Parse alone finds what is wrong in them.
func ParseSpans(b []byte) (*Line, error) { return parse(b, false) }

func parse(b []byte, phases bool) (*Line, error) {
	l := new(Line)
	var spans spanColumns
	r := jsonline.NewReader(string(b))
	if r.Object() {
		for key, ok := r.Key(); ok; key, ok = r.Key() {
			switch {
			case key == "phases" && phases:
				l.Phases = parseList(r, parsePhase)
			case !phases && (key == "phases" || key == "decision"):
				r.Pass()
			case key == "spans":
				l.Spans = spans.parse(r)
			case !parseHead(r, key, l) && !parseNumbers(r, key, l) && !parseLists(r, key, l):
				r.Skip()
			}
		}
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadLine, err)
	}
	if l.Schema != Schema {
		return nil, fmt.Errorf("%w %q: want %q", ErrSchema, l.Schema, Schema)
	}
	if err := errors.Join(spans.place(l), l.restore()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadLine, err)
	}
	return l, nil
}

func parseHead(r *jsonline.Reader, key string, l *Line) bool {
	switch key {
	case "schema":
		l.Schema = r.String()
	case "request_id":
		l.RequestID = r.String()
	case "client_request_id":
		l.ClientRequestID = r.String()
	case "amends":
		l.Amends = r.Bool()
	case "router":
		l.Router = r.String()
	case "model":
		l.Model = r.String()
	case "style":
		l.Style = r.String()
	case "traceparent":
		l.Traceparent = r.String()
	case "reference":
		l.Reference = clock.ID(r.String())
	case "outcome":
		l.Outcome = phase.Outcome(r.String())
	case "finish_reason":
		l.FinishReason = r.String()
	case "critical_span":
		l.CriticalSpan = r.String()
	case "complete":
		l.Complete = r.Bool()
	case "streamed":
		l.Streamed = r.Bool()
	default:
		return false
	}
	return true
}

func parseNumbers(r *jsonline.Reader, key string, l *Line) bool {
	switch key {
	case "start_ns":
		l.StartNS = r.Int()
	case "disagg_request_id":
		l.DisaggRequestID = r.IntString()
	case "wall_ns":
		l.WallNS = r.Int()
	case "ttft_ns":
		l.TTFTNS = r.IntPtr()
	case "e2e_ns":
		l.E2ENS = r.IntPtr()
	case "unaccounted_ns":
		l.UnaccountedNS = r.IntPtr()
	case "max_bound_ns":
		l.MaxBoundNS = r.IntPtr()
	case "negative_spans":
		l.NegativeSpans = int(r.Int())
	case "tokens":
		l.Tokens = phase.ParseTokens(r)
	default:
		return false
	}
	return true
}

func parseLists(r *jsonline.Reader, key string, l *Line) bool {
	switch key {
	case "error":
		l.Error = phase.ParseError(r)
	case "missing":
		l.Missing = parseList(r, (*jsonline.Reader).String)
	case "violations":
		l.Violations = parseList(r, parseViolation)
	case "handover":
		l.Handover = parseHandover(r)
	case "decode":
		l.Decode = parseDecode(r)
	case "attempts":
		l.Attempts = parseList(r, parseAttempt)
	case "resumes":
		l.Resumes = phase.ParseResumes(r)
	case "decision":
		l.Decision = parseDecision(r)
	default:
		return false
	}
	return true
}

// parseList reads an array; a present one is never nil.
func parseList[T any](r *jsonline.Reader, item func(*jsonline.Reader) T) []T {
	if !r.Array() {
		return nil
	}
	list := []T{}
	for r.Item() {
		list = append(list, item(r))
	}
	return list
}

func parseViolation(r *jsonline.Reader) (v Violation) {
	if !r.Object() {
		return v
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "cause":
			v.Cause = r.String()
		case "event":
			v.Event = r.String()
		case "cause_ns":
			v.CauseNS = r.Int()
		case "event_ns":
			v.EventNS = r.Int()
		case "bound_ns":
			v.BoundNS = r.Int()
		case "excess_ns":
			v.ExcessNS = r.Int()
		default:
			r.Skip()
		}
	}
	return v
}

func parseAttempt(r *jsonline.Reader) (a Attempt) {
	if !r.Object() {
		return a
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "role":
			a.Role = phase.Role(r.String())
		case "node":
			a.Node = r.String()
		case "sub":
			a.Sub = int(r.Int())
		case "attempt":
			a.Attempt = int(r.Int())
		case "outcome":
			a.Outcome = phase.Outcome(r.String())
		case "error":
			a.Error = phase.ParseError(r)
		case "given":
			a.Given = int(r.Int())
		case "released_ns":
			a.ReleasedNS = r.IntPtr()
		default:
			r.Skip()
		}
	}
	return a
}

func parseHandover(r *jsonline.Reader) *Handover {
	if !r.Object() {
		return nil
	}
	h := new(Handover)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "bytes":
			h.Bytes = r.Int()
		case "frames":
			h.Frames = r.Int()
		case "tokens":
			h.Tokens = int(r.Int())
		case "tokens_held":
			h.TokensHeld = int(r.Int())
		case "dur_ns":
			h.DurNS = r.IntPtr()
		case "hidden_ns":
			h.HiddenNS = r.IntPtr()
		case "wire_ns":
			h.WireNS = r.Int()
		case "install_ns":
			h.InstallNS = r.Int()
		case "open_ns":
			h.OpenNS = r.IntPtr()
		case "allocate_ns":
			h.AllocateNS = r.IntPtr()
		case "notify_ns":
			h.NotifyNS = r.IntPtr()
		default:
			r.Skip()
		}
	}
	h.VisibleNS = visible(h)
	return h
}

func visible(h *Handover) *int64 {
	if h.DurNS == nil || h.HiddenNS == nil {
		return nil
	}
	v := *h.DurNS - *h.HiddenNS
	return &v
}

func parseDecode(r *jsonline.Reader) *Decode {
	if !r.Object() {
		return nil
	}
	d := new(Decode)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "steps":
			d.Steps = int(r.Int())
		case "compute_ns":
			d.ComputeNS = r.Int()
		case "sample_ns":
			d.SampleNS = r.Int()
		case "wait_ns":
			d.WaitNS = r.Int()
		case "preempted_ns":
			d.PreemptedNS = r.Int()
		default:
			r.Skip()
		}
	}
	return d
}
