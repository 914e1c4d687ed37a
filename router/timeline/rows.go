package timeline

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// stampNames is the order of the row stamps_ns: that of phase.Stamps. New ones go to its end.
var stampNames = func() (names [phase.StampCount]string) {
	for i, s := range new(phase.Stamps).All() {
		names[i] = s.Name
	}
	return names
}()

// transferNames is the order of the row transfer_ns.
var transferNames = [...]string{"requested_ns", "start_ns", "last_byte_ns", "installed_ns"}

// chunkNames is the order of the columns of chunks. The cuts between stages follow, if there are stages.
var chunkNames = []string{"iter", "tokens", "kv_tokens", "batch_size", "forward_start_ns", "forward_end_ns", "sample_end_ns"}
var stepNames = []string{"step", "iter", "kv_tokens", "batch_size", "forward_start_ns", "forward_end_ns", "sample_end_ns", "token_ns"} // and tokens, where any are more than one

// candidateColumns is the order of the columns of candidates after the first, which has their nodes. Scores are its second.
var candidateColumns = [...]struct {
	name string
	get  func(*phase.Candidate) (v int64, ok bool)
	set  func(*phase.Candidate, int64)
}{
	{"running", func(c *phase.Candidate) (int64, bool) { return int64(c.Running), true }, func(c *phase.Candidate, v int64) { c.Running = int(v) }},
	{"waiting", func(c *phase.Candidate) (int64, bool) { return int64(c.Waiting), true }, func(c *phase.Candidate, v int64) { c.Waiting = int(v) }},
	{"load_age_ns", func(c *phase.Candidate) (int64, bool) { return known(c.LoadAgeNS) }, func(c *phase.Candidate, v int64) { c.LoadAgeNS = &v }},
	{"queued_tokens", func(c *phase.Candidate) (int64, bool) { return int64(c.QueuedTokens), true }, func(c *phase.Candidate, v int64) { c.QueuedTokens = int(v) }},
	{"reserved", func(c *phase.Candidate) (int64, bool) { return int64(c.Reserved), true }, func(c *phase.Candidate, v int64) { c.Reserved = int(v) }},
	{"matched_tokens", func(c *phase.Candidate) (int64, bool) { return known(c.MatchedTokens) }, func(c *phase.Candidate, v int64) { c.MatchedTokens = &v }},
}

// candidateNames is that order.
var candidateNames = func() []string {
	names := []string{"node", "score"}
	for _, c := range candidateColumns {
		names = append(names, c.name)
	}
	return names
}()

func known(v *int64) (int64, bool) {
	if v == nil {
		return 0, false
	}
	return *v, true
}

// is says whether c is the reference clock itself, which needs no conversion.
func (c *PhaseClock) is(reference clock.ID) bool {
	return c.ID == reference && c.State == clock.Identity && c.OffsetNS != nil && *c.OffsetNS == 0 && c.BoundNS != nil && *c.BoundNS == 0 &&
		c.SkewPPB == 0 && c.AtNS == 0 && c.Via == ""
}

// converter turns converted stamps of a phase back into raw ones.
type converter struct {
	clock *PhaseClock
	start int64 // StartNS of the line
}

// raw is the stamp whose conversion is ref; of two (where the clock runs fast, one in a million) the earlier.
func (c converter) raw(ref int64) int64 {
	if c.clock.OffsetNS == nil {
		return 0
	}
	e := clock.Estimate{OffsetNS: *c.clock.OffsetNS, SkewPPB: c.clock.SkewPPB, AtNS: c.clock.AtNS}
	at := ref + c.start
	guess := at - e.OffsetNS
	if e.SkewPPB == 0 {
		return guess
	}
	guess = at - e.OffsetAt(guess-(e.OffsetAt(guess)-e.OffsetNS))
	for _, raw := range [...]int64{guess - 1, guess, guess + 1} {
		if raw+e.OffsetAt(raw) == at {
			return raw
		}
	}
	return guess
}

// transferOf is what a phase's hand-over is unless the phase says otherwise: with the other leg of its attempt, and of the
// bytes of the line's.
func (l *Line) transferOf(p *Phase) (peer string, bytes int64) {
	for i := range l.Attempts {
		if a := &l.Attempts[i]; a.Sub == p.Sub && a.Attempt == p.Attempt && a.Role != p.Role {
			peer = a.Node
			break
		}
	}
	if l.Handover != nil {
		bytes = l.Handover.Bytes
	}
	return peer, bytes
}

// itersOf are the steps of a phase unless it says otherwise: those of its chunks. nil: it has none.
func itersOf(p *Phase) *phase.Iters {
	c := p.Chunks.Column("iter")
	if len(c) == 0 {
		return nil
	}
	return &phase.Iters{First: c[0], Last: c[len(c)-1]}
}
