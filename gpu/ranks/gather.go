package ranks

import (
	"slices"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/rows"
)

// Rows of all ranks come together in one of two ways. They ride with the words of the iterations' rounds, and rank 0 aligns them
// by their iterations; or, with rows.Sink.AllRanks, a rank says in these rounds only how many it has made, and as soon as all have
// made some more, they meet in another round that carries as many of each. Sampling and drains are the same on all ranks, so that
// the n-th rows of all are one set. A rank that has said how many need not say it again: who lacks some comes to a round once it
// has made them.

// gather gives what this rank says in a round of rows, false if not all have made any that are not told. It follows from the words.
func (m *member) gather(words []engine.Word) (engine.Word, bool) {
	made := words[0].Made
	for i := range words {
		made = min(made, words[i].Made)
	}
	n := int(made - m.told)
	if n == 0 {
		return engine.Word{}, false
	}
	w := words[m.rank]
	w.Rows, m.rows, m.told = slices.Clone(m.rows[:n]), m.rows[n:], made
	return w, true
}

// gathered takes in a round of rows, on the goroutine of rank 0's engine; see align.
func (g *Group) gathered(words []engine.Word) {
	n := len(words[0].Rows)
	for i := range words {
		n = min(n, len(words[i].Rows)) // all have as many
	}
	for i := range n {
		set := make([]*rows.Row, len(words))
		for rank := range words {
			set[rank] = g.kept(&words[rank].Rows[i])
		}
		for _, r := range g.aligner.Whole(set) {
			g.put(r)
		}
	}
}
