package timeline

import (
	"strings"

	"meridian.internal/shared/jsonline"
)

// appendSpans writes the spans as columns. They tile the request, so that each is told by the gap before it.
func appendSpans(w *jsonline.Writer, l *Line) {
	spans := l.Spans
	w.OpenKey("spans", '{')
	w.OpenKey("name", '[')
	for i := range spans {
		w.ItemStr(spans[i].Name)
	}
	w.Close(']')
	w.OpenKey("node", '[')
	for i := range spans {
		appendPlace(w, l, spans[i].Node)
	}
	w.Close(']')
	w.OpenKey("gap_ns", '[')
	end := int64(0)
	for i := range spans {
		w.ItemInt(spans[i].StartNS - end)
		end = spans[i].StartNS + spans[i].DurNS
	}
	w.Close(']')
	w.OpenKey("dur_ns", '[')
	for i := range spans {
		w.ItemInt(spans[i].DurNS)
	}
	w.Close(']')
	w.OpenKey("bound_ns", '[')
	for i := range spans {
		w.ItemInt(spans[i].BoundNS)
	}
	w.Close(']')
	w.Close('}')
}

// appendPlace writes a span's node by its number, [from, to] on the way between two; a name that the line does not have
// elsewhere as itself.
func appendPlace(w *jsonline.Writer, l *Line, node string) {
	from, to, way := strings.Cut(node, ">")
	a, b := l.number(from), -1
	if way {
		b = l.number(to)
	}
	switch {
	case a < 0 || (way && b < 0):
		w.ItemStr(node)
	case way:
		w.Open('[')
		w.ItemInt(int64(a))
		w.ItemInt(int64(b))
		w.Close(']')
	default:
		w.ItemInt(int64(a))
	}
}

// number of a node in the column of spans: 0 is the router, n the node of the n-th attempt. -1: neither.
func (l *Line) number(node string) int {
	if node == l.Router {
		return 0
	}
	for i := range l.Attempts {
		if l.Attempts[i].Node == node {
			return i + 1
		}
	}
	return -1
}
