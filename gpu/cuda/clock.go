//go:build cuda

package cuda

import "meridian.internal/gpu/backend"

// clock puts stamps of the card's clock on the host's steady clock. The finisher owns it.
//
// Every step bounds the offset from both sides: it began after it was queued, and it had ended when the host saw that.
// The offset is moved only as far as these bounds ask, so its error is at most the time that a launch or a wait takes,
// and a drift between the clocks, some millionths, is followed step by step.
type clock struct {
	now    func() int64
	set    bool
	offset int64 // steady clock minus the card's clock
	last   int64 // the latest stamp that was given: stamps of steps do not overlap
}

// stamps reads the three stamps of a step that was queued at sent and has just ended.
func (c *clock) stamps(raw []uint64, sent int64) backend.Stamps {
	seen, start, end := c.now(), int64(raw[0]), int64(raw[2])
	if lo, hi := sent-start, seen-end; !c.set {
		c.offset, c.set = lo+(hi-lo)/2, true
	} else {
		c.offset = max(min(c.offset, hi), lo)
	}
	at := func(i int) int64 {
		c.last = max(c.last, int64(raw[i])+c.offset)
		return c.last
	}
	return backend.Stamps{ForwardStartNS: at(0), ForwardEndNS: at(1), SampleEndNS: at(2)}
}
