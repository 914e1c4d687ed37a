package stats

import (
	"slices"

	"meridian.internal/shared/rows"
)

// Aligner makes sets out of the rows of many ranks: of each iteration the rows of all ranks, or none. It is pure, and belongs
// to one goroutine. Each rank gives its rows in order; a rank that had nothing to run gives one that says so (Synthetic).
type Aligner struct {
	ranks   int
	open    []set   // by iteration
	last    place   // of the newest set that was given
	told    []place // by rank: its newest drain
	dropped int64
}

// place orders rows: an iteration, then what was told when nothing was left to run after it, perhaps more than once.
type place struct {
	iter   int64
	drains int64 // 0: the row of the iteration
}

// placeOf counts the drains of a rank after an iteration.
func (a *Aligner) placeOf(r *rows.Row) place {
	p := place{iter: r.Iter}
	if told := &a.told[r.Rank]; r.Drain {
		if told.iter != r.Iter {
			*told = place{iter: r.Iter}
		}
		told.drains++
		p.drains = told.drains
	}
	return p
}

func (p place) compare(q place) int {
	switch {
	case p == q:
		return 0
	case p.iter < q.iter || p.iter == q.iter && p.drains < q.drains:
		return -1
	}
	return 1
}

// set is the rows of an iteration so far.
type set struct {
	place
	rows []*rows.Row // by rank; nil: not there yet
	n    int
}

// maxOpen bounds the iterations that wait for a rank. Ranks in lockstep are a few apart.
const maxOpen = 64

// NewAligner makes an aligner.
func NewAligner(ranks int) *Aligner {
	return &Aligner{ranks: ranks, last: place{iter: -1}, told: make([]place, ranks)}
}

// Dropped counts the rows that came to no set: those of an iteration whose set, or a later one, was given already, that came
// twice, or that another rank never told of.
func (a *Aligner) Dropped() int64 { return a.dropped }

// Add takes in a row, which it keeps, and gives the set of its iteration when that is complete: a row for each rank, in order.
// Sets come in the order of iterations.
func (a *Aligner) Add(r *rows.Row) []*rows.Row {
	if r.Rank < 0 || r.Rank >= int64(a.ranks) {
		a.dropped++
		return nil
	}
	p := a.placeOf(r)
	if p.compare(a.last) <= 0 {
		a.dropped++
		return nil
	}
	i, found := slices.BinarySearchFunc(a.open, p, func(s set, p place) int { return s.compare(p) })
	if !found {
		a.open = slices.Insert(a.open, i, set{place: p, rows: make([]*rows.Row, a.ranks)})
	}
	s := &a.open[i]
	if s.rows[r.Rank] != nil {
		a.dropped++
		return nil
	}
	s.rows[r.Rank] = r
	if s.n++; s.n < a.ranks {
		if len(a.open) > maxOpen {
			a.drop(1)
		}
		return nil
	}
	whole := s.rows
	a.last = p
	a.open[i].n = 0
	a.drop(i + 1) // what is older lacks a rank that has gone on
	own(whole, a.dropped)
	return whole
}

// Whole takes in a set that came together, and gives it if it has a row for each rank, in order and of one iteration, that is newer
// than what was given before.
func (a *Aligner) Whole(set []*rows.Row) []*rows.Row {
	if !a.isSet(set) {
		a.dropped += int64(len(set))
		return nil
	}
	own(set, a.dropped)
	return set
}

func (a *Aligner) isSet(set []*rows.Row) bool {
	if len(set) != a.ranks {
		return false
	}
	for rank, r := range set {
		if r.Rank != int64(rank) {
			return false
		}
	}
	p, alike := a.placeOf(set[0]), true
	for _, r := range set[1:] {
		alike = a.placeOf(r) == p && alike
	}
	if !alike || p.compare(a.last) <= 0 {
		return false
	}
	a.last = p
	return true
}

// Missing gives a row of nothing for each rank that has not told of an iteration that another has: what remains to be added
// when the ranks have ended, some of them an iteration before others.
func (a *Aligner) Missing() (list []*rows.Row) {
	for _, s := range a.open {
		for rank, r := range s.rows {
			if r == nil {
				list = append(list, &rows.Row{Rank: int64(rank), Iter: s.iter, Drain: s.drains > 0, Synthetic: true, QueueLatency: rows.SomeSpan(0)})
			}
		}
	}
	return list
}

// drop forgets the oldest open sets.
func (a *Aligner) drop(n int) {
	for _, s := range a.open[:n] {
		a.dropped += int64(s.n)
	}
	a.open = slices.Delete(a.open, 0, n)
}

// own leaves each fact to its owner. The queue is that of all ranks: rank 0 tells of it, with the sums over all. How many
// iterations a set covers is a fact of all; a rank that ended before the others did not come to the last.
func own(set []*rows.Row, dropped int64) {
	first := set[0]
	first.Dropped = dropped
	covers := int64(0)
	for _, r := range set {
		covers = max(covers, r.Covers)
	}
	for _, r := range set {
		r.Covers = covers
	}
	q := &first.Requests
	for _, r := range set[1:] {
		a := &r.Requests
		q.AddCounts(a)
		q.Queued += a.Queued
		first.QueueLatency.NS += r.QueueLatency.NS
		b, c := &first.Batch, &r.Batch
		for _, f := range [...]struct{ sum, part *rows.Int }{
			{&b.QueuedCtx, &c.QueuedCtx}, {&b.QueuedCtxTokens, &c.QueuedCtxTokens},
			{&b.QueuedGen, &c.QueuedGen}, {&b.QueuedGenKVTokens, &c.QueuedGenKVTokens},
		} {
			f.sum.V += f.part.V
			*f.part = rows.Int{}
		}
		r.Requests = rows.Requests{Active: a.Active, MaxActive: a.MaxActive, Suspended: a.Suspended, Resumed: a.Resumed}
		r.QueueLatency, r.Dropped = rows.Span{}, dropped
	}
}
