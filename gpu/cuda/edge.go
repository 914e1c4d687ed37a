//go:build cuda

package cuda

import (
	"math"

	"meridian.internal/shared/clock"
)

// exchange is one question to the card's clock: it showed card between the host's ask and answer.
type exchange struct{ ask, card, answer int64 }

// anchor is what a burst of exchanges proves: at one time of the card the host's steady clock was ahead by lo.ns at least, at
// another one by hi.ns at most. The way there was shortest in one exchange, the way back in another.
type anchor struct{ lo, hi side }

// side bounds the offset from one side at a time of the card.
type side struct{ card, ns int64 }

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

// add takes a burst. All of its bounds hold; of each side the closest one is kept.
func (e *edge) add(burst []exchange) {
	if len(burst) == 0 {
		return
	}
	a := anchor{side{burst[0].card, math.MinInt64}, side{burst[0].card, math.MaxInt64}}
	e.width = math.MaxInt64
	for _, x := range burst {
		if lo := x.ask - x.card - cardStep; lo > a.lo.ns {
			a.lo = side{x.card, lo}
		}
		if hi := x.answer - x.card; hi < a.hi.ns {
			a.hi = side{x.card, hi}
		}
		e.width = min(e.width, x.answer-x.ask)
	}
	e.bursts++
	e.anchors = append(e.anchors, a)
	if len(e.anchors) > maxAnchors {
		e.anchors = append(e.anchors[:0], e.anchors[1:]...)
	}
	if lo, hi := e.rates(); lo > hi {
		e.anchors = append(e.anchors[:0], a)
		e.restarts++
	} else if lo, hi, _ := e.at(e.newest()); lo > hi {
		e.anchors = append(e.anchors[:0], a)
		e.restarts++
	}
}

// newest is the time of the card up to which there are bounds; there is an anchor.
func (e *edge) newest() int64 {
	a := e.anchors[len(e.anchors)-1]
	return max(a.lo.card, a.hi.card)
}

// rates bounds the slope of the offset at the newest time from both sides.
func (e *edge) rates() (lo, hi float64) {
	lo, hi = -priorRate, priorRate
	last, newest := e.anchors[len(e.anchors)-1], e.newest()
	for _, a := range e.anchors[:len(e.anchors)-1] {
		least, most := float64(last.lo.card-a.hi.card), float64(last.hi.card-a.lo.card)
		if least <= 0 || most <= 0 {
			return 1, -1
		}
		slack := wandered(newest - min(a.lo.card, a.hi.card))
		lo = max(lo, float64(last.lo.ns-a.hi.ns)/least-slack)
		hi = min(hi, float64(last.hi.ns-a.lo.ns)/most+slack)
	}
	return lo, hi
}

// wandered is by how much the slope may have been another one so many ns away.
func wandered(ns int64) float64 { return rateWander * math.Abs(float64(ns)) / nsPerSecond }

// at bounds the offset at a time of the card; false: nothing is known.
func (e *edge) at(card int64) (lo, hi int64, ok bool) {
	if len(e.anchors) == 0 {
		return 0, 0, false
	}
	rateLo, rateHi := e.rates()
	newest := e.newest()
	lo, hi = math.MinInt64, math.MaxInt64
	// The slope on the way from a side to card is that of the newest time but for what it may wander from there to the farther end.
	slack := func(from int64) float64 {
		return max(wandered(newest-card), wandered(newest-from)) * math.Abs(float64(card-from))
	}
	for _, a := range e.anchors {
		d := float64(card - a.lo.card)
		lo = max(lo, a.lo.ns+int64(math.Floor(min(rateLo*d, rateHi*d)-slack(a.lo.card))))
		d = float64(card - a.hi.card)
		hi = min(hi, a.hi.ns+int64(math.Ceil(max(rateLo*d, rateHi*d)+slack(a.hi.card))))
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
		EtaPPBPerS: int64(rateWander * nsPerSecond), ValidFromNS: min(e.anchors[0].lo.card, e.anchors[0].hi.card), Seq: e.bursts, State: state,
		Transport: "mailbox", RTTNS: e.width, Samples: int64(len(e.anchors)),
	}, true
}
