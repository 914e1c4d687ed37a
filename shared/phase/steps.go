package phase

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// StepsSchema is the version of a step message.
const StepsSchema = "meridian.steps/2"

// MaxStepMessage bounds one step message: NATS refuses messages of 1 MiB.
const MaxStepMessage = 256 << 10

// ErrBadSteps is returned when bytes are no step message.
var ErrBadSteps = errors.New("phase: bad step message")

const (
	stepMagic = "MSTP\x02"
	// headerRoom is more than the header of a message takes.
	headerRoom = 4096
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
	Stages    int   // of the pipeline that ran the steps; 0: it is none
}

// AppendSteps encodes the steps as messages of at most MaxStepMessage bytes; none for no steps. A page that is larger than
// that by itself gets a message of its own.
//
//	message = "MSTP" version(2) | uvarint n | n bytes of header (JSON) | page...
//	page    = uvarint rows | 6 columns | stages | uvarint runs | run...
//	column  = uvarint n | n bytes of zigzag varints, each the difference from the row before
//	stages  = uvarint n | n bytes of zigzag varints, of each row the cuts between its stages, each the difference from the
//	          one before; only if the header tells of stages
//	run     = uvarint from, n, step, kv_tokens, tokens
func AppendSteps(r *Record, s *infer.StepRecords) [][]byte {
	if s == nil || s.N == 0 && s.Truncated == 0 {
		return nil
	}
	parts := splitPages(s.Pages)
	h := StepsHeader{
		Role: r.Role, Node: r.Node, Instance: r.Instance, RequestID: r.RequestID, Sub: r.Sub, Attempt: r.Attempt,
		Parts: len(parts), Truncated: s.Truncated,
	}
	if len(s.Pages) > 0 && s.Pages[0].Cuts > 0 {
		h.Stages = s.Pages[0].Cuts/2 + 1
	}
	out := make([][]byte, 0, len(parts))
	for _, pages := range parts {
		out = append(out, appendPart(h, pages))
		h.Part++
	}
	return out
}

// splitPages gives the pages of each message; at least one message.
func splitPages(pages []infer.StepPage) (parts [][]infer.StepPage) {
	from, size := 0, headerRoom
	for i := range pages {
		n := pageSize(&pages[i])
		if size+n > MaxStepMessage && i > from {
			parts = append(parts, pages[from:i])
			from, size = i, headerRoom
		}
		size += n
	}
	return append(parts, pages[from:])
}

// pageSize is the most that a page can take, or a little more.
func pageSize(p *infer.StepPage) int {
	n := (3+infer.StepColumns)*binary.MaxVarintLen32 + len(p.Stages)
	for _, c := range p.Columns {
		n += len(c)
	}
	return n + len(p.Runs)*5*binary.MaxVarintLen32
}

func appendPart(h StepsHeader, pages []infer.StepPage) []byte {
	size := 0
	for i := range pages {
		size += pageSize(&pages[i])
		for _, r := range pages[i].Runs {
			h.Rows += int(r.N)
		}
	}
	var room [512]byte
	head := appendStepsHeader(room[:0], h)
	b := append(make([]byte, 0, size+len(head)+16), stepMagic...)
	b = binary.AppendUvarint(b, uint64(len(head)))
	b = append(b, head...)
	for i := range pages {
		p := &pages[i]
		b = binary.AppendUvarint(b, uint64(p.Rows))
		for _, c := range p.Columns {
			b = binary.AppendUvarint(b, uint64(len(c)))
			b = append(b, c...)
		}
		if h.Stages > 0 {
			b = binary.AppendUvarint(b, uint64(len(p.Stages)))
			b = append(b, p.Stages...)
		}
		b = binary.AppendUvarint(b, uint64(len(p.Runs)))
		for _, r := range p.Runs {
			for _, v := range [...]int32{r.From, r.N, r.Step, r.KVTokens, r.Tokens} {
				b = binary.AppendUvarint(b, uint64(uint32(v)))
			}
		}
	}
	return b
}

func appendStepsHeader(b []byte, h StepsHeader) []byte {
	w := jsonline.Writer{B: b}
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
	w.OptInt("stages", int64(h.Stages))
	w.Close('}')
	return w.B
}

// ParseSteps reads one step message. Its errors are ErrBadSteps and ErrSchema.
func ParseSteps(b []byte) (h StepsHeader, s *infer.Steps, err error) {
	if len(b) < len(stepMagic) || string(b[:len(stepMagic)]) != stepMagic {
		return h, nil, fmt.Errorf("%w: it does not begin with MSTP and version 2", ErrBadSteps)
	}
	head, b, err := cutBytes(b[len(stepMagic):], "header")
	if err != nil {
		return h, nil, err
	}
	if h, err = parseStepsHeader(head); err != nil {
		return h, nil, err
	}
	s = &infer.Steps{Truncated: h.Truncated}
	for len(b) > 0 {
		var p infer.StepPage
		if p, b, err = cutPage(b, h.Stages); err != nil {
			return h, nil, err
		}
		if err := s.AppendPage(&p); err != nil {
			return h, nil, fmt.Errorf("%w: %w", ErrBadSteps, err)
		}
	}
	if len(s.Step) != h.Rows {
		return h, nil, fmt.Errorf("%w: it holds %d steps, its header says %d", ErrBadSteps, len(s.Step), h.Rows)
	}
	return h, s, nil
}

func cutPage(b []byte, stages int) (p infer.StepPage, rest []byte, err error) {
	rows, b, err := cutNumber(b, "rows of a page")
	if err != nil {
		return p, nil, err
	}
	p.Rows = int(rows)
	for i := range p.Columns {
		if p.Columns[i], b, err = cutBytes(b, "column"); err != nil {
			return p, nil, err
		}
	}
	if stages > 0 {
		p.Cuts = 2 * (stages - 1)
		if p.Stages, b, err = cutBytes(b, "stages"); err != nil {
			return p, nil, err
		}
	}
	runs, b, err := cutNumber(b, "runs of a page")
	if err != nil {
		return p, nil, err
	}
	if int(runs) > len(b)/5 { // each takes five bytes at least: no allocation by a claim
		return p, nil, fmt.Errorf("%w: %d runs in %d bytes", ErrBadSteps, runs, len(b))
	}
	p.Runs = make([]infer.StepRun, runs)
	for i := range p.Runs {
		r := &p.Runs[i]
		for _, to := range [...]*int32{&r.From, &r.N, &r.Step, &r.KVTokens, &r.Tokens} {
			if *to, b, err = cutNumber(b, "run"); err != nil {
				return p, nil, err
			}
		}
	}
	return p, b, nil
}

func cutNumber(b []byte, what string) (int32, []byte, error) {
	v, n := binary.Uvarint(b)
	if n <= 0 || v > math.MaxInt32 {
		return 0, nil, fmt.Errorf("%w: %s is no number below 2^31", ErrBadSteps, what)
	}
	return int32(v), b[n:], nil
}

func cutBytes(b []byte, what string) (part, rest []byte, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 || n > uint64(len(b)-size) {
		return nil, nil, fmt.Errorf("%w: %s is cut off", ErrBadSteps, what)
	}
	return b[size : size+int(n)], b[size+int(n):], nil
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
			case "stages":
				h.Stages = int(r.Int())
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
	case h.Rows < 0 || h.Part < 0 || h.Part >= h.Parts || h.Stages < 0 || h.Stages > infer.MaxStages:
		return h, fmt.Errorf("%w: header says part %d of %d with %d rows of %d stages", ErrBadSteps, h.Part, h.Parts, h.Rows, h.Stages)
	}
	return h, nil
}
