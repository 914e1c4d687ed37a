package estimate

// Stored is what a burst proved, as it was logged: a restarted daemon rebuilds its proof from these.
type Stored struct {
	LowerNS, LowerAtNS int64 // the offset at local time LowerAtNS is at least LowerNS
	UpperNS, UpperAtNS int64
}

// Restore takes logged bounds, oldest first, before any burst. They were measured by another process, whose anchor
// differs, so they are widened a little. What contradicts is dropped as in Add.
func (e *Estimator) Restore(old []Stored) {
	for _, s := range old {
		b := bestOf{lo: s.LowerNS - instanceSlackNS, loX: s.LowerAtNS, up: s.UpperNS + instanceSlackNS, upX: s.UpperAtNS, ok: true}
		if b.excluded(e.lim.rho) {
			continue
		}
		var v Verdict
		first, now := e.cur == nil, max(b.loX, b.upX)
		e.absorb(b, now, &v)
		if first || now > e.newest {
			e.newest = now
		}
		e.stats.Restored++
	}
}
