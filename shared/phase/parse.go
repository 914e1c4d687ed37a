package phase

import (
	"fmt"
	"unsafe"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// Parse reads one record. Unknown members are skipped: additions to the schema do not break old readers. Errors are
// ErrBadRecord and ErrSchema. The record's strings share memory with b, which must not change any more.
func Parse(b []byte) (*Record, error) {
	rec := new(Record)
	r := jsonline.NewReader(unsafe.String(unsafe.SliceData(b), len(b))) // a copy would be a third of what parsing allocates
	if r.Object() {
		for key, ok := r.Key(); ok; key, ok = r.Key() {
			if !parseIdentity(r, key, rec) && !parseBody(r, key, rec) {
				r.Skip()
			}
		}
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRecord, err)
	}
	if rec.Schema != Schema {
		return nil, fmt.Errorf("%w %q: want %q", ErrSchema, rec.Schema, Schema)
	}
	for _, n := range [...]int{rec.Stamps.Clock, rec.Stamps.EngineClock} {
		if n < 0 || (n > 0 && n >= len(rec.Clocks)) {
			return nil, fmt.Errorf("%w: the stamps are of clock %d, the clocks table has %d entries", ErrBadRecord, n, len(rec.Clocks))
		}
	}
	return rec, nil
}

func parseIdentity(r *jsonline.Reader, key string, rec *Record) bool {
	switch key {
	case "schema":
		rec.Schema = r.String()
	case "role":
		rec.Role = Role(r.String())
	case "node":
		rec.Node = r.String()
	case "instance":
		rec.Instance = clock.ID(r.String())
	case "router":
		rec.Router = r.String()
	case "request_id":
		rec.RequestID = r.String()
	case "client_request_id":
		rec.ClientRequestID = r.String()
	case "disagg_request_id":
		rec.DisaggRequestID = r.IntString()
	case "sub":
		rec.Sub = int(r.Int())
	case "attempt":
		rec.Attempt = int(r.Int())
	case "traceparent":
		rec.Traceparent = r.String()
	case "probe":
		rec.Probe = r.Bool()
	case "style":
		rec.Style = r.String()
	case "model":
		rec.Model = r.String()
	case "streamed":
		rec.Streamed = r.Bool()
	case "outcome":
		rec.Outcome = Outcome(r.String())
	case "finish_reason":
		rec.FinishReason = r.String()
	default:
		return false
	}
	return true
}

func parseBody(r *jsonline.Reader, key string, rec *Record) bool {
	switch key {
	case "error":
		rec.Error = ParseError(r)
	case "clocks":
		rec.Clocks = parseClocks(r)
	case "pushed_offset_ns":
		rec.PushedOffsetNS = r.IntPtr()
	case "stamps":
		ParseStamps(r, &rec.Stamps)
	case "tokens":
		rec.Tokens = ParseTokens(r)
	case "kv":
		rec.KV = ParseKV(r)
	case "transfer":
		rec.Transfer = ParseTransfer(r)
	case "iters":
		rec.Iters = parseIters(r)
	case "dp_rank":
		rec.DPRank = ParseRank(r)
	case "preemptions":
		rec.Preemptions = int(r.Int())
	case "preempted_ns":
		rec.PreemptedNS = r.Int()
	case "chunks":
		rec.Chunks = parseChunks(r)
	case "decision":
		rec.Decision = parseDecision(r)
	case "legs":
		rec.Legs = parseLegs(r)
	case "resumes":
		rec.Resumes = ParseResumes(r)
	case "step_messages":
		rec.StepMessages = int(r.Int())
	case "energy_j":
		if !r.Null() {
			v := r.Float()
			rec.EnergyJ = &v
		}
	default:
		return false
	}
	return true
}

// ParseRank reads the member "dp_rank".
func ParseRank(r *jsonline.Reader) *int {
	v := r.IntPtr()
	if v == nil {
		return nil
	}
	rank := int(*v)
	return &rank
}

// ParseError reads the member "error".
func ParseError(r *jsonline.Reader) *Error {
	if !r.Object() {
		return nil
	}
	e := new(Error)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "stage":
			e.Stage = r.String()
		case "type":
			e.Type = r.String()
		case "message":
			e.Message = r.String()
		case "retryable":
			e.Retryable = r.Bool()
		default:
			r.Skip()
		}
	}
	return e
}

