package breaker

import (
	"math/bits"
	"slices"
	"time"
)

const (
	hedgeShare  = 0.05 // of the requests may get a second prefill, in the long run
	hedgeMost   = 5.0  // that may follow each other
	hedgeWindow = 64   // prefills of a size that are remembered
	hedgeLeast  = 16   // fewer say nothing of a quantile
)

// Hedge decides when a prefill takes so long that a second one beside it is worth its cost: when it has taken longer than a
// quantile of the last prefills of about its size. A budget bounds how often.
type Hedge struct {
	quantile float64
	budget   float64
	sizes    [33]window // by the bits of the prompt's length
}

// window is a ring of times.
type window struct {
	ns    [hedgeWindow]int64
	count int
}

// NewHedge makes one for a quantile between 0 and 1.
func NewHedge(quantile float64) *Hedge { return &Hedge{quantile: quantile, budget: 1} }

func (h *Hedge) size(tokens int) *window {
	return &h.sizes[min(bits.Len(uint(max(tokens, 0))), len(h.sizes)-1)]
}

// Request adds what a request earns.
func (h *Hedge) Request() { h.budget = min(h.budget+hedgeShare, hedgeMost) }

// Observe takes the time of a prefill of so many prompt tokens.
func (h *Hedge) Observe(tokens int, ns int64) {
	w := h.size(tokens)
	w.ns[w.count%hedgeWindow] = ns
	w.count++
}

// After is how long to wait for a prefill; false: too little was seen.
func (h *Hedge) After(tokens int) (time.Duration, bool) {
	w := h.size(tokens)
	n := min(w.count, hedgeWindow)
	if n < hedgeLeast {
		return 0, false
	}
	ns := slices.Clone(w.ns[:n])
	slices.Sort(ns)
	return time.Duration(ns[min(int(h.quantile*float64(n)), n-1)]), true
}

// Take spends one hedge; false when there is none left.
func (h *Hedge) Take() bool {
	if h.budget < 1 {
		return false
	}
	h.budget--
	return true
}
