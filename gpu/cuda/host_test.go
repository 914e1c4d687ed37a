//go:build cuda

package cuda

import (
	"slices"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// TestStampsStayBetweenQueuingAndTheHostsSight: a step cannot begin before it was queued nor end after the host saw its end.
func TestStampsStayBetweenQueuingAndTheHostsSight(t *testing.T) {
	var seen int64
	var clock cardClock
	var events backend.EventSets
	c := &stamper{now: func() int64 { return seen }, clock: &clock}
	const card = 1_000_000 // the card's clock is ahead
	last := int64(0)
	for i := range int64(1000) {
		sent := 100 * i
		if i == 10 {
			clock.edge.add([]exchange{{ask: sent - 40, card: card + sent, answer: sent + 40}})
		}
		seen = sent + 80
		e, err := events.Take(i)
		if err != nil {
			t.Fatal(err)
		}
		c.mark(e, []uint64{uint64(card + sent + 10), uint64(card + sent + 40), uint64(card + sent + 60)}, sent)
		s := e.Read()
		if s.ForwardStartNS < max(sent, last) || s.ForwardEndNS < s.ForwardStartNS || s.SampleEndNS < s.ForwardEndNS || s.SampleEndNS > seen {
			t.Fatalf("step %d, queued at %d and seen at %d, has %+v; the one before ended at %d", i, sent, seen, s, last)
		}
		last = s.SampleEndNS
	}
}

func TestBucketsHoldTheirRowsAndAreFew(t *testing.T) {
	sizes := map[int]bool{}
	for rows := 1; rows <= maxGraphRows; rows++ {
		n := bucket(rows)
		if n < rows || n > 2*rows || bucket(n) != n {
			t.Errorf("%d rows run in a graph of %d, which runs in one of %d", rows, n, bucket(n))
		}
		sizes[n] = true
	}
	if len(sizes) > 24 {
		t.Errorf("%d sizes of graphs", len(sizes))
	}
}

func TestADescriptionPutsRowsTablesAndMasksWhereItsHeaderSays(t *testing.T) {
	slots := []infer.Sampling{{}, {Seed: 5<<32 | 6, LogitBias: map[int32]float32{9: 1}}}
	var d description
	d.describe(&backend.Batch{Entries: []backend.Entry{
		{Slot: 0, Tokens: make([]int32, 130), Blocks: []int32{3, 4, 5, 6, 7}, Logits: []int{129}},
		{Slot: 1, KVLen: 40, Blocks: []int32{8, 9, 10}, Logits: []int{0}, Mask: []uint32{1 << 31}},
	}}, slots, nil, 32, 128)
	w := d.words
	if w[hRows] != 131 || w[hWanted] != 2 || w[hEntries] != 2 || d.tiles != 2 || d.untiled != 1 || d.longest != 41 || d.decode {
		t.Fatalf("header %v, %d tiles, %d rows outside, longest %d", w[:hSize], d.tiles, d.untiled, d.longest)
	}
	if got := w[w[hTilesAt] : w[hTilesAt]+4]; !slices.Equal(got, []int32{0, 128, 128, 2}) {
		t.Errorf("tiles %v", got)
	}
	row := w[w[hRowsAt]+5*130:][:5]
	if row[0] != -1 || row[1] != 40 || row[2] != 1 || row[4] != 0 || !slices.Equal(w[row[3]:row[3]+2], []int32{8, 9}) {
		t.Errorf("the last row is %v", row)
	}
	if got := w[w[hWantedAt] : w[hWantedAt]+2]; !slices.Equal(got, []int32{129, 130}) {
		t.Errorf("wanted rows %v", got)
	}
	e := w[w[hEntriesAt]+entryWords:][:entryWords]
	if e[0] != 1 || e[1] != 1 || e[2] != 1 || e[13] != 1 || w[e[12]] != 9 || e[15] != 1 || uint32(w[e[14]]) != 1<<31 || e[16] != 6 || e[17] != 5 {
		t.Errorf("the second entry is %v", e)
	}
}

// TestATableIsWrittenForEachWindowWithZerosForWhatIsOutOfSight: the engine may have given those blocks back.
func TestATableIsWrittenForEachWindowWithZerosForWhatIsOutOfSight(t *testing.T) {
	windows := []backend.Window{{Tokens: 40}, {Tokens: 8}}
	var d description
	d.describe(&backend.Batch{
		Entries: []backend.Entry{
			{Slot: 0, Tokens: make([]int32, 3), KVLen: 60, Blocks: []int32{1, 2, 3, 4}, Windows: [][]int32{{-1, 12, 13, 14}, {-1, -1, -1, 24, -1}}},
			{Slot: 1, KVLen: 1, Blocks: []int32{9}, Windows: [][]int32{{19}, {29}}},
		},
		Copies: []backend.BlockCopy{{From: 1, To: 2, Group: 2}, {From: 3, To: 4}, {From: 5, To: 6, Group: 2}},
	}, make([]infer.Sampling, 2), windows, 16, 0)
	per := int(d.words[hTables])
	if per != 5 {
		t.Fatalf("tables of %d words, want 5", per)
	}
	for group, want := range [][]int32{{1, 2, 3, 4, 9}, {0, 12, 13, 14, 19}, {0, 0, 0, 24, 29}} {
		for i, first := range []int{0, 4} {
			row := d.words[int(d.words[hRowsAt])+5*3*i:] // the second entry's row is the fourth
			at := int(row[3]) + group*per
			if n := []int{4, 1}[i]; !slices.Equal(d.words[at:at+n], want[first:first+n]) {
				t.Errorf("entry %d, group %d has the table %v, want %v", i, group, d.words[at:at+n], want[first:first+n])
			}
		}
	}
	for group, want := range [][]int32{{3, 4}, nil, {1, 2, 5, 6}} {
		c := d.copies[group]
		if got := d.words[c.at : c.at+2*c.n]; !slices.Equal(got, want) {
			t.Errorf("copies of group %d: %v, want %v", group, got, want)
		}
	}
}
