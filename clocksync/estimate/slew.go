package estimate

import (
	"math"
	"slices"

	"meridian.internal/clocksync/ntp"
)

// NTP slews CLOCK_MONOTONIC, by up to 83 333 ppm (chrony's default), which no limit on the physics of a crystal covers.
// CLOCK_MONOTONIC_RAW is not slewed. Each side reads both clocks as a pair in every burst.
//
// As long as the pairs of a side lie on one straight line its slew has not changed, and a constant slew is a part of the
// skew: then the steady clocks are compared as they are, and no error of a pair enters. Once a line no longer passes
// through all pairs of a side, both clocks are compared in their raw form, and each stamp pays for the pair next to it.

const (
	maxPairs   = 1024
	maxPairErr = 20_000 // ns; a pair that was torn by a preemption says nothing
)

// slewTrack follows raw - steady of one side.
type slewTrack struct {
	pairs    []ntp.Pair // ascending
	anchor   int        // index of the pair at which the present line begins
	r1, r2   float64    // rates of all lines through the pairs since the anchor
	changes  int
	changed  int64 // steady ns of the newest change
	sharpest float64
}

// add takes a pair and reports whether the rate changed since the line began.
func (s *slewTrack) add(p *ntp.Pair) bool {
	if p == nil || !p.Sane() || p.ErrNS < 0 || p.ErrNS > maxPairErr {
		return false
	}
	n := len(s.pairs)
	if n > 0 && p.AtNS <= s.pairs[n-1].AtNS {
		return false
	}
	s.pairs = append(s.pairs, *p)
	if n == 0 || s.anchor == n {
		s.begin(n)
		return false
	}
	lo, hi := rates(s.pairs[s.anchor], *p)
	r1, r2 := max(s.r1, lo), min(s.r2, hi)
	changed := r1 > r2
	if changed {
		s.changes++
		s.changed = p.AtNS
		old := (s.r1 + s.r2) / 2
		s.begin(n - 1)
		s.r1, s.r2 = rates(s.pairs[n-1], *p)
		if !math.IsInf(old, 0) && !math.IsNaN(old) {
			s.sharpest = max(s.sharpest*0.9, math.Abs((s.r1+s.r2)/2-old))
		}
	} else {
		s.r1, s.r2 = r1, r2
	}
	if len(s.pairs) > maxPairs {
		drop := maxPairs / 4
		s.pairs = append(s.pairs[:0], s.pairs[drop:]...)
		s.anchor = max(0, s.anchor-drop)
	}
	return changed
}

func (s *slewTrack) begin(anchor int) {
	s.anchor, s.r1, s.r2 = anchor, math.Inf(-1), math.Inf(1)
}

// restart begins a new line without counting a change: another process reads the same clocks with another anchor.
func (s *slewTrack) restart() { s.anchor = len(s.pairs) }

// suspect notes a change that only the exchanges have shown.
func (s *slewTrack) suspect() {
	s.changes++
	s.changed = s.pairs[len(s.pairs)-1].AtNS
}

// rates are those of all lines that pass through two pairs.
func rates(a, b ntp.Pair) (lo, hi float64) {
	dt := float64(b.AtNS - a.AtNS)
	d, e := float64(b.DiffNS-a.DiffNS), float64(a.ErrNS+b.ErrNS)
	return (d - e) / dt, (d + e) / dt
}

// diff returns raw - steady at t and how far that may be off. Between pairs it is interpolated; beyond them the last rate
// goes on, and a slew as sharp as the sharpest seen may have begun unseen.
func (s *slewTrack) diff(t int64) (d, err float64) {
	n := len(s.pairs)
	switch n {
	case 0:
		return 0, 0
	case 1:
		return float64(s.pairs[0].DiffNS), float64(s.pairs[0].ErrNS)
	}
	i, _ := slices.BinarySearchFunc(s.pairs, t, func(p ntp.Pair, t int64) int {
		if p.AtNS < t {
			return -1
		}
		return 1
	})
	k := min(max(i-1, 0), n-2)
	a, b := s.pairs[k], s.pairs[k+1]
	dt := float64(b.AtNS - a.AtNS)
	r := float64(b.DiffNS-a.DiffNS) / dt
	u := float64(t - a.AtNS)
	d = float64(a.DiffNS) + r*u
	err = float64(max(a.ErrNS, b.ErrNS))
	if out := max(-u, u-dt, 0); out > 0 {
		e := float64(a.ErrNS+b.ErrNS) / dt
		return d, err + (e+s.sharpest)*out
	}
	return d, err + s.bend(k)*dt/4
}

// bend is how sharply the rate changes around interval k: by so much the curve may leave the chord, times dt/4.
func (s *slewTrack) bend(k int) float64 {
	rate := func(i int) (float64, bool) {
		if i < 0 || i+1 >= len(s.pairs) {
			return 0, false
		}
		lo, hi := rates(s.pairs[i], s.pairs[i+1])
		return (lo + hi) / 2, true
	}
	r, _ := rate(k)
	sharp := 0.0
	for _, j := range []int{k - 1, k + 1} {
		if o, ok := rate(j); ok {
			sharp = max(sharp, math.Abs(o-r))
		}
	}
	return sharp
}

// rate returns d(raw - steady)/dt now and how far it may be off.
func (s *slewTrack) rate() (r, err float64) {
	if len(s.pairs) < 2 || math.IsInf(s.r1, 0) {
		return 0, 0
	}
	return (s.r1 + s.r2) / 2, (s.r2-s.r1)/2 + s.sharpest
}

// slews are the tracks of both sides.
type slews struct{ ref, local slewTrack }

// add takes the pairs of a burst and reports whether a rate changed.
func (s *slews) add(ref, local *ntp.Pair) bool {
	a, b := s.ref.add(ref), s.local.add(local)
	return a || b
}

// recent says that a slew changed so lately that samples from before are still in use.
func (s *slews) recent(refNow, localNow, history int64) bool {
	return s.ref.changes > 0 && refNow-s.ref.changed < history || s.local.changes > 0 && localNow-s.local.changed < history
}

// shift is what turns an offset of the steady clocks at local time n into one of the raw clocks, how far that may be off,
// and what turns local steady time into raw.
func (s *slews) shift(n, offset int64) (v, err, x float64) {
	dr, er := s.ref.diff(n + offset)
	dn, en := s.local.diff(n)
	return dr - dn, er + en, dn
}
