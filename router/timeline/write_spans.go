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
	appendGaps(w, spans)
	w.OpenKey("dur_ns", '[')
	for i := range spans {
		w.ItemInt(spans[i].DurNS)
	}
	w.Close(']')
	appendBounds(w, spans)
	w.Close('}')
}

// appendGaps writes the column of gaps up to the last one that is not 0.
func appendGaps(w *jsonline.Writer, spans []Span) {
	w.OpenKey("gap_ns", '[')
	end, zeros := int64(0), 0
	for i := range spans {
		gap := spans[i].StartNS - end
		end = spans[i].StartNS + spans[i].DurNS
		if gap == 0 {
			zeros++
			continue
		}
		for ; zeros > 0; zeros-- {
			w.ItemInt(0)
		}
		w.ItemInt(gap)
	}
	w.Close(']')
}

// appendBounds writes the bounds of the spans between two nodes: the others lie on one clock and are exact. Where one of these
// has a bound all the same, it writes a bound for each.
func appendBounds(w *jsonline.Writer, spans []Span) {
	all := false
	for i := range spans {
		all = all || spans[i].BoundNS != 0 && !spans[i].between()
	}
	w.OpenKey("bound_ns", '[')
	for i := range spans {
		if all || spans[i].between() {
			w.ItemInt(spans[i].BoundNS)
		}
	}
	w.Close(']')
}

// between says whether the span is on the way from one node to another.
func (s *Span) between() bool { return strings.IndexByte(s.Node, '>') >= 0 }

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
