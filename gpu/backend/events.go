package backend

import (
	"errors"
	"fmt"
)

// ErrEventsUnread is returned when a step would take an event set whose stamps nobody has read: the times of an earlier
// step would be lost, or be taken for those of a later one.
var ErrEventsUnread = errors.New("backend: event set not read")

// EventSets are two sets of three events that the steps of a device use in turn: while one step runs, the stamps of the
// one before can be read. Every back end takes a set for each step and reads it when the step has ended; who would take
// one that was not read gets an error, and the step fails. The zero value is ready. One goroutine takes; another one may
// read, if it hands the step's place back before the set's next turn.
type EventSets struct {
	sets [2]EventSet
	next int
}

// EventSet holds the events of one step: where the forward begins, where logits are complete, where tokens are there.
type EventSet struct {
	iter  int64
	marks [3]int64
	n     int
	taken bool // and not read yet
}

// Take gives a step the set whose turn it is.
func (e *EventSets) Take(iter int64) (*EventSet, error) {
	s := &e.sets[e.next]
	if s.taken {
		return nil, fmt.Errorf("%w: step %d needs the set of step %d", ErrEventsUnread, iter, s.iter)
	}
	e.next = 1 - e.next
	*s = EventSet{iter: iter, taken: true}
	return s, nil
}

// Mark records the next event, at a time of the device's clock.
func (s *EventSet) Mark(at int64) {
	if s.n < len(s.marks) {
		s.marks[s.n] = at
	}
	s.n++
}

// Read gives the stamps and frees the set for a later step. Of a step that failed on its way, the events that did not
// come to pass are at the last that did: no time is made up.
func (s *EventSet) Read() Stamps {
	for i := max(s.n, 1); i < len(s.marks); i++ {
		s.marks[i] = s.marks[i-1]
	}
	s.taken = false
	return Stamps{ForwardStartNS: s.marks[0], ForwardEndNS: s.marks[1], SampleEndNS: s.marks[2]}
}
