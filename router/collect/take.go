package collect

import (
	"errors"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
)

// take adds one message to its request, and writes the line if it was the last that was missing.
func (c *Collector) take(m message) {
	switch {
	case m.back != nil:
		c.giveBack(m.adopted)
		c.unacked = append(c.unacked, bequest{to: c.bequests, done: m.back}) // told after all that are written
		c.flush()
		return
	case m.answer != nil:
		m.answer <- c.isOpen(m.asked)
		return
	case m.inherited != nil:
		if _, known := c.written.byID[m.inherited.RequestID]; !known {
			w := c.written.remembered(m.inherited)
			w.adopted, w.told = m.adopted, true
		}
		return
	}
	id, key := m.header.RequestID, timeline.Key{Role: m.header.Role, Node: m.header.Node, Sub: m.header.Sub, Attempt: m.header.Attempt}
	if m.rec != nil {
		id, key = m.rec.RequestID, timeline.KeyOf(m.rec)
		if m.rec.Probe {
			c.metrics.probes.Inc()
			c.acknowledge(m.ack)
			return
		}
	}
	r := c.open[id]
	if r == nil {
		if w, known := c.written.byID[id]; known {
			c.late(w, m, id, key)
			return
		}
		r = &request{id: id}
	}
	r.since = time.Now()
	if m.adopted != "" {
		r.adopted = m.adopted
	}
	if m.ack != nil {
		r.acks = append(r.acks, m.ack)
	}
	switch {
	case m.rec == nil:
		r.addSteps(key, m.header, m.steps)
	case r.has(key):
		c.metrics.duplicates.Inc() // its acknowledgement is sent with the others
	default:
		r.parts = append(r.parts, timeline.Part{Record: m.rec})
	}
	c.settle(r)
}

// keep has a request wait for its other records.
func (c *Collector) keep(r *request) {
	c.open[r.id] = r
	c.order.push(r)
	for len(c.open) > c.o.MaxOpen {
		old := c.order.front()
		c.order.pop()
		if old.done {
			continue
		}
		c.metrics.shed.Inc()
		c.write(old)
	}
}

// settle writes a request that is complete, and gives one that has ended its time to wait for the rest.
func (c *Collector) settle(r *request) {
	r.joinSteps()
	if r.router() && len(timeline.Missing(r.parts)) == 0 {
		c.write(r)
		return
	}
	if c.open[r.id] == nil {
		c.keep(r)
	}
	if !r.deadline.IsZero() || r.adopted != "" {
		return // an adopted one waits as an orphan: its own router may be back any moment, with the rest
	}
	if live, known := c.isLive(r.id); r.router() || (known && !live) {
		r.deadline = time.Now().Add(c.o.Grace)
		c.due.push(r)
	}
}

// giveBack lets go of the requests of a router that are not written: the stream brings their records to whoever takes them
// now. Two lines would come of a request if both wrote what they have of it.
func (c *Collector) giveBack(router string) {
	for id, r := range c.open {
		if r.adopted != router {
			continue
		}
		for _, a := range r.acks {
			if s, ok := a.(streamAck); ok && s.Nak() != nil {
				c.metrics.ackErrors.Inc() // it comes again after the stream's own time
			}
		}
		delete(c.open, id)
		r.done, r.parts, r.steps, r.acks = true, nil, nil, nil
	}
}

// expire writes the requests whose time is over.
func (c *Collector) expire(now time.Time) {
	for r := c.due.front(); r != nil && !r.deadline.After(now); r = c.due.front() {
		c.due.pop()
		if !r.done {
			c.write(r)
		}
	}
	if now.Sub(c.swept) < c.o.Orphan/sweepsInOrphan {
		return
	}
	c.swept = now
	c.order.keep(func(r *request) bool {
		if !r.done && r.deadline.IsZero() && now.Sub(r.since) >= c.o.Orphan {
			if live, _ := c.isLive(r.id); !live {
				c.write(r) // its router is gone
			}
		}
		return !r.done
	})
}

// sweepsInOrphan is how often the requests are looked through in the time that an orphan waits.
const sweepsInOrphan = 64

// write merges the request and appends its line. Nothing is acknowledged before flush.
func (c *Collector) write(r *request) {
	delete(c.open, r.id)
	r.done = true
	defer func() { r.parts, r.steps, r.acks = nil, nil, nil }() // a queue may hold r for a while
	if len(r.parts) == 0 {                                      // steps alone say nothing
		c.unacked = append(c.unacked, r.acks...)
		return
	}
	l := c.merger.Merge(r.parts, c.o.Clocks)
	if !c.emit(c.lines, l, c.bequeath(r.adopted, l, r.acks)) {
		return
	}
	c.written.add(r, l.Complete)
	c.metrics.line(l)
}

