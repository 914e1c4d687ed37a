package rows

import (
	"encoding/json"
	"sync"
	"testing"
)

func TestReadersHaveCursorsOfTheirOwn(t *testing.T) {
	g := NewRing(Static{}, 4)
	put := func(n int) {
		for range n {
			g.Put(&Row{Iter: 100})
		}
	}
	put(3)
	tests := []struct {
		name                        string
		more                        int
		after                       int64
		limit                       int
		rows                        int
		next, oldest, last, dropped int64
	}{
		{"from the start", 0, 0, 10, 3, 3, 1, 3, 0},
		{"again: reading takes nothing away", 0, 0, 10, 3, 3, 1, 3, 0},
		{"a page", 0, 0, 2, 2, 2, 1, 3, 0},
		{"nothing new", 0, 3, 10, 0, 3, 1, 3, 0},
		{"a cursor of an earlier process", 0, 50, 10, 0, 50, 1, 3, 0},
		{"four of six are kept", 3, 0, 10, 4, 6, 3, 6, 2},
		{"a slow reader is told what it missed", 0, 1, 1, 1, 3, 3, 6, 1},
		{"a fast one missed nothing", 0, 2, 10, 4, 6, 3, 6, 0},
	}
	for _, tt := range tests {
		put(tt.more)
		p := g.Read(tt.after, tt.limit)
		if len(p.Rows) != tt.rows || p.Next != tt.next || p.Oldest != tt.oldest || p.Last != tt.last || p.Dropped != tt.dropped {
			t.Errorf("%s: %d rows, next %d, oldest %d, last %d, dropped %d", tt.name, len(p.Rows), p.Next, p.Oldest, p.Last, p.Dropped)
		}
		for i, text := range p.Rows {
			var row struct{ Seq int64 }
			if err := json.Unmarshal(text, &row); err != nil || row.Seq != p.Next-int64(len(p.Rows)-1-i) {
				t.Errorf("%s: row %d is %d, %v", tt.name, i, row.Seq, err)
			}
		}
	}
	if p := NewRing(Static{}, 4).Read(0, 10); p.Oldest != 0 || p.Next != 0 || len(p.Rows) != 0 {
		t.Errorf("an empty ring gave %+v", p)
	}
}

func TestFollowersLoseNothing(t *testing.T) {
	g := NewRing(Static{}, 256)
	const rows = 5000
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			got, dropped, cursor := int64(0), int64(0), int64(0)
			for {
				ended := g.Closed()
				p := g.Read(cursor, 100)
				got += int64(len(p.Rows))
				dropped += p.Dropped
				cursor = p.Next
				if ended && len(p.Rows) == 0 {
					break
				}
				<-g.Changed(cursor)
			}
			if got+dropped != rows || cursor != rows {
				t.Errorf("%d rows read and %d missed of %d, cursor at %d", got, dropped, rows, cursor)
			}
		})
	}
	for range rows {
		g.Put(new(Row))
	}
	g.Close()
	all.Wait()
}

func TestCountersNeverFall(t *testing.T) {
	var c Counter
	for i, tt := range []struct {
		v, total int64
		warn     bool
	}{{5, 5, false}, {9, 9, false}, {2, 9, true}, {4, 11, false}, {1, 11, false}, {1, 11, false}} {
		if warn := c.Observe(tt.v); warn != tt.warn || c.Total != tt.total {
			t.Errorf("snapshot %d, %d: total %d, warn %v", i, tt.v, c.Total, warn)
		}
	}
}

func BenchmarkPut(b *testing.B) {
	g := NewRing(Static{}, 1000)
	var row Row
	b.ReportAllocs()
	for b.Loop() {
		g.Put(&row)
	}
}
