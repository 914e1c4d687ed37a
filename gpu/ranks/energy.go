package ranks

import (
	"slices"
	"sync"

	"meridian.internal/gpu/engine"
)

// bill shares the joules of a card that several ranks use among these, by the tokens that each ran while the card's counter moved.
// What it draws while none runs anything is nobody's. The goroutines of the ranks' engines use it.
type bill struct {
	read func() (joules float64, ok bool)

	mu     sync.Mutex // guards the fields below
	last   float64
	know   bool      // last was read
	tokens []int     // by rank, since the counter moved
	joules []float64 // by rank
}

// ran counts the tokens of a rank's step.
func (b *bill) ran(rank, tokens int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens[rank] += tokens
}

// of is what a rank has used; false if it cannot be known.
func (b *bill) of(rank int) (joules float64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now, ok := b.read()
	if !ok {
		return 0, false
	}
	if used := now - b.last; b.know && used > 0 {
		all := 0
		for _, n := range b.tokens {
			all += n
		}
		for i, n := range b.tokens {
			if n > 0 {
				b.joules[i] += used * float64(n) / float64(all)
			}
			b.tokens[i] = 0
		}
	}
	b.last, b.know = now, true
	return b.joules[rank], true
}

// bills are those of the cards that several ranks use, by card. If the ranks are processes (apart) nobody knows the tokens of all of them: nor what
// is whose.
func (o *Options) bills(apart bool) map[int]*bill {
	out := map[int]*bill{}
	if o.Sink.Energy == nil {
		return out
	}
	users := map[int]int{}
	for _, cards := range o.Cards {
		for _, card := range cards {
			if users[card]++; users[card] == 2 {
				out[card] = &bill{
					read: func() (float64, bool) {
						if apart {
							return 0, false
						}
						return o.Sink.Energy([]int{card})
					},
					tokens: make([]int, len(o.Cards)), joules: make([]float64, len(o.Cards)),
				}
			}
		}
	}
	return out
}

// share adds a rank's part of the cards that it uses with others to what its engine takes for the energy of its device.
func (o *Options) share(cfg *engine.Config, rank int, all map[int]*bill) {
	if rank >= len(o.Cards) {
		return
	}
	var mine []*bill
	for card, b := range all {
		if slices.Contains(o.Cards[rank], card) {
			mine = append(mine, b)
		}
	}
	if len(mine) == 0 {
		return
	}
	own, alone := cfg.Energy, len(o.own(rank)) == 0
	cfg.Energy = func() (joules float64, ok bool) {
		if !alone {
			if joules, ok = own(); !ok {
				return 0, false
			}
		}
		for _, b := range mine {
			part, ok := b.of(rank)
			if !ok {
				return 0, false
			}
			joules += part
		}
		return joules, true
	}
	each := cfg.OnIteration
	cfg.OnIteration = func(it *engine.Iteration) {
		for _, b := range mine {
			b.ran(rank, it.ContextTokens+it.DecodeSeqs)
		}
		if each != nil {
			each(it)
		}
	}
}
