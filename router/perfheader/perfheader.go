// Package perfheader writes what a request cost in TensorRT-LLM's response headers and its trailing event: Server-Timing and
// X-TRTLLM-*. It reads a merged timeline, so that every number is on the router's clock. It is pure.
//
// Phases are disagg (the router), ctx and gen. A number whose ends are not both known, or whose end lies before its begin, is
// left out. Several sub-requests follow each other in one list, so that an entry may come more than once.
package perfheader

import (
	"strconv"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// Names of the headers, and of the event that carries them after a stream's end mark.
const (
	ServerTiming = "Server-Timing"
	StartEnd     = "X-TRTLLM-Start-End-Time"
	Steps        = "X-TRTLLM-Step-Metrics"
	Chunks       = "X-TRTLLM-Ctx-Chunk-Metrics"
	Event        = "trtllm.perf_metrics"
)

// Header is one header.
type Header struct{ Name, Value string }

// maxBytes bounds all headers together: names, values, and four bytes each for ": " and the line's end.
const maxBytes = 80 << 10

// Of gives the headers of a request, in the order of their names above. Over 80 KiB those of steps and chunks are left out,
// and what is left ends with the last sub-request that fits.
func Of(l *timeline.Line) []Header {
	var w writer
	w.router(l)
	for i := range l.Phases {
		p := &l.Phases[i]
		if !lastAttempt(l, p) || l.Beside(p) {
			continue
		}
		switch p.Role {
		case phase.Ctx:
			w.worker(l, p, "ctx")
		case phase.Gen:
			w.worker(l, p, "gen")
		}
	}
	h := w.headers(true)
	if size(h) > maxBytes {
		h = w.headers(false)
	}
	return h
}

func size(h []Header) (n int) {
	for _, x := range h {
		n += len(x.Name) + len(x.Value) + 4
	}
	return n
}

// lastAttempt tells whether no later attempt of the phase's sub-request has the same role: earlier ones were in vain.
func lastAttempt(l *timeline.Line, p *timeline.Phase) bool {
	for i := range l.Phases {
		if q := &l.Phases[i]; q.Role == p.Role && q.Sub == p.Sub && q.Attempt > p.Attempt {
			return false
		}
	}
	return true
}

// writer gathers the four lists.
type writer struct{ timing, startEnd, steps, chunks []byte }

func (w *writer) headers(all bool) []Header {
	var out []Header
	for _, x := range []struct {
		name   string
		value  []byte
		always bool
	}{{ServerTiming, w.timing, true}, {StartEnd, w.startEnd, true}, {Steps, w.steps, false}, {Chunks, w.chunks, false}} {
		if len(x.value) > 0 && (all || x.always) {
			out = append(out, Header{x.name, string(x.value)})
		}
	}
	return out
}

// maxKept is what Server-Timing and Start-End-Time may have each, so that both always fit.
const maxKept = 38 << 10

func (w *writer) router(l *timeline.Line) {
	for i := range l.Phases {
		p := &l.Phases[i]
		if p.Role != phase.Disagg {
			continue
		}
		begin := at(p, "receive_ns")
		w.span("disagg_queue", begin, at(p, "ctx_dispatch_ns", "gen_dispatch_ns"))
		w.span("disagg_ttft", begin, at(p, "first_token_ns"))
		return
	}
}

// worker writes a context or generation phase with the edges of TensorRT-LLM's records (router/export has the same).
func (w *writer) worker(l *timeline.Line, p *timeline.Phase, name string) {
	arrival := at(p, "queued_ns", "parsed_ns")
	if name == "gen" {
		arrival = at(p, "admitted_ns", "parsed_ns")
	}
	last := at(p, "last_token_ns", "first_token_ns")
	w.span(name+"_queue", arrival, at(p, "first_scheduled_ns"))
	w.span(name+"_ttft", arrival, at(p, "first_token_ns"))
	w.span(name+"_e2e", arrival, last)
	w.stamp(l, name+"-start", arrival)
	w.stamp(l, name+"-end", last)
	w.stamp(l, name+"-srv-start", at(p, "receive_ns"))
	w.stamp(l, name+"-srv-ttft", at(p, "first_token_sent_ns"))
	if name == "gen" {
		from, to := at(p, "transfer.start_ns", "transfer.requested_ns"), at(p, "transfer.installed_ns")
		w.span("gen_kv_transfer", from, to)
		w.stamp(l, "gen-kv-start", from)
		w.stamp(l, "gen-kv-end", to)
	}
	w.steps = columns(w.steps, p.Steps, name+"-step-", "iter")
	w.chunks = columns(w.chunks, p.Chunks, name+"-ctx-chunk-", "")
}

// at is the first of these stamps that is known; nil: none is.
func at(p *timeline.Phase, names ...string) *int64 {
	for _, n := range names {
		if v, ok := p.At(n); ok {
			return &v
		}
	}
	return nil
}

func comma(b []byte) []byte {
	if len(b) > 0 {
		b = append(b, ", "...)
	}
	return b
}

func (w *writer) span(label string, from, to *int64) {
	if from == nil || to == nil || !follows(*from, *to) || len(w.timing) > maxKept {
		return
	}
	w.timing = appendMS(append(append(comma(w.timing), label...), ";dur="...), *to-*from)
}

// stamp writes a moment in seconds of the router's clock.
func (w *writer) stamp(l *timeline.Line, label string, v *int64) {
	if v == nil || l.StartNS+*v < 0 || len(w.startEnd) > maxKept {
		return
	}
	w.startEnd = append(append(comma(w.startEnd), label...), ";ts="...)
	w.startEnd = appendFixed(w.startEnd, l.StartNS+*v, 1e9)
}

// follows tells whether b is not before a, and b - a a number.
func follows(a, b int64) bool { return b >= a && b-a >= 0 }

// columns writes forward and sample of each step, under its iteration, or of each chunk under its place.
func columns(b []byte, c *timeline.Columns, label, number string) []byte {
	start, end, sampled := c.Column("forward_start_ns"), c.Column("forward_end_ns"), c.Column("sample_end_ns")
	numbers := c.Column(number)
	for i := range start {
		if i >= len(end) || i >= len(sampled) || !follows(start[i], end[i]) || !follows(end[i], sampled[i]) {
			continue
		}
		n := int64(i)
		if i < len(numbers) {
			n = numbers[i]
		}
		b = strconv.AppendInt(append(comma(b), label...), n, 10)
		b = appendMS(append(b, "-forward;dur="...), end[i]-start[i])
		b = strconv.AppendInt(append(comma(b), label...), n, 10)
		b = appendMS(append(b, "-sample;dur="...), sampled[i]-end[i])
		if len(b) > maxBytes {
			return b // it will be left out
		}
	}
	return b
}

// appendMS writes ns as milliseconds with six decimals, exactly.
func appendMS(b []byte, ns int64) []byte { return appendFixed(b, ns, 1e6) }

func appendFixed(b []byte, ns, unit int64) []byte {
	b = append(strconv.AppendInt(b, ns/unit, 10), '.')
	return append(b, strconv.FormatInt(unit+ns%unit, 10)[1:]...)
}

// AppendClockSync appends the value of X-TRTLLM-Clock-Sync: when the request was received and its answer began, as ns of the
// router's clock.
func AppendClockSync(b []byte, receiveNS, transmitNS int64) []byte {
	b = appendFixed(append(b, "receive;ts="...), receiveNS, 1e9)
	return appendFixed(append(b, ", transmit;ts="...), transmitNS, 1e9)
}

// AppendEvent appends the event that carries the headers of a streamed answer: it comes after the end mark.
func AppendEvent(b []byte, headers []Header) []byte {
	b = append(b, "event: "+Event+"\ndata: {"...)
	for i, h := range headers {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(strconv.AppendQuote(b, h.Name), ':') // names and values hold nothing that JSON and Go quote differently
		b = strconv.AppendQuote(b, h.Value)
	}
	return append(b, "}\n\n"...)
}
