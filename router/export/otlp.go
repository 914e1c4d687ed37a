package export

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// otlp writes one ExportTraceServiceRequest in OTLP's JSON form a line: a collector's file receiver reads it, and each line
// is a body for POST /v1/traces. A request is one tree: the root is the request, its children are the spans.
type otlp struct {
	w *bufio.Writer
}

// Line adds a request.
func (o *otlp) Line(l *timeline.Line) error {
	_, err := o.w.Write(append(OTLP(nil, l), '\n'))
	return err
}

// Close ends the file.
func (o *otlp) Close() error { return o.w.Flush() }

// OTLP appends a request as the body of POST /v1/traces. Each node is a resource of its own. Times are UTC by the line's
// wall_ns, laid out on the reference clock, so that no child can begin before its parent.
func OTLP(dst []byte, l *timeline.Line) []byte {
	w := &jsonline.Writer{B: dst}
	w.Open('{')
	w.OpenKey("resourceSpans", '[')
	resourceSpans(w, l)
	w.Close(']')
	w.Close('}')
	return w.B
}

// resourceSpans adds the items of a request.
func resourceSpans(w *jsonline.Writer, l *timeline.Line) {
	trace, parent := traceOf(l)
	root := spanID(l.RequestID, "")
	byNode := map[string][]int{}
	var order []string
	for i, s := range l.Spans {
		if _, ok := byNode[s.Node]; !ok {
			order = append(order, s.Node)
		}
		byNode[s.Node] = append(byNode[s.Node], i)
	}
	resource(w, l.Router)
	rootSpan(w, l, trace, root, parent)
	w.B = append(w.B, "]}]}"...)
	for _, node := range order {
		resource(w, node)
		for _, i := range byNode[node] {
			childSpan(w, l, i, trace, root)
		}
		w.B = append(w.B, "]}]}"...)
	}
}

// resource opens a resource with one scope, up to its list of spans.
func resource(w *jsonline.Writer, node string) {
	w.Open('{')
	w.OpenKey("resource", '{')
	w.OpenKey("attributes", '[')
	attribute(w, "service.name", "meridian")
	attribute(w, "service.instance.id", node)
	w.Close(']')
	w.Close('}')
	w.OpenKey("scopeSpans", '[')
	w.Open('{')
	w.OpenKey("scope", '{')
	w.Str("name", timeline.Schema)
	w.Close('}')
	w.OpenKey("spans", '[')
}

func attribute(w *jsonline.Writer, key, value string) {
	w.Open('{')
	w.Str("key", key)
	w.OpenKey("value", '{')
	w.Str("stringValue", value)
	w.Close('}')
	w.Close('}')
}

func number(w *jsonline.Writer, key string, v int64) {
	w.Open('{')
	w.Str("key", key)
	w.OpenKey("value", '{')
	w.Str("intValue", strconv.FormatInt(v, 10)) // 64-bit integers are strings in OTLP's JSON
	w.Close('}')
	w.Close('}')
}

func times(w *jsonline.Writer, from, dur int64) {
	from = max(0, from) // fixed64: a collector refuses the whole request for one that is negative
	w.Str("startTimeUnixNano", strconv.FormatInt(from, 10))
	w.Str("endTimeUnixNano", strconv.FormatUint(uint64(from)+uint64(max(0, dur)), 10))
}

func rootSpan(w *jsonline.Writer, l *timeline.Line, trace, id, parent string) {
	w.Open('{')
	w.Str("traceId", trace)
	w.Str("spanId", id)
	w.OptStr("parentSpanId", parent)
	w.Str("name", "chat "+l.Model)
	w.Int("kind", 2) // server
	e2e := int64(0)
	if l.E2ENS != nil {
		e2e = *l.E2ENS
	}
	times(w, base(l), e2e)
	w.OpenKey("attributes", '[')
	attribute(w, "gen_ai.provider.name", "meridian")
	attribute(w, "gen_ai.operation.name", "chat")
	attribute(w, "gen_ai.request.model", l.Model)
	attribute(w, "gen_ai.response.id", l.RequestID)
	attribute(w, "gen_ai.response.model", l.Model)
	if l.FinishReason != "" {
		w.Open('{')
		w.Str("key", "gen_ai.response.finish_reasons")
		w.OpenKey("value", '{')
		w.OpenKey("arrayValue", '{')
		w.OpenKey("values", '[')
		w.Open('{')
		w.Str("stringValue", l.FinishReason)
		w.B = append(w.B, "}]}}}"...)
	}
	prompt, _ := l.Tokens.Known()
	number(w, "gen_ai.usage.output_tokens", int64(l.Tokens.Output))
	attribute(w, "meridian.style", l.Style)
	attribute(w, "meridian.outcome", string(l.Outcome))
	for _, n := range []struct {
		key string
		v   *int64
	}{{"gen_ai.usage.input_tokens", prompt}, {"meridian.ttft_ns", l.TTFTNS}, {"meridian.unaccounted_ns", l.UnaccountedNS}, {"meridian.max_bound_ns", l.MaxBoundNS}} {
		if n.v != nil {
			number(w, n.key, *n.v)
		}
	}
	w.Close(']')
	w.OpenKey("status", '{')
	if l.Outcome != phase.Finished {
		w.Int("code", 2)
		if l.Error != nil {
			w.Str("message", l.Error.Stage+": "+l.Error.Message)
		}
	}
	w.Close('}')
	w.Close('}')
}

func childSpan(w *jsonline.Writer, l *timeline.Line, i int, trace, root string) {
	s := &l.Spans[i]
	w.Open('{')
	w.Str("traceId", trace)
	w.Str("spanId", spanID(l.RequestID, strconv.Itoa(i)))
	w.Str("parentSpanId", root)
	w.Str("name", s.Name)
	w.Int("kind", 1) // internal
	times(w, base(l)+s.StartNS, s.DurNS)
	w.OpenKey("attributes", '[')
	attribute(w, "meridian.node", s.Node)
	if s.BoundNS > 0 {
		number(w, "meridian.bound_ns", s.BoundNS)
	}
	if s.DurNS < 0 {
		number(w, "meridian.negative_dur_ns", s.DurNS)
	}
	w.Close(']')
	w.Close('}')
}

// traceOf takes trace and parent from the client's traceparent, or makes a trace id of the request's.
func traceOf(l *timeline.Line) (trace, parent string) {
	if f := strings.Split(l.Traceparent, "-"); len(f) == 4 && isID(f[1], 32) && isID(f[2], 16) {
		return f[1], f[2]
	}
	sum := sha256.Sum256([]byte(l.RequestID))
	return hex.EncodeToString(sum[:16]), ""
}

func spanID(request, part string) string {
	sum := sha256.Sum256([]byte(request + "\x00" + part))
	return hex.EncodeToString(sum[:8])
}

// isID checks an id of n hexadecimal digits; all zeros are none.
func isID(s string, n int) bool {
	return len(s) == n && strings.Trim(s, "0") != "" && strings.Trim(s, "0123456789abcdef") == ""
}