// late handles a record or steps whose line is written: a copy is acknowledged, something new amends the line.
func (c *Collector) late(w *writtenLine, m message, id string, key timeline.Key) {
	if w == nil {
		c.metrics.duplicates.Inc()
		if m.adopted != "" { // its router may not have been told yet
			c.unacked = append(c.unacked, c.retell(&writtenLine{id: id, adopted: m.adopted}, m.ack)...)
			return
		}
		c.unacked = append(c.unacked, m.ack) // its line may still be in memory
		return
	}
	if w.adopted == "" {
		w.adopted = m.adopted // it was found on disk, where nothing says for whom it was written
	}
	if !w.lacks(m, key) {
		c.metrics.duplicates.Inc()
		switch {
		case m.ack == nil:
		case w.waits:
			w.rest.acks = append(w.rest.acks, m.ack)
		case w.adopted != "": // told or not: what tells comes before the acknowledgement
			c.unacked = append(c.unacked, c.retell(w, m.ack)...)
		default:
			c.unacked = append(c.unacked, m.ack) // its line may still be in memory
		}
		return
	}
	r := w.rest
	if m.ack != nil {
		r.acks = append(r.acks, m.ack)
	}
	if m.rec == nil {
		r.addSteps(key, m.header, m.steps)
	} else {
		w.keys = append(w.keys, keptKey(key))
		r.parts = append(r.parts, timeline.Part{Record: m.rec})
	}
	if joined := r.joinSteps(); m.rec == nil && !joined {
		return // its record, or another part of its steps, is to come
	}
	c.writeAmendment(w)
}

// retell makes the acknowledgement of a copy whose line is on disk, though the router that is gone may not have been told of it: the
// process that wrote it died before.
func (c *Collector) retell(w *writtenLine, a ack) []ack {
	text, _ := c.Find(w.id)
	l, err := timeline.Parse(text)
	if err != nil { // removed, by its age or size
		return []ack{a}
	}
	w.told = true
	return c.bequeath(w.adopted, l, []ack{a})
}

// writeAmendment appends the newest line of a request to the amendments. What cannot be written is tried again with every
// flush; until then nothing of it is acknowledged, and a copy of it waits too.
func (c *Collector) writeAmendment(w *writtenLine) {
	l := c.merger.Merge(w.rest.parts, c.o.Clocks)
	l.Amends = true
	if !c.emit(c.amends, l, c.bequeath(w.adopted, l, w.rest.acks)) {
		if !w.waits {
			w.waits = true
			c.amend = append(c.amend, w)
		}
		return
	}
	c.metrics.amended.Inc()
	w.waits, w.told, w.rest.acks = false, true, nil
	if l.Complete {
		w.rest = nil
	}
}

// retryAmendments writes what the disk refused before.
func (c *Collector) retryAmendments() {
	list := c.amend
	c.amend = nil
	for _, w := range list {
		if w.waits {
			w.waits = false
			c.writeAmendment(w)
		}
	}
}

// emit appends a line to a file's memory and shows it to readers.
func (c *Collector) emit(to *jsonl.Writer, l *timeline.Line, acks []ack) bool {
	c.line = timeline.Append(c.line[:0], l)
	at, err := to.Append(c.line)
	if errors.Is(err, jsonl.ErrFull) {
		c.flush()
		at, err = to.Append(c.line)
	}
	if err != nil {
		// Not acknowledged: the stream brings the records again when the disk has recovered.
		c.metrics.writeErrors.Inc()
		c.complain(err)
		return false
	}
	c.unacked = append(c.unacked, acks...)
	c.recent.add(l, c.line, at)
	c.expected(l)
	if c.o.OnLine != nil {
		c.o.OnLine(l)
	}
	if to.Waiting() > flushBytes {
		c.flush()
	}
	return true
}

const flushBytes = 256 << 10

// flush writes the waiting lines, then acknowledges their records: in this order, or a crash would lose them.
func (c *Collector) flush() {
	waiting := c.lines.Waiting() + c.amends.Waiting()
	if err := errors.Join(c.lines.Flush(), c.amends.Flush()); err != nil {
		c.metrics.writeErrors.Inc()
		c.complain(err)
		return
	}
	if c.failing && waiting > 0 { // something reached the disk
		c.failing = false
		c.metrics.failing.Set(0)
		c.log.Info("timelines are written again")
	}
	later := c.unacked[:0]
	for _, a := range c.unacked {
		if !c.acknowledge(a) {
			later = append(later, a)
		}
	}
	clear(c.unacked[len(later):])
	c.unacked = later
}

// complain logs the first error of a row.
func (c *Collector) complain(err error) {
	if !c.failing {
		c.failing = true
		c.metrics.failing.Set(1)
		c.log.Error("timelines cannot be written; they wait", "error", err)
	}
}

// acknowledge says whether it is done with; false: it is to be tried again.
func (c *Collector) acknowledge(a ack) bool {
	if a == nil {
		return true
	}
	err := a.Ack()
	if errors.Is(err, errLater) {
		return false
	}
	if err != nil {
		c.metrics.ackErrors.Inc() // it comes again and is recognised
	}
	return true
}

// keepAlive asks the stream not to bring again what is still waiting here; if it does, the copy is recognised.
func (c *Collector) keepAlive() {
	for _, r := range c.open {
		for _, a := range r.acks {
			_ = a.InProgress()
		}
	}
	for _, a := range c.unacked {
		if a != nil {
			_ = a.InProgress()
		}
	}
}
