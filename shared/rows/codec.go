package rows

import (
	"errors"
	"fmt"
	"math"
	"time"

	"meridian.internal/shared/jsonline"
)

var (
	// ErrBadRow is returned when bytes are no row.
	ErrBadRow = errors.New("rows: bad row")
	// ErrSchema is returned when a row is of another version.
	ErrSchema = errors.New("rows: unknown schema")
)

// Codec reads rows; an Encoder writes them.
type Codec struct{ fields []field }

// NewCodec makes a codec, which any number of goroutines may use.
func NewCodec() *Codec { return &Codec{layout(MaxGroups)} }

// Parse reads a row. Unknown keys are skipped. Its errors are ErrBadRow and ErrSchema.
func (c *Codec) Parse(b []byte) (s Static, r Row, err error) {
	in := jsonline.NewReader(string(b))
	p := parser{in: in, s: &s, r: &r}
	p.object(c.fields)
	p.together()
	if err := in.End(); err != nil {
		return s, r, fmt.Errorf("%w: %w", ErrBadRow, err)
	}
	if p.schema != Schema {
		return s, r, fmt.Errorf("%w: %q, this reads %q", ErrSchema, p.schema, Schema)
	}
	return s, r, nil
}

type parser struct {
	in     *jsonline.Reader
	s      *Static
	r      *Row
	schema string
}

func (p *parser) object(fields []field) {
	if !p.in.Object() {
		return
	}
	next := 0 // keys come in the order of the layout, mostly
	for key, ok := p.in.Key(); ok; key, ok = p.in.Key() {
		at := -1
		for i := range fields {
			if j := (next + i) % len(fields); fields[j].key == key {
				at = j
				break
			}
		}
		switch {
		case at < 0 || fields[at].at == nil:
			p.in.Skip()
			continue
		case key == "schema":
			p.schema = p.in.String()
		default:
			p.value(fields[at].at(p.s, p.r))
		}
		next = at + 1
	}
}

func (p *parser) value(at any) {
	if p.in.Null() {
		return
	}
	switch v := at.(type) {
	case *int64:
		*v = p.in.Int()
	case *Int:
		*v = Int{p.in.Int(), true}
	case *Span:
		*v = Span{int64(math.Round(p.in.Float() * 1e6)), true}
	case *Ratio:
		*v = Ratio{p.in.Float(), true}
	case *string:
		*v = p.in.String()
	case *bool:
		*v = p.in.Bool()
	case *wall:
		t, err := time.Parse(time.RFC3339Nano, p.in.String())
		if err != nil {
			p.in.Fail("a time as RFC 3339 has it")
			return
		}
		*v = wall(t.UnixNano())
	case list:
		for p.in.Array(); p.in.Item(); {
			p.value(v.of)
		}
	case levels:
		i := 0
		for p.in.Array(); p.in.Item(); i++ {
			if i < len(v) {
				p.value(v[i])
			} else {
				p.in.Skip()
			}
		}
	case *object:
		p.nested(v)
	case *[]Req:
		*v = p.requests()
	default:
		p.in.Skip()
	}
}

func (p *parser) nested(o *object) {
	for _, f := range o.members[0] { // the presence of its group says that KV was sampled
		if f.key == "allocNewBlocks" {
			p.r.KV.Sampled = true
		}
	}
	switch o.shape {
	case plain:
		p.object(o.members[0])
	case array:
		p.in.Array()
		for i := 0; p.in.Item(); i++ {
			p.member(o, i)
		}
	case byWindow:
		if p.in.Object() {
			for i := 0; ; i++ {
				if _, ok := p.in.Key(); !ok {
					break
				}
				p.member(o, i)
			}
		}
	}
}

// member reads what belongs to one group of layers.
func (p *parser) member(o *object, i int) {
	if i >= len(o.members) {
		p.in.Skip()
		return
	}
	for len(p.r.Groups) <= i {
		p.r.Groups, p.s.Groups = append(p.r.Groups, KV{}), append(p.s.Groups, Group{})
	}
	p.object(o.members[i])
}

// together makes of the groups what the row says of all of them.
func (p *parser) together() {
	if len(p.r.Groups) == 0 {
		return
	}
	p.r.KV.Sum(p.r.Groups)
	p.s.BlockBytes, p.s.Window = p.s.Groups[0].BlockBytes, p.s.Groups[0].Tokens
	if len(p.r.Groups) == 1 {
		p.r.Groups = nil
		if !p.s.Groups[0].Window.OK {
			p.s.Groups = nil
		}
	}
}
