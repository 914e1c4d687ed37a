// Package ntp owns the arithmetic of one four-stamp exchange and the packet that carries it. It is pure: no clock, no
// socket, no goroutine.
//
//	T1 client sends -> T2 server receives -> T3 server sends -> T4 client receives
//
// The client's clock is the reference, the server's the local one; offset = reference - local. A message cannot arrive
// before it was sent, so T1 - T2 <= offset(T2) and offset(T3) <= T4 - T3, whatever the path does. That holds if T1 and T3
// are not late and T2 and T4 are not early.
package ntp

// Exchange is one exchange. T1 and T4 are stamps of the reference clock, T2 and T3 of the local one, in ns.
type Exchange struct {
	T1, T2, T3, T4 int64
	ErrNS          int64 // how far the stamps of both sides together may be off; it widens both bounds
}

// Lower is the proven lower bound of the offset at T2.
func (e Exchange) Lower() int64 { return e.T1 - e.T2 - e.ErrNS }

// Upper is the proven upper bound of the offset at T3.
func (e Exchange) Upper() int64 { return e.T4 - e.T3 + e.ErrNS }

// Delay is the round trip without the server's own time. Negative beyond the errors: some stamp is a lie.
func (e Exchange) Delay() int64 { return (e.T4 - e.T1) - (e.T3 - e.T2) }

// Midpoint is the offset if both ways took equally long: RFC 5905's sample with our sign. It errs by at most Delay/2.
func (e Exchange) Midpoint() int64 {
	l, u := e.T1-e.T2, e.T4-e.T3
	return l + (u-l)/2
}

// Possible says whether causality allows the stamps of clocks whose rates differ by at most rho: the two bounds are of T2
// and T3, and while the server holds the exchange the offset moves.
func (e Exchange) Possible(rho float64) bool {
	if e.ErrNS < 0 || e.ErrNS > maxStamp || e.T4 < e.T1 || e.T3 < e.T2 || e.T2 < -maxStamp || e.T3 > maxStamp {
		return false
	}
	return float64(e.Lower()-e.Upper()) <= rho*float64(e.T3-e.T2)
}

// maxStamp is 73 years, more than a clock that counts from a boot shows: sums and differences of stamps do not overflow.
const maxStamp = 1 << 61

// Sane says whether sums and differences with the pair do not overflow.
func (p Pair) Sane() bool {
	return p.AtNS >= -maxStamp && p.AtNS <= maxStamp && p.DiffNS >= -maxStamp && p.DiffNS <= maxStamp
}

// Pair is a steady clock next to CLOCK_MONOTONIC_RAW, which NTP does not slew.
type Pair struct {
	AtNS   int64 `json:"at_ns"`   // steady
	DiffNS int64 `json:"diff_ns"` // raw - steady
	ErrNS  int64 `json:"err_ns"`  // half bracket
}
