package timeline

import (
	"slices"
	"testing"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// endedAt is what the processes of a request know of it when it is cancelled at a moment, ns of the router's clock: no stamp lies after it.
func endedAt(at int64) []*phase.Record {
	var known []*phase.Record
	for _, r := range ring() {
		here := at + map[phase.Role]int64{phase.Ctx: ctxShift, phase.Gen: genShift}[r.Role]
		later := func(ns *int64) bool { return ns != nil && *ns > here }
		if later(r.Stamps.ReceiveNS) {
			continue // it never heard of it
		}
		for _, f := range r.Stamps.All() {
			if later(*f.NS) {
				*f.NS = nil
			}
		}
		if r.Stamps.EndNS == nil {
			r.Stamps.EndNS, r.Outcome, r.FinishReason = &here, phase.Cancelled, ""
		}
		r.Chunks = slices.DeleteFunc(r.Chunks, func(c infer.Chunk) bool { return c.SampleEndNS > here })
		if t := r.Transfer; t != nil {
			for _, ns := range []**int64{&t.StartNS, &t.LastByteNS, &t.InstalledNS} {
				if later(*ns) {
					*ns = nil
				}
			}
		}
		known = append(known, r)
	}
	return known
}

// TestWhatACancelledRequestDidNotReachIsAbsent cancels a request at every tenth of a millisecond of its life.
func TestWhatACancelledRequestDidNotReachIsAbsent(t *testing.T) {
	whole := Merge(parts(ring()), clocks())
	sent := int64(14_100_000) // the first token, to the client
	for after := ms / 10; after < *whole.E2ENS; after += ms / 10 {
		l := Merge(parts(endedAt(t0+after)), clocks())
		if l.Outcome != phase.Cancelled || *l.E2ENS != after || l.NegativeSpans != 0 || len(l.Violations) != 0 {
			t.Errorf("after %d ns: outcome %s, e2e %d, %d negative spans, violations %v\n%s", after, l.Outcome, *l.E2ENS, l.NegativeSpans, l.Violations, shape(l))
		}
		if (l.TTFTNS == nil) != (after < sent) {
			t.Errorf("after %d ns: ttft %v, the first token was sent after %d", after, l.TTFTNS, sent)
		}
		sum := *l.UnaccountedNS // what ran when it ended
		for _, s := range l.Spans {
			if sum += s.DurNS; s.DurNS < 0 || s.StartNS+s.DurNS > after {
				t.Errorf("after %d ns: %s is from %d and lasts %d ns", after, s.Name, s.StartNS, s.DurNS)
			}
		}
		if sum != after || *l.UnaccountedNS < 0 {
			t.Errorf("after %d ns: spans and %d ns unaccounted sum to %d\n%s", after, *l.UnaccountedNS, sum, shape(l))
		}
	}
}
