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
		e.enter(b, max(b.loX, b.upX), &v)
		e.stats.Restored++
	}
}

// AddBounds takes bounds that were proven otherwise than by an exchange of ours. It is held against the prediction as a
// burst is.
func (e *Estimator) AddBounds(s Stored) Verdict {
	var v Verdict
	b := bestOf{lo: s.LowerNS, loX: s.LowerAtNS, up: s.UpperNS, upX: s.UpperAtNS, ok: true}
	now := max(b.loX, b.upX)
	e.stats.Bursts++
	e.stats.Exchanges++
	if b.excluded(e.lim.rho) {
		v.Impossible = 1
		e.stats.Impossible++
	} else {
		e.enter(b, now, &v)
	}
	e.judge(v, now)
	return v
}