func parseClocks(r *jsonline.Reader) []Clock {
	if !r.Array() {
		return nil
	}
	clocks := make([]Clock, 0, 1)
	for r.Item() {
		var c Clock
		if r.Object() {
			for key, ok := r.Key(); ok; key, ok = r.Key() {
				switch key {
				case "id":
					c.ID = clock.ID(r.String())
				case "kind":
					c.Kind = r.String()
				case "estimate":
					c.Estimate = parseEstimate(r)
				default:
					r.Skip()
				}
			}
		}
		clocks = append(clocks, c)
	}
	return clocks
}

func parseEstimate(r *jsonline.Reader) *clock.Estimate {
	if !r.Object() {
		return nil
	}
	e := new(clock.Estimate)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		if !estimateNumber(r, key, e) && !estimateText(r, key, e) {
			r.Skip()
		}
	}
	return e
}

func estimateText(r *jsonline.Reader, key string, e *clock.Estimate) bool {
	switch key {
	case "reference":
		e.Reference = clock.ID(r.String())
	case "local":
		e.Local = clock.ID(r.String())
	case "state":
		e.State = r.String()
	case "transport":
		e.Transport = r.String()
	case "via":
		e.Via = r.String()
	default:
		return false
	}
	return true
}

func estimateNumber(r *jsonline.Reader, key string, e *clock.Estimate) bool {
	var to *int64
	switch key {
	case "offset_ns":
		to = &e.OffsetNS
	case "skew_ppb":
		to = &e.SkewPPB
	case "skew_err_ppb":
		to = &e.SkewErrPPB
	case "eta_ppb_per_s":
		to = &e.EtaPPBPerS
	case "lower_ns":
		to = &e.LowerNS
	case "upper_ns":
		to = &e.UpperNS
	case "at_ns":
		to = &e.AtNS
	case "valid_from_ns":
		to = &e.ValidFromNS
	case "void_after_ns":
		to = &e.VoidAfterNS
	case "seq":
		to = &e.Seq
	case "rtt_ns":
		to = &e.RTTNS
	case "samples":
		to = &e.Samples
	default:
		return false
	}
	*to = r.Int()
	return true
}

// usualStamps is how many a router's record has, which has the most. Pending records hold the room of all.
const usualStamps = 14

// ParseStamps reads the member "stamps".
func ParseStamps(r *jsonline.Reader, s *Stamps) {
	if !r.Object() {
		return
	}
	var values []int64 // one allocation for the stamps of a usual record
	fields := s.All()
	next := 0 // stamps mostly come in order
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "clock":
			s.Clock = int(r.Int())
			continue
		case "engine_clock":
			s.EngineClock = int(r.Int())
			continue
		}
		at := -1
		for i := range fields {
			if j := (next + i) % StampCount; fields[j].Name == key {
				at = j
				break
			}
		}
		if at < 0 {
			r.Skip()
			continue
		}
		next = at + 1
		if r.Null() {
			continue
		}
		if len(values) == cap(values) {
			values = make([]int64, 0, usualStamps)
		}
		values = append(values, r.Int())
		*fields[at].NS = &values[len(values)-1]
	}
}

// ParseCount reads a count, or the null of one that is not known.
func ParseCount(r *jsonline.Reader) (n int, unknown bool) {
	if r.Null() {
		return 0, true
	}
	return int(r.Int()), false
}

// ParseTokens reads the member "tokens".
func ParseTokens(r *jsonline.Reader) (t Tokens) {
	if !r.Object() {
		return t
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "prompt":
			t.Prompt, t.NoPrompt = ParseCount(r)
		case "cached":
			t.Cached, t.NoCached = ParseCount(r)
		case "output":
			t.Output = int(r.Int())
		default:
			r.Skip()
		}
	}
	return t
}

// ParseKV reads the member "kv".
func ParseKV(r *jsonline.Reader) *infer.KVCounts {
	if !r.Object() {
		return nil
	}
	k := new(infer.KVCounts)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "alloc_total_blocks":
			k.AllocTotalBlocks = int(r.Int())
		case "alloc_new_blocks":
			k.AllocNewBlocks = int(r.Int())
		case "reused_blocks":
			k.ReusedBlocks = int(r.Int())
		case "partial_blocks":
			k.PartialBlocks = int(r.Int())
		case "host_blocks":
			k.HostBlocks = int(r.Int())
		case "disk_blocks":
			k.DiskBlocks = int(r.Int())
		case "missed_blocks":
			k.MissedBlocks = int(r.Int())
		default:
			r.Skip()
		}
	}
	return k
}
