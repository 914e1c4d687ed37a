package phase

import (
	"encoding/binary"
	"errors"
	"fmt"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// StepsSchema is the version of a step message.
const StepsSchema = "meridian.steps/1"

// MaxStepMessage bounds one step message: NATS refuses messages of 1 MiB.
const MaxStepMessage = 256 << 10

// ErrBadSteps is returned when bytes are no step message.
var ErrBadSteps = errors.New("phase: bad step message")

const (
	stepMagic   = "MSTP\x01"
	stepColumns = 9
	// stepOptional is the first column that may be empty, or missing: older writers have none of these.
	stepOptional = 8
	// stepRows is how many rows fit even if each value took the ten bytes of the longest varint.
	stepRows = (MaxStepMessage - 4096) / (stepColumns * binary.MaxVarintLen64)
)

// StepsHeader says which record step columns belong to and which part they are.
type StepsHeader struct {
	Role      Role
	Node      string
	Instance  clock.ID
	RequestID string
	Sub       int
	Attempt   int
	Part      int // from 0
	Parts     int
	Rows      int
	Truncated int64 // steps that the node did not keep
}

// AppendSteps encodes the columns as messages of at most MaxStepMessage bytes; none for no steps. Columns of unequal
// length are cut to the shortest; an optional one of another length is left empty.
//
//	message = "MSTP" version(1) | uvarint n | n bytes of header (JSON) | 8 columns | optional columns
//	column  = uvarint n | n bytes of zigzag varints, each the difference from the row before
func AppendSteps(r *Record, s *infer.Steps) [][]byte {
	if s == nil {
		return nil
	}
	cols := stepValues(s)
	rows := cols[0].len()
	for i := range cols[:stepOptional] {
		rows = min(rows, cols[i].len())
	}
	if rows == 0 && s.Truncated == 0 {
		return nil
	}
	h := StepsHeader{
		Role: r.Role, Node: r.Node, Instance: r.Instance, RequestID: r.RequestID, Sub: r.Sub, Attempt: r.Attempt,
		Parts: max(1, (rows+stepRows-1)/stepRows), Truncated: s.Truncated,
	}
	var out [][]byte
	for from := 0; h.Part < h.Parts; from += stepRows {
		to := min(from+stepRows, rows)
		h.Rows = to - from
		out = append(out, appendPart(h, &cols, from, to))
		h.Part++
	}
	return out
}

// column is one column of steps: of one type or the other.
type column struct {
	wide   []int64
	narrow []int32
}

func (c *column) len() int { return len(c.wide) + len(c.narrow) }

func stepValues(s *infer.Steps) [stepColumns]column {
	return [stepColumns]column{
		{narrow: s.Step}, {wide: s.Iter}, {wide: s.ForwardStartNS}, {wide: s.ForwardEndNS}, {wide: s.SampleEndNS}, {wide: s.TokenNS},
		{narrow: s.KVTokens}, {narrow: s.BatchSize}, {narrow: s.Tokens},
	}
}

func appendPart(h StepsHeader, cols *[stepColumns]column, from, to int) []byte {
	b := make([]byte, 0, 512+usualRow*(to-from))
	b = append(b, stepMagic...)
	head := appendStepsHeader(h)
	b = binary.AppendUvarint(b, uint64(len(head)))
	b = append(b, head...)
	col := make([]byte, 0, 5*(to-from)+binary.MaxVarintLen64)
	for i := range cols {
		col = col[:0]
		switch c := &cols[i]; {
		case c.len() < to: // an optional column that was not collected
		case c.wide != nil:
			col = appendColumn(col, c.wide[from:to])
		default:
			col = appendColumn(col, c.narrow[from:to])
		}
		b = binary.AppendUvarint(b, uint64(len(col)))
		b = append(b, col...)
	}
	return b
}

// usualRow is how many bytes a row takes, or a little less.
const usualRow = 24

// appendColumn appends zigzag varints of the differences.
func appendColumn[T int32 | int64](b []byte, values []T) []byte {
	last := int64(0)
	for _, v := range values {
		d := int64(v) - last
		last = int64(v)
		u := uint64(d)<<1 ^ uint64(d>>63)
		for u >= 0x80 {
			b = append(b, byte(u)|0x80)
			u >>= 7
		}
		b = append(b, byte(u))
	}
	return b
}

func appendStepsHeader(h StepsHeader) []byte {
	var w jsonline.Writer
	w.Open('{')
	w.Str("schema", StepsSchema)
	w.Str("role", string(h.Role))
	w.Str("node", h.Node)
	w.Str("instance", string(h.Instance))
	w.Str("request_id", h.RequestID)
	w.Int("sub", int64(h.Sub))
	w.Int("attempt", int64(h.Attempt))
	w.Int("part", int64(h.Part))
	w.Int("parts", int64(h.Parts))
	w.Int("rows", int64(h.Rows))
	w.Int("truncated", h.Truncated)
	w.Close('}')
	return w.B
}

// ParseSteps reads one step message. Its errors are ErrBadSteps and ErrSchema.
func ParseSteps(b []byte) (h StepsHeader, s *infer.Steps, err error) {
	if len(b) < len(stepMagic) || string(b[:len(stepMagic)]) != stepMagic {
		return h, nil, fmt.Errorf("%w: it does not begin with MSTP and version 1", ErrBadSteps)
	}
	head, b, err := cutBytes(b[len(stepMagic):], "header")
	if err != nil {
		return h, nil, err
	}
	if h, err = parseStepsHeader(head); err != nil {
		return h, nil, err
	}
	var cols [stepColumns][]int64
	for i := range cols {
		if i >= stepOptional && len(b) == 0 {
			break
		}
		var col []byte
		if col, b, err = cutBytes(b, "column"); err != nil {
			return h, nil, err
		}
		if i >= stepOptional && len(col) == 0 {
			continue
		}
		if cols[i], err = parseColumn(col, h.Rows); err != nil {
			return h, nil, err
		}
	}
	s = &infer.Steps{
		Step: narrow(cols[0]), Iter: cols[1], ForwardStartNS: cols[2], ForwardEndNS: cols[3], SampleEndNS: cols[4], TokenNS: cols[5],
		KVTokens: narrow(cols[6]), BatchSize: narrow(cols[7]), Truncated: h.Truncated,
	}
	if cols[8] != nil {
		s.Tokens = narrow(cols[8])
	}
	return h, s, nil
}

func cutBytes(b []byte, what string) (part, rest []byte, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 || n > uint64(len(b)-size) {
		return nil, nil, fmt.Errorf("%w: %s is cut off", ErrBadSteps, what)
	}
	return b[size : size+int(n)], b[size+int(n):], nil
}

func parseColumn(b []byte, rows int) ([]int64, error) {
	if rows > len(b) { // each value takes a byte at least: no allocation by a claim
		return nil, fmt.Errorf("%w: column has %d bytes for %d rows", ErrBadSteps, len(b), rows)
	}
	out := make([]int64, rows)
	last := int64(0)
	for i := range out {
		d, n := binary.Varint(b)
		if n <= 0 {
			return nil, fmt.Errorf("%w: column ends at row %d of %d", ErrBadSteps, i, rows)
		}
		last += d
		out[i] = last
		b = b[n:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: column has more than %d rows", ErrBadSteps, rows)
	}
	return out, nil
}

func narrow(v []int64) []int32 {
	out := make([]int32, len(v))
	for i, x := range v {
		out[i] = int32(x)
	}
	return out
}

func parseStepsHeader(b []byte) (h StepsHeader, err error) {
	schema := ""
	r := jsonline.NewReader(string(b))
	if r.Object() {
		for key, ok := r.Key(); ok; key, ok = r.Key() {
			switch key {
			case "schema":
				schema = r.String()
			case "role":
				h.Role = Role(r.String())
			case "node":
				h.Node = r.String()
			case "instance":
				h.Instance = clock.ID(r.String())
			case "request_id":
				h.RequestID = r.String()
			case "sub":
				h.Sub = int(r.Int())
			case "attempt":
				h.Attempt = int(r.Int())
			case "part":
				h.Part = int(r.Int())
			case "parts":
				h.Parts = int(r.Int())
			case "rows":
				h.Rows = int(r.Int())
			case "truncated":
				h.Truncated = r.Int()
			default:
				r.Skip()
			}
		}
	}
	switch err := r.End(); {
	case err != nil:
		return h, fmt.Errorf("%w: header: %w", ErrBadSteps, err)
	case schema != StepsSchema:
		return h, fmt.Errorf("%w %q: want %q", ErrSchema, schema, StepsSchema)
	case h.Rows < 0 || h.Part < 0 || h.Part >= h.Parts:
		return h, fmt.Errorf("%w: header says part %d of %d with %d rows", ErrBadSteps, h.Part, h.Parts, h.Rows)
	}
	return h, nil
}
