package collect

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
)

// indexIDs bounds the index of lines. Older ones are found by the index of their file.
const indexIDs = 100_000

// keepLine is the memory that is used again for another line.
const keepLine = 16 << 10

// recent keeps the last lines, and where those before them are on disk. It is written by Run and read by HTTP handlers.
type recent struct {
	mu    sync.Mutex        // guards what follows; short reads and writes only
	lines []json.RawMessage // ring: line n lies at n % len; readers get copies
	n     int64             // of the next line
	index map[string]place  // by request id or client's id
	order []string          // ids of the index by age, a ring
	old   int
}

// place is where a line is: in memory while it is among the last ones, and on disk.
type place struct {
	n  int64
	at jsonl.Location
}

func newRecent(n int) *recent {
	return &recent{lines: make([]json.RawMessage, n), index: map[string]place{}, order: make([]string, 0, 1024)}
}

func (r *recent) add(l *timeline.Line, line []byte, at jsonl.Location) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := &r.lines[r.n%int64(len(r.lines))]
	if cap(*kept) > keepLine {
		*kept = nil
	}
	*kept = append((*kept)[:0], line...)
	for _, id := range [...]string{l.RequestID, l.ClientRequestID} {
		if id != "" {
			r.remember(strings.Clone(id), place{r.n, at})
		}
	}
	r.n++
}

// remember adds to the index and drops its oldest entry when it is full.
func (r *recent) remember(id string, at place) {
	before := len(r.index)
	if r.index[id] = at; len(r.index) == before {
		return // a newer line of the same request
	}
	if len(r.order) < indexIDs {
		r.order = append(r.order, id)
		return
	}
	delete(r.index, r.order[r.old])
	r.order[r.old] = id
	r.old = (r.old + 1) % indexIDs
}

// find returns a copy of the newest line of an id if it is in memory, or else where it is; not ok: the index does not know.
func (r *recent) find(id string) (line json.RawMessage, at jsonl.Location, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.index[id]
	if ok && r.n-p.n <= int64(len(r.lines)) {
		line = slices.Clone(r.lines[p.n%int64(len(r.lines))])
	}
	return line, p.at, ok
}

// Recent returns the last lines, the newest first.
func (c *Collector) Recent(limit int) []json.RawMessage {
	r := c.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	limit = int(max(0, min(int64(limit), r.n, int64(len(r.lines)))))
	out := make([]json.RawMessage, 0, limit)
	for n := r.n - 1; len(out) < limit; n-- {
		out = append(out, slices.Clone(r.lines[n%int64(len(r.lines))]))
	}
	return out
}

// Await is Find for a request that may have ended this very moment: while its line is being made, it waits for it, until ctx ends.
func (c *Collector) Await(ctx context.Context, id string) (json.RawMessage, bool) {
	if line, ok := c.Find(id); ok {
		return line, true
	}
	making := c.making(ctx, id)
	look := time.NewTicker(awaitEvery)
	defer look.Stop()
	for {
		if line, _, _ := c.recent.find(id); line != nil || !making { // it may have been made before the question was answered
			return line, line != nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return nil, false
		}
	}
}

const awaitEvery = 20 * time.Millisecond

// making asks Run whether it has records of a request without a line. All that was added before is seen.
func (c *Collector) making(ctx context.Context, id string) (yes bool) {
	answer := make(chan bool, 1)
	select {
	case c.in <- message{asked: id, answer: answer}:
		c.hasten()
	case <-ctx.Done():
		return false
	}
	select {
	case yes = <-answer:
	case <-ctx.Done():
	}
	return yes
}

// isOpen tells whether there are records of a request, by the router's id or the client's, that wait for others. Run calls it.
func (c *Collector) isOpen(id string) bool {
	if c.open[id] != nil {
		return true
	}
	for _, r := range c.open {
		for i := range r.parts {
			if r.parts[i].Record.ClientRequestID == id {
				return true
			}
		}
	}
	return false
}

// Find returns the newest line of a request, by the router's id or the client's.
func (c *Collector) Find(id string) (json.RawMessage, bool) {
	line, at, ok := c.recent.find(id)
	if line != nil {
		return line, true
	}
	if ok {
		if b, err := jsonl.At(at); err == nil {
			return b, true
		} // not flushed yet, or compressed, or removed
	}
	b, err := traces.Lookup(c.o.Dir, id)
	if err != nil {
		c.log.Warn("timelines cannot be searched", "request_id", id, "error", err)
	}
	return b, b != nil
}
