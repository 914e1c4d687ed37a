package stats

import (
	"math/rand/v2"
	"testing"

	"meridian.internal/shared/rows"
)

// told is a row of a rank, with as many new requests and output tokens as it says.
func told(rank, iter, n int64) *rows.Row {
	return &rows.Row{
		Rank: rank, Iter: iter, Covers: 1, QueueLatency: rows.SomeSpan(n), Requests: rows.Requests{New: n, Completed: n, Active: n, Queued: n},
		Batch: rows.Batch{Scheduled: rows.Int{V: n, OK: true}, QueuedCtx: rows.Int{V: n, OK: true}}, Sums: rows.Sums{Output: n},
	}
}

func drained(rank, iter int64) *rows.Row {
	r := told(rank, iter, 0)
	r.Drain = true
	return r
}

func TestEachFactIsToldByItsOwner(t *testing.T) {
	a := NewAligner(3)
	for rank := range int64(2) {
		if s := a.Add(told(rank, 1, rank+1)); s != nil {
			t.Fatalf("a set of %d ranks of 3: %v", rank+1, s)
		}
	}
	s := a.Add(told(2, 1, 3))
	if len(s) != 3 {
		t.Fatalf("%d rows, want those of 3 ranks", len(s))
	}
	for rank, r := range s {
		n := int64(rank) + 1
		if r.Rank != int64(rank) || r.Requests.Active != n || r.Sums.Output != n || r.Batch.Scheduled.V != n {
			t.Errorf("rank %d tells %+v", rank, *r)
		}
		want := rows.Requests{Active: n}
		if rank == 0 {
			want.New, want.Completed, want.Queued = 6, 6, 6
		}
		if r.Requests != want {
			t.Errorf("rank %d has %+v, want %+v", rank, r.Requests, want)
		}
		if queued := r.Batch.QueuedCtx; queued.OK != (rank == 0) || queued.OK && queued.V != 6 {
			t.Errorf("rank %d says that %+v wait for prefill", rank, queued)
		}
		if q := r.QueueLatency; q.OK != (rank == 0) || q.OK && q.NS != 6 {
			t.Errorf("rank %d says that they waited %+v", rank, q)
		}
	}
}

func TestWhatDoesNotBecomeASetIsDroppedAndCounted(t *testing.T) {
	for _, c := range []struct {
		name    string
		rows    []*rows.Row
		sets    int
		dropped int64
	}{
		{"a rank is late", []*rows.Row{told(0, 1, 1), told(0, 2, 1), told(1, 1, 1), told(1, 2, 1)}, 2, 0},
		{"a rank leaves an iteration out", []*rows.Row{told(0, 1, 1), told(0, 2, 1), told(1, 2, 1)}, 1, 1},
		{"an old one comes after its set", []*rows.Row{told(0, 1, 1), told(1, 1, 1), told(1, 1, 1)}, 1, 1},
		{"an old one comes after a later set", []*rows.Row{told(0, 2, 1), told(1, 2, 1), told(0, 1, 1), told(1, 1, 1)}, 1, 2},
		{"a row comes twice", []*rows.Row{told(0, 1, 1), told(0, 1, 5), told(1, 1, 1)}, 1, 1},
		{"a drain comes after its iteration", []*rows.Row{told(0, 1, 1), drained(0, 1), told(1, 1, 1), drained(1, 1)}, 2, 0},
		{"two drains with no iteration between", []*rows.Row{told(0, 1, 1), told(1, 1, 1), drained(0, 1), drained(1, 1), drained(1, 1), drained(0, 1)}, 3, 0},
		{"a rank that is none", []*rows.Row{told(2, 1, 1), told(-1, 1, 1)}, 0, 2},
	} {
		a := NewAligner(2)
		sets := 0
		for _, r := range c.rows {
			if a.Add(r) != nil {
				sets++
			}
		}
		if sets != c.sets || a.Dropped() != c.dropped {
			t.Errorf("%s: %d sets and %d dropped, want %d and %d", c.name, sets, a.Dropped(), c.sets, c.dropped)
		}
	}
}

