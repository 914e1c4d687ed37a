package collect

import (
	"encoding/json"
	"strings"
	"sync"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
)

// indexLines bounds the index of lines that are no longer in memory. Older ones are found by the index of their file.
const indexLines = 100_000

// recent keeps the last lines, and where those before them are on disk. It is written by Run and read by HTTP handlers.
type recent struct {
	mu    sync.Mutex // guards what follows; short reads and writes only
	lines []kept     // ring
	next  int
	byID  map[string]int            // request id or client's id -> place in lines
	index map[string]jsonl.Location // request id or client's id -> file
	order []string                  // ids of the index by age, a ring
	old   int
}

type kept struct {
	ids  [2]string
	line json.RawMessage
}

func newRecent(n int) *recent {
	return &recent{lines: make([]kept, n), byID: map[string]int{}, index: map[string]jsonl.Location{}, order: make([]string, 0, 1024)}
}

func (r *recent) add(l *timeline.Line, line []byte, at jsonl.Location) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := &r.lines[r.next]
	for _, id := range old.ids {
		if i, ok := r.byID[id]; ok && i == r.next {
			delete(r.byID, id)
		}
	}
	*old = kept{ids: [2]string{strings.Clone(l.RequestID), strings.Clone(l.ClientRequestID)}, line: line}
	for _, id := range old.ids {
		if id != "" {
			r.byID[id] = r.next
			r.remember(id, at)
		}
	}
	r.next = (r.next + 1) % len(r.lines)
}

// remember adds to the index and drops its oldest entry when it is full.
func (r *recent) remember(id string, at jsonl.Location) {
	if _, ok := r.index[id]; !ok {
		if len(r.order) < indexLines {
			r.order = append(r.order, id)
		} else {
			delete(r.index, r.order[r.old])
			r.order[r.old] = id
			r.old = (r.old + 1) % indexLines
		}
	}
	r.index[id] = at
}

// Recent returns the last lines, the newest first.
func (c *Collector) Recent(limit int) []json.RawMessage {
	r := c.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.lines)
	limit = max(0, min(limit, n))
	out := make([]json.RawMessage, 0, limit)
	for i := 1; i <= n && len(out) < limit; i++ {
		if k := r.lines[(r.next-i+n)%n]; k.line != nil {
			out = append(out, k.line)
		}
	}
	return out
}

// Find returns the newest line of a request, by the router's id or the client's.
func (c *Collector) Find(id string) (json.RawMessage, bool) {
	r := c.recent
	r.mu.Lock()
	if i, ok := r.byID[id]; ok {
		line := r.lines[i].line
		r.mu.Unlock()
		return line, true
	}
	at, ok := r.index[id]
	r.mu.Unlock()
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
