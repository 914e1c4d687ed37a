// Package collective owns the meeting point of ranks: a barrier with a deadline at which each rank leaves a word and takes
// the words of all (an all-gather). It knows nothing of what ranks do in between.
//
// A Hub meets ranks that are goroutines of one process; Host and Join seat ranks of other processes of the host at it, over a Unix
// socket. The rank sees the same Member.
//
// A round opens with its first arrival, which calls the other ranks, and is over with its last. A Hub that has failed stays
// so: who made the ranks makes a new one with them.
package collective

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

var (
	// ErrMissed is the error of a round to which a rank did not come in time; the text names the rank.
	ErrMissed = errors.New("collective: rank missed the deadline")
	// ErrLost is the error of a round after a rank has gone; the text names the rank.
	ErrLost = errors.New("collective: rank is lost")
	// ErrOutOfStep is returned when a rank arrives in a round that is over, that it is in already, or that has not come.
	ErrOutOfStep = errors.New("collective: rank is out of step")
)

// MissedError is an ErrMissed that names the ranks.
type MissedError struct {
	Round    int64
	Deadline time.Duration
	Ranks    []int
}

// Error implements error.
func (e *MissedError) Error() string {
	return fmt.Sprintf("%v: round %d waited %v for %v", ErrMissed, e.Round, e.Deadline, e.Ranks)
}

// Unwrap makes it an ErrMissed.
func (e *MissedError) Unwrap() error { return ErrMissed }

// Round is what a round has gathered.
type Round[T any] struct {
	Number int64
	Words  []T // by rank; shared by all ranks, not to be changed
	Err    error
}

// Member is one rank's place. One goroutine uses it.
type Member[T any] interface {
	// Arrive leaves a word for a round and returns at once. Rounds are numbered from 1; a rank comes to every one.
	Arrive(round int64, word T) error
	// Called has a message when another rank is in the round to which this one is to come next.
	Called() <-chan struct{}
	// Released has a message when the round at which this rank has arrived is over, or when the ranks have failed.
	Released() <-chan Round[T]
	// Leave ends the membership. An error fails the others, who hear it; nil is the end of all.
	Leave(err error)
}

// Hub is the meeting point.
type Hub[T any] struct {
	deadline time.Duration

	mu      sync.Mutex // guards the fields below
	seats   []*seat[T]
	words   []T
	round   int64 // that is open, or opens with the next arrival
	arrived int
	opened  time.Time
	timer   *time.Timer // fires once the open round is due, or later
	dropped int64
	err     error
}

// seat is a rank's place in a Hub.
type seat[T any] struct {
	hub      *Hub[T]
	rank     int
	called   chan struct{} // capacity 1
	released chan Round[T] // capacity 1
	in       bool          // arrived in the open round
}

// New makes a meeting point of so many ranks. A round may stay open for the deadline.
func New[T any](ranks int, deadline time.Duration) *Hub[T] {
	h := &Hub[T]{deadline: deadline, round: 1, words: make([]T, ranks)}
	for rank := range ranks {
		h.seats = append(h.seats, &seat[T]{hub: h, rank: rank, called: make(chan struct{}, 1), released: make(chan Round[T], 1)})
	}
	return h
}

// Member gives the place of a rank, which each rank takes once.
func (h *Hub[T]) Member(rank int) Member[T] { return h.seats[rank] }

// Dropped counts the words that came to a round that was over, or twice.
func (h *Hub[T]) Dropped() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.dropped
}

// Unheard gives what a rank has not heard, once all have ended: the words of the round that was over, if it has not taken it, and
// those of the round that is not; in the place of a rank that had not come is a zero.
func (h *Hub[T]) Unheard(rank int) (list [][]T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case r := <-h.seats[rank].released:
		if r.Err == nil {
			list = append(list, r.Words)
		}
	default:
	}
	return append(list, h.words)
}

// Arrive implements Member.
func (s *seat[T]) Arrive(round int64, word T) error {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return h.err
	}
	if round != h.round || s.in || len(s.released) > 0 { // it must have heard of the round before
		if round <= h.round {
			h.dropped++
		}
		return fmt.Errorf("%w: rank %d came to round %d, open is %d, in it already: %t", ErrOutOfStep, s.rank, round, h.round, s.in)
	}
	s.in, h.words[s.rank] = true, word
	select {
	case <-s.called: // it came by itself
	default:
	}
	if h.arrived++; h.arrived == len(h.seats) {
		h.release()
		return nil
	}
	if h.arrived == 1 {
		h.open()
	}
	return nil
}

// open calls the ranks that have not arrived, and sets their time.
func (h *Hub[T]) open() {
	h.opened = time.Now()
	if h.timer == nil {
		h.timer = time.AfterFunc(h.deadline, h.due)
	}
	for _, s := range h.seats {
		if !s.in {
			s.called <- struct{}{} // empty: a rank takes the message, or its arrival does
		}
	}
}

// release ends the round.
func (h *Hub[T]) release() {
	r := Round[T]{Number: h.round, Words: h.words}
	h.words, h.arrived = make([]T, len(h.seats)), 0
	h.round++
	for _, s := range h.seats {
		s.in = false
		s.released <- r // empty: a rank takes it before it arrives again
	}
}

// due looks whether a round is late. One timer serves all rounds: most are over long before, and setting it anew in each
// would cost more than the round.
func (h *Hub[T]) due() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.timer = nil
	if h.err != nil || h.arrived == 0 {
		return
	}
	if left := h.deadline - time.Since(h.opened); left > 0 {
		h.timer = time.AfterFunc(left, h.due)
		return
	}
	var missing []int
	for _, s := range h.seats {
		if !s.in {
			missing = append(missing, s.rank)
		}
	}
	h.fail(&MissedError{h.round, h.deadline, missing})
}

// fail ends all rounds. Every rank hears it once, also one that has not arrived.
func (h *Hub[T]) fail(err error) {
	if h.err != nil {
		return
	}
	h.err = err
	for _, s := range h.seats {
		select {
		case s.released <- Round[T]{Number: h.round, Err: err}:
		default: // it has yet to take the round before; its next arrival says the rest
		}
	}
}

// Called implements Member.
func (s *seat[T]) Called() <-chan struct{} { return s.called }

// Released implements Member.
func (s *seat[T]) Released() <-chan Round[T] { return s.released }

// Leave implements Member.
func (s *seat[T]) Leave(err error) {
	if err == nil {
		return
	}
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	s.hub.fail(fmt.Errorf("%w: rank %d: %w", ErrLost, s.rank, err))
}
