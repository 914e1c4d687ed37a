package bus

import (
	"context"
	"sync"
	"time"

	"meridian.internal/shared/phase"
)

// Held is a record that waits in the spool before it travels. Ack says that it has come to its place without the stream:
// then it need not be sent. The names are those of a message of the stream.
type Held struct {
	p  *Publisher
	id string
}

// Ack takes the record out of what is to be sent. After it was sent, this does nothing.
func (h Held) Ack() error {
	h.p.held.settle(h.id)
	return nil
}

// InProgress does nothing: nobody brings the record again.
func (h Held) InProgress() error { return nil }

// recordBytes is room for most records.
const recordBytes = 2 << 10

// PublishHeld is Publish of a record without steps, which is sent after PublisherOptions.Hold unless it was acknowledged
// meanwhile. Its spool entry is written at once all the same.
func (p *Publisher) PublishHeld(rec *phase.Record) (Held, error) {
	e := entry{subject: PhaseSubject(rec.Router, rec.Role, rec.Node), id: p.nextID(rec), kind: kindRecord, data: phase.Append(make([]byte, 0, recordBytes), rec)}
	p.held.add(e.id)
	err := p.put([]entry{e})
	if err != nil {
		p.held.drop(e.id)
	}
	return Held{p, e.id}, err
}

// held knows the records in the spool that may be acknowledged before they are sent. The zero value holds nothing back.
type held struct {
	time time.Duration // from the spool to the stream

	mu   sync.Mutex      // guards done
	done map[string]bool // by message id; true: need not be sent
}

func (h *held) add(id string) {
	if h.time == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done == nil {
		h.done = map[string]bool{}
	}
	h.done[id] = false
}

func (h *held) settle(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, waits := h.done[id]; waits {
		h.done[id] = true
	}
}

// drop forgets the record of a message that is not in the spool.
func (h *held) drop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.done, id)
}

// unsettled returns the entries that are still to be sent, in the same memory, and holds none of them any longer.
func (h *held) unsettled(entries []entry) []entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept := entries[:0]
	for _, e := range entries {
		if !h.done[e.id] {
			kept = append(kept, e)
		}
		delete(h.done, e.id)
	}
	return kept
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
