package timeline

import (
	"fmt"

	"meridian.internal/shared/jsonline"
)

// spanColumns holds what of the spans can be told only with the whole line: StartNS of a span is its gap until then.
type spanColumns struct {
	spans  []Span
	places []place
	bounds []int64 // see appendBounds
}

// place is where a span was: numbers as in Line.number; to is -1 where it is on one node. named: the text tells it.
type place struct {
	from, to int
	named    bool
}

// usualSpans is how many spans a request has whose prefill is one chunk.
const usualSpans = 26

func (c *spanColumns) parse(r *jsonline.Reader) []Span {
	*c = spanColumns{}
	if !r.Object() {
		return nil
	}
	c.spans = make([]Span, 0, usualSpans)
	shortest := -1
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		n := 0
		switch key {
		case "name":
			n = c.column(r, func(i int) { c.spans[i].Name = r.String() })
		case "node":
			n = c.column(r, func(i int) { c.parsePlace(r, i) })
		case "gap_ns": // what is missing at its end is 0
			c.column(r, func(i int) { c.spans[i].StartNS = r.Int() })
			continue
		case "dur_ns":
			n = c.column(r, func(i int) { c.spans[i].DurNS = r.Int() })
		case "bound_ns":
			c.bounds = parseInts(r)
			continue
		default:
			r.Skip()
			continue
		}
		if shortest < 0 || n < shortest {
			shortest = n
		}
	}
	c.spans = c.spans[:max(shortest, 0)] // a row is one thing
	return c.spans
}

// column reads one column; item stands before its i-th value.
func (c *spanColumns) column(r *jsonline.Reader, item func(i int)) int {
	n := 0
	if !r.Array() {
		return n
	}
	for ; r.Item(); n++ {
		if n == len(c.spans) {
			c.spans = append(c.spans, Span{})
		}
		item(n)
	}
	return n
}

func (c *spanColumns) parsePlace(r *jsonline.Reader, i int) {
	p := place{to: -1}
	switch r.Next() {
	case '"':
		c.spans[i].Node = r.String()
		p.named = true
	case '[':
		pair := parseInts(r)
		if len(pair) != 2 {
			r.Fail("two nodes")
			return
		}
		p.from, p.to = int(pair[0]), int(pair[1])
	default:
		p.from = int(r.Int())
	}
	c.places = append(c.places, p)
}

// place gives the spans of l their nodes, starts and bounds.
func (c *spanColumns) place(l *Line) error {
	if err := c.tile(l); err != nil {
		return err
	}
	each := len(c.bounds) == len(c.spans)
	for i := range c.spans {
		if s := &c.spans[i]; len(c.bounds) > 0 && (each || s.between()) {
			s.BoundNS, c.bounds = c.bounds[0], c.bounds[1:]
		}
	}
	return nil
}

// tile gives the spans their nodes and starts.
func (c *spanColumns) tile(l *Line) error {
	ways := map[place]string{}
	end := int64(0)
	for i := range c.spans {
		s := &c.spans[i]
		s.StartNS += end
		end = s.StartNS + s.DurNS
		if i >= len(c.places) || c.places[i].named {
			continue
		}
		p := c.places[i]
		if p.to < 0 {
			node, ok := l.node(p.from)
			if !ok {
				return fmt.Errorf("span %s is on node %d of %d", s.Name, p.from, len(l.Attempts))
			}
			s.Node = node
			continue
		}
		if ways[p] == "" {
			from, ok1 := l.node(p.from)
			to, ok2 := l.node(p.to)
			if !ok1 || !ok2 {
				return fmt.Errorf("span %s is between nodes %d and %d of %d", s.Name, p.from, p.to, len(l.Attempts))
			}
			ways[p] = from + ">" + to
		}
		s.Node = ways[p]
	}
	return nil
}

// node is the inverse of number.
func (l *Line) node(n int) (string, bool) {
	switch {
	case n == 0:
		return l.Router, true
	case n < 0 || n > len(l.Attempts):
		return "", false
	}
	return l.Attempts[n-1].Node, true
}
