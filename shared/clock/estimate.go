package clock

// State of an estimate: how far it may be trusted.
type State = string

// The states of an estimate.
const (
	Joining     State = "joining"     // too few exchanges yet: records keep raw time
	Synced      State = "synced"      // fresh, and the bound is small enough
	Holdover    State = "holdover"    // no fresh burst: the bound grows
	Suspect     State = "suspect"     // a prediction failed: the bound is widened
	Quarantined State = "quarantined" // proven to be wrong repeatedly: not used
	Void        State = "void"        // too old or too wide: not used
	Identity    State = "identity"    // one kernel and one time namespace, proven: the same clock
)

// Estimate is one clock against another at one moment. offset = reference - local; add it to a local stamp.
//
// The truth lies within [LowerNS, UpperNS] at AtNS, and the interval widens away from AtNS by SkewErrPPB and EtaPPBPerS.
type Estimate struct {
	Reference   ID     `json:"reference"`
	Local       ID     `json:"local"`
	OffsetNS    int64  `json:"offset_ns"`
	SkewPPB     int64  `json:"skew_ppb"`      // d(offset)/d(local)
	SkewErrPPB  int64  `json:"skew_err_ppb"`  // how far the skew may be off
	EtaPPBPerS  int64  `json:"eta_ppb_per_s"` // declared limit on the change of skew
	LowerNS     int64  `json:"lower_ns"`      // bounds of the offset at AtNS
	UpperNS     int64  `json:"upper_ns"`
	AtNS        int64  `json:"at_ns"`                   // local ns that the offset and the bounds are for
	ValidFromNS int64  `json:"valid_from_ns"`           // earliest local stamp that it may convert
	VoidAfterNS int64  `json:"void_after_ns,omitempty"` // latest; absent: no limit
	Seq         int64  `json:"seq"`
	State       State  `json:"state"`
	Transport   string `json:"transport,omitempty"` // udp-kernel, udp, http, identity
	Via         string `json:"via,omitempty"`       // who measured it, when composed from two edges
	RTTNS       int64  `json:"rtt_ns,omitempty"`    // least round trip of the newest burst
	Samples     int64  `json:"samples,omitempty"`   // exchanges behind it
}

// BoundNS is how far OffsetNS may be from the truth at AtNS.
func (e Estimate) BoundNS() int64 { return max(e.UpperNS-e.OffsetNS, e.OffsetNS-e.LowerNS) }

// Usable says whether stamps may be converted with e.
func (e Estimate) Usable() bool {
	switch e.State {
	case Synced, Holdover, Suspect, Identity:
		return true
	}
	return false
}

// BoundAt is how far the offset that OffsetAt gives for localNS may be from the truth.
func (e Estimate) BoundAt(localNS int64) int64 {
	d := float64(abs(localNS - e.AtNS))
	return e.BoundNS() + int64(d*float64(e.SkewErrPPB)*1e-9+d*d*1e-18*float64(e.EtaPPBPerS)/2+0.999)
}

// OffsetAt is the offset at localNS along the estimated line.
func (e Estimate) OffsetAt(localNS int64) int64 {
	return e.OffsetNS + int64(float64(localNS-e.AtNS)*float64(e.SkewPPB)*1e-9)
}

// Convert places a local stamp on the reference clock: the truth lies within boundNS of refNS. Not ok: e is not usable, or
// does not reach localNS; then there is no answer, and 0 is not one.
func (e Estimate) Convert(localNS int64) (refNS, boundNS int64, ok bool) {
	if !e.Usable() || localNS < e.ValidFromNS || (e.VoidAfterNS != 0 && localNS > e.VoidAfterNS) {
		return 0, 0, false
	}
	return localNS + e.OffsetAt(localNS), e.BoundAt(localNS), true
}

