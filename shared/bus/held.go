package bus

import (
	"context"
	"slices"
	"sync"
	"time"

	"meridian.internal/shared/phase"
)

// Held is a record that waits in the spool before it travels. Ack says that it has come to its place without the stream:
// then it need not be sent. The names are those of a message of the stream.
type Held struct {
	p  *Publisher
	at position
}

// Ack takes the record out of what is to be sent. After it was sent, this does nothing.
func (h Held) Ack() error {
	h.p.held.settle(h.at)
	return nil
}

// InProgress does nothing: nobody brings the record again.
func (h Held) InProgress() error { return nil }

// texts are records while they are written to the spool.
var texts = sync.Pool{New: func() any { b := make([]byte, 0, recordBytes); return &b }}

const (
	recordBytes = 2 << 10  // room for most records
	keepText    = 64 << 10 // larger memory is left to the collector
)

// PublishHeld is Publish of a record without steps, which is sent after PublisherOptions.Hold unless it was acknowledged
// meanwhile. Its spool entry is written at once all the same.
func (p *Publisher) PublishHeld(rec *phase.Record) (Held, error) {
	text := texts.Get().(*[]byte)
	*text = phase.Append((*text)[:0], rec)
	e := entry{subject: PhaseSubject(rec.Router, rec.Role, rec.Node), id: p.nextID(rec), kind: kindRecord, data: *text}
	from, to, err := p.put([]entry{e})
	if err == nil {
		p.held.add(from, to)
	}
	if cap(*text) <= keepText {
		texts.Put(text)
	}
	return Held{p, from}, err
}

// held knows the records in the spool that may be acknowledged before they are sent. The zero value holds nothing back.
type held struct {
	time time.Duration // from the spool to the stream

	mu   sync.Mutex // guards list
	list []waiting  // in the order of the spool
}

// waiting is a record in the spool.
type waiting struct {
	from, to position
	done     bool // need not be sent
}

func (h *held) add(from, to position) {
	if h.time == 0 || from == to { // it does not wait, or memory has it
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	i := len(h.list)
	for i > 0 && from.before(h.list[i-1].from) { // the one before was written and is not here yet
		i--
	}
	h.list = slices.Insert(h.list, i, waiting{from: from, to: to})
}

// find is the place of a record in the list. The mutex is held.
func (h *held) find(from position) (int, bool) {
	return slices.BinarySearchFunc(h.list, from, func(w waiting, p position) int {
		switch {
		case w.from.before(p):
			return -1
		case p.before(w.from):
			return 1
		}
		return 0
	})
}

func (h *held) settle(from position) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i, waits := h.find(from); waits {
		h.list[i].done = true
	}
}

// pass has the reader pass over the records at its place that need not be sent, unread, and returns how many there were.
func (h *held) pass(r *spoolReader) (n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, _ := h.find(r.at) // those before were sent
	for ; i < len(h.list) && h.list[i].done; i++ {
		if r.nextSegment(); h.list[i].from != r.at {
			break // another message is before it
		}
		r.at = h.list[i].to
		n++
	}
	h.list = slices.Delete(h.list, 0, i)
	return n
}

// unsettled returns the entries that are still to be sent, in the same memory.
func (h *held) unsettled(entries []entry) []entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(entries, func(e entry) bool {
		i, waits := h.find(e.at)
		return waits && h.list[i].done
	})
}

// age waits until what is in the spool now has been held for its time, and has the reader stop there. false: ctx ended.
func (p *Publisher) age(ctx context.Context, r *spoolReader) bool {
	if p.held.time == 0 {
		return true
	}
	end := p.spool.last()
	r.limit = &end
	t := time.NewTimer(p.held.time)
	defer t.Stop()
	select {
	case <-t.C:
	case <-p.closing:
		r.limit = nil
	case <-ctx.Done():
		return false
	}
	return true
}

// last is the position after the newest entry.
func (s *spool) last() position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return position{seg: s.seg, off: s.sizes[s.seg]}
}
