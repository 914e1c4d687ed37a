package kvevent

import (
	"sync"

	"meridian.internal/shared/blockhash"
)

// maxKept events are kept for those who read them; who is further behind is told, and asks for a snapshot.
const maxKept = 1 << 15

// Log follows a cache by its events: what it holds in which tier, and the newest events, which any number of readers take each
// with a cursor of its own. Safe for concurrent use; Add is short, so that an engine may call it.
type Log struct {
	epoch int64

	mu     sync.Mutex // guards what follows
	held   map[blockhash.Hash]Tier
	ring   []Event // by sequence number
	seq    int64   // of the newest event
	wake   chan struct{}
	closed bool
}

// NewLog follows a cache that is empty; the epoch is that of its events, which are numbered 1, 2, 3 …
func NewLog(epoch int64) *Log {
	return &Log{epoch: epoch, held: map[blockhash.Hash]Tier{}}
}

// Epoch is that of the events.
func (l *Log) Epoch() int64 { return l.epoch }

// Add takes an event, whose slices it keeps.
func (l *Log) Add(ev Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range ev.Blocks {
		l.held[b.Hash] = b.Tier
	}
	if ev.Moved != nil {
		l.held[ev.Moved.Hash] = ev.Moved.To
	}
	for _, h := range ev.Removed {
		delete(l.held, h)
	}
	l.seq = ev.Seq
	if len(l.ring) < maxKept {
		l.ring = append(l.ring, ev)
	} else {
		l.ring[l.at(ev.Seq)] = ev
	}
	l.notify()
}

func (l *Log) at(seq int64) int { return int((seq - 1) % maxKept) }

func (l *Log) notify() {
	if l.wake != nil {
		close(l.wake)
		l.wake = nil
	}
}

// Page is an answer to a reader.
type Page struct {
	Epoch   int64   `json:"epoch"`
	Events  []Event `json:"events"`
	Next    int64   `json:"next"`    // number of the last event given or lost, else the reader's own cursor: what to ask with next time
	Oldest  int64   `json:"oldest"`  // number of the oldest event that is kept, 0: none
	Newest  int64   `json:"newest"`  // less than the cursor if that is of an earlier epoch
	Dropped int64   `json:"dropped"` // events after the cursor that are no longer kept: only a snapshot says what they changed
}

// Read gives the events after a number, at most limit of them. It takes nothing away.
func (l *Log) Read(after int64, limit int) Page {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := Page{Epoch: l.epoch, Events: []Event{}, Next: after, Newest: l.seq}
	if l.seq > 0 {
		p.Oldest = max(l.seq-int64(len(l.ring))+1, 1)
	}
	if after >= l.seq {
		return p
	}
	p.Dropped = max(p.Oldest-after-1, 0)
	from := after + p.Dropped + 1
	p.Next = min(l.seq, from+int64(max(limit, 0))-1)
	p.Events = make([]Event, 0, p.Next-from+1)
	for seq := from; seq <= p.Next; seq++ {
		p.Events = append(p.Events, l.ring[l.at(seq)])
	}
	return p
}

// Changed is closed when an event comes after the number, or the log is closed.
func (l *Log) Changed(after int64) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seq > after || l.closed {
		c := make(chan struct{})
		close(c)
		return c
	}
	if l.wake == nil {
		l.wake = make(chan struct{})
	}
	return l.wake
}

// Close tells those who follow that nothing more comes.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.notify()
}

// Closed tells whether nothing more comes.
func (l *Log) Closed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// Snapshot is what the cache holds now.
func (l *Log) Snapshot() Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Snapshot{Epoch: l.epoch, Seq: l.seq, Blocks: make([]blockhash.Hash, 0, len(l.held)), Tiers: make([]Tier, 0, len(l.held))}
	for h, tier := range l.held {
		s.Blocks, s.Tiers = append(s.Blocks, h), append(s.Tiers, tier)
	}
	return s
}