func TestASetThatCameTogetherIsCheckedAllTheSame(t *testing.T) {
	for _, c := range []struct {
		name    string
		sets    [][]*rows.Row
		given   int
		dropped int64
	}{
		{"one after the other", [][]*rows.Row{{told(0, 1, 1), told(1, 1, 1)}, {drained(0, 1), drained(1, 1)}, {told(0, 2, 1), told(1, 2, 1)}}, 3, 0},
		{"an old one", [][]*rows.Row{{told(0, 2, 1), told(1, 2, 1)}, {told(0, 1, 1), told(1, 1, 1)}}, 1, 2},
		{"one twice", [][]*rows.Row{{told(0, 2, 1), told(1, 2, 1)}, {told(0, 2, 1), told(1, 2, 1)}}, 1, 2},
		{"of two iterations", [][]*rows.Row{{told(0, 2, 1), told(1, 3, 1)}}, 0, 2},
		{"a drain with an iteration", [][]*rows.Row{{drained(0, 2), told(1, 2, 1)}}, 0, 2},
		{"a rank twice", [][]*rows.Row{{told(1, 2, 1), told(1, 2, 1)}}, 0, 2},
		{"a rank too few", [][]*rows.Row{{told(0, 2, 1)}}, 0, 1},
	} {
		a := NewAligner(2)
		given := 0
		for _, set := range c.sets {
			if a.Whole(set) != nil {
				given++
			}
		}
		if given != c.given || a.Dropped() != c.dropped {
			t.Errorf("%s: %d sets and %d dropped, want %d and %d", c.name, given, a.Dropped(), c.given, c.dropped)
		}
	}
}

func TestWhatRanksTellThatEndBeforeOthersIsCompleted(t *testing.T) {
	a := NewAligner(3)
	a.Add(told(0, 1, 1))
	a.Add(told(0, 2, 2))
	a.Add(told(2, 2, 2))
	sets, sum := 0, int64(0)
	for _, r := range a.Missing() {
		if set := a.Add(r); set != nil {
			sets++
			sum += set[0].Requests.New
		}
	}
	if sets != 2 || sum != 5 || a.Dropped() != 0 || len(a.Missing()) != 0 {
		t.Errorf("%d sets of %d requests, %d dropped, want 2 of 5 and none", sets, sum, a.Dropped())
	}
}

func TestAnAlignerKeepsFewIterations(t *testing.T) {
	a := NewAligner(2)
	for i := range int64(1000) {
		a.Add(told(0, i+1, 1))
	}
	if len(a.open) != maxOpen || a.Dropped() != 1000-maxOpen {
		t.Errorf("%d open and %d dropped, want %d and %d", len(a.open), a.Dropped(), maxOpen, 1000-maxOpen)
	}
}

// Ranks tell their rows in order, but not at the same time: all sets are there, in order, and lose nothing.
func TestSetsAreCompleteInWhateverOrderRanksTell(t *testing.T) {
	const ranks, iters = 4, 10_000
	for seed := range uint64(5) {
		random := rand.New(rand.NewPCG(seed, 1))
		a := NewAligner(ranks)
		var next [ranks]int64
		given, sum, want := int64(0), int64(0), int64(0)
		for given < iters {
			rank := random.IntN(ranks)
			if next[rank] == iters || next[rank] > given+8 {
				continue
			}
			next[rank]++
			n := random.Int64N(5)
			want += n
			s := a.Add(told(int64(rank), next[rank], n))
			if s == nil {
				continue
			}
			given++
			for rank, r := range s {
				if r.Iter != given || r.Rank != int64(rank) {
					t.Fatalf("set %d holds iteration %d of rank %d", given, r.Iter, r.Rank)
				}
			}
			sum += s[0].Requests.New
		}
		if sum != want || a.Dropped() != 0 {
			t.Errorf("sets add up to %d requests and %d rows were dropped, want %d and none", sum, a.Dropped(), want)
		}
	}
}
