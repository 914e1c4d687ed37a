package rows

import "sync"

// Ring keeps the newest rows of one engine and gives them to any number of readers, each with a cursor of its own: reading
// takes nothing away. Put costs the engine a copy; a row becomes text when somebody first reads it, once for all readers.
type Ring struct {
	encoder *Encoder

	mu     sync.Mutex // guards what follows; held for one row
	slots  []slot
	last   int64         // sequence number of the newest row, 0 before the first
	wake   chan struct{} // nil: nobody waits
	closed bool
}

type slot struct {
	row  Row
	text []byte // immutable once set
}

// NewRing makes a ring of so many rows, at least 1.
func NewRing(s Static, rows int) *Ring {
	return &Ring{encoder: NewEncoder(s), slots: make([]slot, max(rows, 1))}
}

// Static is what all rows have in common.
func (g *Ring) Static() Static { return g.encoder.static }

// Put adds a row and gives it its number. It never waits for a reader. The ring keeps row.PerReq.
func (g *Ring) Put(row *Row) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last++
	row.Seq = g.last
	s := &g.slots[g.at(g.last)]
	s.row, s.text = *row, nil
	g.notify()
}

func (g *Ring) at(seq int64) int { return int((seq - 1) % int64(len(g.slots))) }

// notify wakes those that wait; without waiters it costs nothing.
func (g *Ring) notify() {
	if g.wake != nil {
		close(g.wake)
		g.wake = nil
	}
}

// oldest is the number of the oldest row that is kept, 0 if there is none.
func (g *Ring) oldest() int64 {
	if g.last == 0 {
		return 0
	}
	return max(g.last-int64(len(g.slots))+1, 1)
}

// Page is an answer to a reader.
type Page struct {
	Rows    [][]byte // JSON, oldest first; shared, not to be changed
	Next    int64    // the number of the last row given, else the reader's own cursor: what to ask with next time
	Oldest  int64    // number of the oldest row that is kept, 0: none
	Last    int64    // number of the newest row; less than Next if the cursor is of an earlier process
	Dropped int64    // rows after the cursor that are no longer kept
}

// Read gives the rows after a number, at most limit of them.
func (g *Ring) Read(after int64, limit int) Page {
	g.mu.Lock()
	p := Page{Next: after, Oldest: g.oldest(), Last: g.last}
	g.mu.Unlock()
	if p.Last == 0 || after >= p.Last {
		return p
	}
	from := max(after+1, p.Oldest)
	for seq := from; seq <= p.Last && len(p.Rows) < limit; seq++ {
		text := g.text(seq)
		if text == nil { // overwritten while the others were read
			if len(p.Rows) > 0 {
				break
			}
			continue
		}
		if len(p.Rows) == 0 {
			p.Dropped = seq - after - 1
		}
		p.Rows = append(p.Rows, text)
		p.Next = seq
	}
	return p
}

// text gives one row as JSON, nil if it is gone. It encodes outside of the lock: the engine must not wait for that.
func (g *Ring) text(seq int64) []byte {
	g.mu.Lock()
	s := &g.slots[g.at(seq)]
	text, row := s.text, Row{}
	gone := s.row.Seq != seq
	if !gone && text == nil {
		row = s.row
	}
	g.mu.Unlock()
	switch {
	case gone:
		return nil
	case text != nil:
		return text
	}
	text = g.encoder.Append(make([]byte, 0, rowBytes), &row)
	g.mu.Lock()
	if s.row.Seq == seq {
		s.text = text
	}
	g.mu.Unlock()
	return text
}

// rowBytes is more than a usual row takes.
const rowBytes = 4 << 10

// Changed is closed when a row comes after the number, or the ring is closed.
func (g *Ring) Changed(after int64) <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last > after || g.closed {
		return closedChan()
	}
	if g.wake == nil {
		g.wake = make(chan struct{})
	}
	return g.wake
}

func closedChan() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// Close tells the followers that no more rows come.
func (g *Ring) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.notify()
}

// Closed tells whether no more rows come.
func (g *Ring) Closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// Newest gives the newest row of a rank.
func (g *Ring) Newest(rank int) (Row, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for seq := g.last; seq > 0 && seq >= g.oldest(); seq-- { // the rows of all ranks lie side by side
		if r := &g.slots[g.at(seq)].row; r.Rank == int64(rank) {
			return *r, true
		}
	}
	return Row{}, false
}
