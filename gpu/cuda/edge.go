//go:build cuda

package cuda

import (
	"meridian.internal/shared/clock"
)

// exchange is one question to the card's clock: it showed card between the host's ask and answer.
type exchange struct{ ask, card, answer int64 }

// anchor is what a burst of exchanges proves: at card's time the host's steady clock was ahead by lo to hi.
type anchor struct{ card, lo, hi int64 }

// edge is the estimate of the host's steady clock minus the card's clock: a line that lies between the bounds of all
// anchors. It is pure. As long as the rates of both clocks do not change faster than wander says, its bounds are proven.
type edge struct {
	anchors  []anchor // in rising time
	restarts int64    // how often no line fitted: the card's clock was set, or a rate jumped
	bursts   int64
	width    int64 // host ns of the narrowest exchange of the newest burst
}

const (
	maxAnchors  = 64
	cardStep    = 32     // ns that the card's clock advances by at a time
	priorRate   = 200e-6 // rates differ by no more than this
	rateWander  = 2e-9   // a second: how fast the difference of the rates may change
	nsPerSecond = 1e9
)

// add takes a burst. The narrowest exchange bounds best; all of them hold.
func (e *edge) add(burst []exchange) {
	if len(burst) == 0 {
		return
	}
	best := burst[0]
	for _, x := range burst[1:] {
		if x.answer-x.ask < best.answer-best.ask {
			best = x
		}
	}
	a := anchor{best.card, best.ask - best.card - cardStep, best.answer - best.card}
	e.bursts++
	e.width = best.answer - best.ask
	e.anchors = append(e.anchors, a)
	if len(e.anchors) > maxAnchors {
		e.anchors = append(e.anchors[:0], e.anchors[1:]...)
	}
	if lo, hi := e.rates(); lo > hi {
		e.anchors = append(e.anchors[:0], a)
		e.restarts++
	} else if lo, hi, _ := e.at(a.card); lo > hi {
		e.anchors = append(e.anchors[:0], a)
		e.restarts++
	}
}

// rates bounds the slope of the offset from both sides.
func (e *edge) rates() (lo, hi float64) {
	lo, hi = -priorRate, priorRate
	newest := e.anchors[len(e.anchors)-1]
	for _, a := range e.anchors[:len(e.anchors)-1] {
		span := float64(newest.card - a.card)
		if span <= 0 {
			return 1, -1
		}
		slack := rateWander * span / nsPerSecond
		lo = max(lo, float64(newest.lo-a.hi)/span-slack)
		hi = min(hi, float64(newest.hi-a.lo)/span+slack)
	}
	return lo, hi
}

// at bounds the offset at a time of the card; false: nothing is known.
func (e *edge) at(card int64) (lo, hi int64, ok bool) {
	if len(e.anchors) == 0 {
		return 0, 0, false
	}
	rateLo, rateHi := e.rates()
	for i, a := range e.anchors {
		d := float64(card - a.card)
		slack := rateWander * d * d / nsPerSecond
		l, h := a.lo+int64(min(rateLo*d, rateHi*d)-slack), a.hi+int64(max(rateLo*d, rateHi*d)+slack)
		if i == 0 {
			lo, hi = l, h
			continue
		}
		lo, hi = max(lo, l), min(hi, h)
	}
	return lo, hi, true
}

// estimate is the edge at a time of the card, in the words of records; its reference is the process's clock, which the
// caller names.
func (e *edge) estimate(card int64, local clock.ID) (clock.Estimate, bool) {
	lo, hi, ok := e.at(card)
	if !ok {
		return clock.Estimate{}, false
	}
	rateLo, rateHi := e.rates()
	state := clock.Synced
	if len(e.anchors) < 2 {
		state = clock.Joining
	}
	return clock.Estimate{
		Local: local, OffsetNS: lo + (hi-lo)/2, LowerNS: lo, UpperNS: hi, AtNS: card,
		SkewPPB: int64((rateLo + rateHi) / 2 * nsPerSecond), SkewErrPPB: int64((rateHi-rateLo)/2*nsPerSecond) + 1,
		EtaPPBPerS: int64(rateWander * nsPerSecond), ValidFromNS: e.anchors[0].card, Seq: e.bursts, State: state,
		Transport: "mailbox", RTTNS: e.width, Samples: int64(len(e.anchors)),
	}, true
}
