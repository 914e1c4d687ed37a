package collect

import (
	"slices"
	"strings"
	"unique"

	"meridian.internal/router/timeline"
)

// writtenLine is what is kept of a line that was written: enough to recognise copies, and for an incomplete one to merge again.
type writtenLine struct {
	id   string
	keys []timeline.Key // of rest
	rest *request       // nil once complete
	// waits says that an amendment of it could not be written: rest has what is to be acknowledged with it.
	waits bool
	// adopted is as in message: whose line it is. That router knows of it, or will before the records are acknowledged: told.
	adopted string
	told    bool
}

// lacks says whether a message brings something that the line does not have.
func (w *writtenLine) lacks(m message, k timeline.Key) bool {
	if m.rec != nil {
		return w.rest != nil && !w.has(k)
	}
	return w.rest != nil && !w.rest.hasSteps(k)
}

func (w *writtenLine) has(k timeline.Key) bool { return slices.Contains(w.keys, k) }

// ring remembers the last lines.
type ring struct {
	byID map[string]*writtenLine // nil: it was written whole by this process, so that only copies can come
	list []string                // ids by age
	next int
}

func newRing(n int) *ring {
	return &ring{byID: map[string]*writtenLine{}, list: make([]string, n)}
}

func (g *ring) add(r *request, complete bool) {
	id := strings.Clone(r.id)
	if complete {
		g.put(id, nil)
		return
	}
	w := &writtenLine{id: id, keys: make([]timeline.Key, 0, len(r.parts)), adopted: r.adopted, told: true}
	for _, p := range r.parts {
		w.keys = append(w.keys, keptKey(timeline.KeyOf(p.Record)))
	}
	w.rest = &request{id: r.id, parts: r.parts, steps: r.steps}
	g.put(id, w)
}

func (g *ring) put(id string, w *writtenLine) {
	before := len(g.byID)
	if g.byID[id] = w; len(g.byID) == before {
		return // a newer line of the same request
	}
	delete(g.byID, g.list[g.next])
	g.list[g.next] = id
	g.next = (g.next + 1) % len(g.list)
}

// keptKey is k in memory of its own: the strings of a parsed record are parts of its whole text, which a key that is kept
// for long would hold with them. There are few roles and nodes.
func keptKey(k timeline.Key) timeline.Key {
	k.Role, k.Node = unique.Make(k.Role).Value(), unique.Make(k.Node).Value()
	return k
}

// remembered is a line found on disk at the start, or written by another router.
func (g *ring) remembered(l *timeline.Line) *writtenLine {
	w := &writtenLine{id: strings.Clone(l.RequestID)}
	if !l.Complete {
		w.rest = &request{id: l.RequestID}
		for i := range l.Phases {
			p := &l.Phases[i]
			w.keys = append(w.keys, keptKey(timeline.Key{Role: p.Role, Node: p.Node, Sub: p.Sub, Attempt: p.Attempt}))
			w.rest.parts = append(w.rest.parts, l.Part(p))
		}
	}
	g.put(w.id, w)
	return w
}
