//go:build cuda

package cuda

import "meridian.internal/gpu/backend"

// stamper puts stamps of the card's clock on the host's steady clock. The finisher owns it.
//
// The mailbox's estimate converts them. Every step also bounds them from both sides: it began after it was queued, and it
// had ended when the host saw that. A conversion never leaves these bounds.
type stamper struct {
	now   func() int64
	clock *cardClock
	last  int64 // the latest stamp that was given: stamps of steps do not overlap
}

// mark puts the three stamps of a step that was queued at sent and has just ended into its events.
func (c *stamper) mark(events *backend.EventSet, raw []uint64, sent int64) {
	seen := c.now()
	for _, card := range raw {
		ns, _, ok := c.clock.convert(int64(card))
		if !ok {
			ns = sent
		}
		c.last = max(c.last, min(max(ns, sent), seen))
		events.Mark(c.last)
	}
}
