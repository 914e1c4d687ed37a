package node

import (
	"slices"
	"strings"
	"time"
)

// EventKind says what happened to a process.
type EventKind string

// The kinds.
const (
	Joined  EventKind = "joined"  // seen for the first time, again after it was lost, or a new process under the name
	Changed EventKind = "changed" // state, address or model changed
	Renewed EventKind = "renewed" // nothing but load and seq changed
	Lost    EventKind = "lost"    // its lease ended without a word
	Left    EventKind = "left"    // it removed its entry

	contested EventKind = "contested" // two living processes have the name, and this one is not taken for it; told once
)

// Event is one change of the membership.
type Event struct {
	Kind EventKind
	Info Info
}

// Entry is one process as the registry knows it.
type Entry struct {
	Info  Info
	Seen  time.Time // when its last renewal arrived here; carries the monotonic reading
	Alive bool      // its lease holds

	before    []string // instances of processes that had the name before, newest last
	contested bool     // one of them still renews
	wrote     string   // instance that renewed last: the process, or one that contests its name
}

const (
	// silence: a bus that says nothing for longer is taken for broken, and time stands still for every lease. Whoever
	// watches is registered too, so a bus that works is never silent for more than RenewEvery.
	silence = 750 * time.Millisecond
	// comeback is what processes get to reach the bus again after it was silent.
	comeback   = 5 * time.Second
	forgetDead = time.Minute
	maxBefore  = 8 // processes remembered per name
)

// members is the state of a registry: updates in, events out. It has no clock and no goroutine.
type members struct {
	entries map[string]*Entry
	heard   time.Time // last update of any key
}

func newMembers(now time.Time) *members {
	return &members{entries: map[string]*Entry{}, heard: now}
}

// hear notes that the bus spoke, and forgives the time in which it did not.
func (m *members) hear(now time.Time) {
	if gap := now.Sub(m.heard); gap > silence {
		for _, e := range m.entries {
			if e.Alive {
				e.Seen = now.Add(comeback)
			}
		}
	}
	m.heard = now
}

// put takes an update of a key. It is no renewal when it repeats what is known: a watch that starts again tells the old
// values first, those of dead processes too.
func (m *members) put(key string, info Info, now time.Time) (Event, bool) {
	e, known := m.entries[key]
	if known && e.Info.Instance() == info.Instance() && info.Seq <= e.Info.Seq {
		return Event{}, false
	}
	m.hear(now)
	if !known {
		e = &Entry{}
		m.entries[key] = e
	}
	is, was, before := info.Instance(), e.Info.Instance(), e.before
	if e.Alive && slices.Contains(e.before, is) && !prevails(info, e.Info) {
		told := e.contested
		e.contested, e.wrote = true, is
		return Event{contested, info}, !told
	}
	if known && is != was {
		before = append(slices.DeleteFunc(slices.Clone(before), func(o string) bool { return o == is }), was)
		before = before[max(0, len(before)-maxBefore):]
	}
	kind := Renewed
	switch {
	case !known || !e.Alive || is != was:
		kind = Joined
	case differs(e.Info, info):
		kind = Changed
	}
	*e = Entry{Info: info, Seen: now, Alive: true, before: before, contested: e.contested && e.Alive, wrote: is}
	return Event{kind, info}, true
}

// prevails tells whether a process that renews after another took its name keeps it. Who watches must come to the same answer
// in whatever order they heard of the two. A process that is restarted has no rival: the one before is silent.
func prevails(rival, holder Info) bool {
	if ready := rival.State == Ready; ready != (holder.State == Ready) {
		return ready
	}
	return rival.Instance() > holder.Instance()
}

func differs(a, b Info) bool {
	sameModel := (a.Model == nil) == (b.Model == nil) && (a.Model == nil || *a.Model == *b.Model)
	return !sameModel || a.State != b.State || a.URL != b.URL || a.KVAddr != b.KVAddr || a.ClockAddr != b.ClockAddr || a.ClockID != b.ClockID
}

// remove takes the deletion of a key, which is of whoever wrote it last: one that is not taken for the name takes nobody along.
func (m *members) remove(key string, now time.Time) (Event, bool) {
	m.hear(now)
	e, known := m.entries[key]
	if !known {
		return Event{}, false
	}
	if e.Alive && e.wrote != e.Info.Instance() {
		e.contested = false
		return Event{}, false
	}
	delete(m.entries, key)
	return Event{Left, e.Info}, true
}

// expire finds the leases that have ended.
func (m *members) expire(now time.Time) (lost []Event) {
	if now.Sub(m.heard) > silence {
		now = m.heard.Add(silence)
	}
	for key, e := range m.entries {
		age := now.Sub(e.Seen)
		if e.Alive && age > LeaseTTL {
			e.Alive = false
			lost = append(lost, Event{Lost, e.Info})
		}
		if !e.Alive && age > forgetDead {
			delete(m.entries, key)
		}
	}
	return lost
}

// list is a snapshot in the order of role and name.
func (m *members) list() []Entry {
	out := make([]Entry, 0, len(m.entries))
	for _, e := range m.entries {
		out = append(out, *e)
	}
	slices.SortFunc(out, func(a, b Entry) int {
		if c := strings.Compare(string(a.Info.Role), string(b.Info.Role)); c != 0 {
			return c
		}
		return strings.Compare(a.Info.Name, b.Info.Name)
	})
	return out
}
