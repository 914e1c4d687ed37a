package kvevent

import (
	"sync"

	"meridian.internal/shared/blockhash"
)

// maxPending events wait to be sent; with more they are dropped, and receivers find the gap and ask for a snapshot.
const maxPending = 1 << 16

// Log follows a cache by its events: what it holds, and which events were not taken yet. Safe for concurrent use; Add is
// short, so that an engine may call it.
type Log struct {
	epoch int64

	mu      sync.Mutex // guards what follows
	held    map[blockhash.Hash]struct{}
	seq     int64
	pending []Event
}

// NewLog follows a cache that is empty; the epoch is that of its events.
func NewLog(epoch int64) *Log {
	return &Log{epoch: epoch, held: map[blockhash.Hash]struct{}{}}
}

// Epoch is that of the events.
func (l *Log) Epoch() int64 { return l.epoch }

// Add takes an event. Tokens are not kept: who asks a cache for a block names it by its hash.
func (l *Log) Add(ev Event) {
	blocks := make([]Block, len(ev.Blocks))
	for i := range ev.Blocks {
		blocks[i].Hash = ev.Blocks[i].Hash
	}
	if len(blocks) > 0 {
		ev.Blocks = blocks
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range ev.Blocks {
		l.held[b.Hash] = struct{}{}
	}
	for _, h := range ev.Removed {
		delete(l.held, h)
	}
	l.seq = ev.Seq
	if len(l.pending) == maxPending {
		l.pending = l.pending[:0]
	}
	l.pending = append(l.pending, ev)
}

// Take appends up to n of the events that were not taken yet to dst, and returns how many are left.
func (l *Log) Take(dst []Event, n int) (events []Event, left int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.pending))
	dst = append(dst, l.pending[:n]...)
	rest := copy(l.pending, l.pending[n:])
	clear(l.pending[rest:])
	l.pending = l.pending[:rest]
	return dst, rest
}

// Taken is the number of the last event that was taken or dropped; 0: none.
func (l *Log) Taken() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seq - int64(len(l.pending))
}

// Snapshot is what the cache holds now.
func (l *Log) Snapshot() Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Snapshot{Epoch: l.epoch, Seq: l.seq, Blocks: make([]blockhash.Hash, 0, len(l.held))}
	for h := range l.held {
		s.Blocks = append(s.Blocks, h)
	}
	return s
}