// Invert turns the estimate round: what was the reference becomes the local clock.
func (e Estimate) Invert() Estimate {
	at := e.AtNS + e.OffsetNS
	r := e
	r.Reference, r.Local = e.Local, e.Reference
	r.OffsetNS, r.LowerNS, r.UpperNS = -e.OffsetNS, -e.UpperNS, -e.LowerNS
	k := float64(e.SkewPPB) * 1e-9
	r.SkewPPB = int64(-float64(e.SkewPPB) / (1 + k))
	r.SkewErrPPB = grow(e.SkewErrPPB, k)
	r.EtaPPBPerS = grow(e.EtaPPBPerS, k)
	// AtNS is read off the point estimate, so the true reference stamp there is off by up to the bound; what the skew does
	// over that distance goes into the bound.
	slop := int64(float64(e.BoundNS())*(abs64(k)+float64(e.SkewErrPPB)*1e-9)) + 1
	r.LowerNS, r.UpperNS = r.LowerNS-slop, r.UpperNS+slop
	r.AtNS = at
	r.ValidFromNS = e.ValidFromNS + e.OffsetAt(e.ValidFromNS)
	if e.VoidAfterNS != 0 {
		r.VoidAfterNS = e.VoidAfterNS + e.OffsetAt(e.VoidAfterNS)
	}
	return r
}

// Compose chains two estimates: a has the wanted reference, b's reference is a's local clock. Bounds add. Not ok: the
// clocks do not meet or one side cannot convert.
func Compose(a, b Estimate, via string) (Estimate, bool) {
	if a.Local.Epoch() != b.Reference.Epoch() || a.Local.Epoch() == "" {
		return Estimate{}, false
	}
	mid := b.AtNS + b.OffsetNS
	if _, _, ok := a.Convert(mid); !ok || !b.Usable() {
		return Estimate{}, false
	}
	ka, kb := float64(a.SkewPPB)*1e-9, float64(b.SkewPPB)*1e-9
	off := a.OffsetAt(mid) + b.OffsetNS
	// The true mid stamp may be off by b's bound, over which a's offset moves by its skew.
	slop := int64(float64(b.BoundNS())*(abs64(ka)+float64(a.SkewErrPPB)*1e-9)) + 1
	grew := a.BoundAt(mid) - a.BoundNS() + slop
	shift := a.OffsetAt(mid) - a.OffsetNS
	c := Estimate{
		Reference: a.Reference, Local: b.Local, OffsetNS: off,
		SkewPPB:    int64((ka + kb + ka*kb) * 1e9),
		SkewErrPPB: grow(a.SkewErrPPB, kb) + grow(b.SkewErrPPB, ka) + driftOver(a, mid),
		EtaPPBPerS: grow(a.EtaPPBPerS, 2*kb) + grow(b.EtaPPBPerS, ka),
		LowerNS:    a.LowerNS + shift - grew + b.LowerNS, UpperNS: a.UpperNS + shift + grew + b.UpperNS,
		AtNS: b.AtNS, ValidFromNS: max(b.ValidFromNS, a.ValidFromNS-b.OffsetAt(b.AtNS)), VoidAfterNS: b.VoidAfterNS,
		Seq: max(a.Seq, b.Seq), State: worse(a.State, b.State), Transport: transports(a, b), Via: via,
		RTTNS: a.RTTNS + b.RTTNS, Samples: min(a.Samples, b.Samples),
	}
	if a.VoidAfterNS != 0 {
		v := a.VoidAfterNS - b.OffsetNS
		if c.VoidAfterNS == 0 || v < c.VoidAfterNS {
			c.VoidAfterNS = v
		}
	}
	return c, true
}

// driftOver is how far a's skew may have moved between AtNS and mid.
func driftOver(a Estimate, mid int64) int64 {
	return int64(float64(abs(mid-a.AtNS))*1e-9*float64(a.EtaPPBPerS)) + 1
}

func transports(a, b Estimate) string {
	switch {
	case a.Transport == b.Transport || b.Transport == "":
		return a.Transport
	case a.Transport == "":
		return b.Transport
	}
	return b.Transport + "+" + a.Transport
}

func worse(a, b State) State {
	order := []State{Identity, Synced, Holdover, Suspect, Joining, Quarantined, Void}
	rank := func(s State) int {
		for i, o := range order {
			if o == s {
				return i
			}
		}
		return len(order)
	}
	if rank(b) > rank(a) {
		return b
	}
	return a
}

func grow(ppb int64, k float64) int64 {
	if ppb == 0 {
		return 0
	}
	return int64(float64(ppb)*(1+abs64(k))) + 1
}

func abs64(x float64) float64 {
	if x < 0 {
		return -x
	}
	return x
}
