package rows

import (
	"strconv"
	"time"

	"meridian.internal/shared/jsonline"
)

// Encoder writes the rows of one engine. All text that its rows share is put together once: keys, nulls and what is static.
type Encoder struct {
	static      Static
	without, kv program // rows that did not sample KV, and rows that did
}

// program is the text of a row, cut where a value comes that differs from row to row.
type program struct {
	parts []part
	end   string
}

// part is text and the value after it.
type part struct {
	text string
	at   func(s *Static, r *Row) any
}

// NewEncoder makes an encoder, which any number of goroutines may use.
func NewEncoder(s Static) *Encoder {
	e := &Encoder{static: s}
	e.without, e.kv = e.compile(false), e.compile(true)
	return e
}

// Append appends a row as one JSON object, without a newline.
func (e *Encoder) Append(dst []byte, r *Row) []byte {
	p := &e.without
	if r.KV.Sampled {
		p = &e.kv
	}
	for i := range p.parts {
		dst = append(dst, p.parts[i].text...)
		dst = appendValue(dst, p.parts[i].at(&e.static, r))
	}
	return append(dst, p.end...)
}

// compiler walks the layout with two rows: what is at the same place in both is the same in all.
type compiler struct {
	w     jsonline.Writer
	from  int // where the text of the next part begins
	s     *Static
	rows  [2]Row
	parts []part
}

func (e *Encoder) compile(kv bool) program {
	c := compiler{s: &e.static}
	for i := range c.rows {
		c.rows[i].KV.Sampled = kv
		if len(e.static.Groups) > 1 {
			c.rows[i].Groups = make([]KV, len(e.static.Groups))
		}
	}
	c.w.Open('{')
	c.fields(layout(max(len(e.static.Groups), 1)))
	c.w.Close('}')
	return program{c.parts, string(c.w.B[c.from:])}
}

func (c *compiler) fields(fields []field) {
	for i := range fields {
		f := &fields[i]
		c.w.Key(f.key)
		if f.at == nil {
			c.w.B = append(c.w.B, "null"...)
			continue
		}
		v := f.at(c.s, &c.rows[0])
		if o, ok := v.(*object); ok {
			c.object(o)
		} else if v == f.at(c.s, &c.rows[1]) {
			c.w.B = appendValue(c.w.B, v)
		} else {
			c.parts = append(c.parts, part{string(c.w.B[c.from:]), f.at})
			c.w.B = append(c.w.B, '0') // in the value's place: the writer puts its commas by what is before them
			c.from = len(c.w.B)
		}
	}
}

func (c *compiler) object(o *object) {
	if o.absent {
		c.w.B = append(c.w.B, "null"...)
		return
	}
	c.w.B = append(c.w.B, [...]string{"", "[", "{"}[o.shape]...)
	for i, member := range o.members {
		if i > 0 {
			c.w.B = append(c.w.B, ',')
		}
		if o.shape == byWindow {
			c.w.B = append(strconv.AppendInt(append(c.w.B, '"'), *c.s.tokens(i), 10), `":`...)
		}
		c.w.B = append(c.w.B, '{')
		c.fields(member)
		c.w.B = append(c.w.B, '}')
	}
	c.w.B = append(c.w.B, [...]string{"", "]", "}"}[o.shape]...)
}

func appendValue(b []byte, at any) []byte {
	switch v := at.(type) {
	case *int64:
		return strconv.AppendInt(b, *v, 10)
	case *Int:
		if v.OK {
			return strconv.AppendInt(b, v.V, 10)
		}
	case *Span:
		if v.OK {
			return jsonline.AppendFloat(b, float64(v.NS)/1e6)
		}
	case *Ratio:
		if v.OK {
			return jsonline.AppendFloat(b, v.V)
		}
	case *string:
		if *v != "" {
			return jsonline.AppendString(b, *v)
		}
	case string:
		return jsonline.AppendString(b, v)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case *bool:
		return strconv.AppendBool(b, *v)
	case *wall:
		return append(time.Unix(0, int64(*v)).UTC().AppendFormat(append(b, '"'), time.RFC3339Nano), '"')
	case list:
		return append(appendValue(append(b, '['), v.of), ']')
	case levels:
		b = append(b, '[')
		for i := 0; i < v.known(); i++ {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, v[i])
		}
		return append(b, ']')
	case *[]Req:
		if *v != nil {
			return appendRequests(b, *v)
		}
	}
	return append(b, "null"...)
}

// known is the number of levels up to the last one that the node has.
func (v levels) known() int {
	for n := len(v); n > 0; n-- {
		switch of := v[n-1].(type) {
		case *Int:
			if of.OK {
				return n
			}
		case *string:
			if *of != "" {
				return n
			}
		default:
			return n
		}
	}
	return 0
}
