// Package breaker decides, from how legs ended, which nodes get no work for a while and how much may be tried again. It is
// pure: the caller brings the time, and guards it.
//
// A node has one breaker for each kind of leg, so that a dead generation node never speaks against a context node.
// Overload (429, 503) and cancellation say nothing about health and must be reported as Neutral. Which node is the last is
// the caller's knowledge: it places without Refused when nothing else is left.
package breaker

import (
	"cmp"
	"slices"
	"time"
)

// Result is how a leg ended, as its node is to be judged.
type Result int

// The results.
const (
	Good    Result = iota
	Bad            // it could not be reached, broke off, or answered with a fault of its own
	Neutral        // cancelled, overloaded, refused for the request's sake, or the other leg's fault
)

// State of a breaker.
type State int

// The states.
const (
	Closed   State = iota
	HalfOpen       // the time is over: one leg tries it
	Open           // no work
)

// String names the state as metrics and /cluster do.
func (s State) String() string { return [...]string{"closed", "half_open", "open"}[s] }

// Key names a breaker.
type Key struct {
	Leg  string // ctx or gen
	Node string
}

const (
	// Trip is how many legs in a row must fail: fewer may be one broken link or one bad request.
	Trip = 3
	// FirstPause is how long a breaker stays open the first time; each probe that fails doubles it.
	FirstPause = time.Second
	// MaxPause is the longest that a breaker stays open.
	MaxPause = 15 * time.Second
	// forget drops breakers of nodes that nothing was sent to for so long.
	forget = 10 * time.Minute
)

// Set holds the breakers of a router. The zero value is ready.
type Set struct{ m map[Key]*state }

type state struct {
	row     int           // failures in a row
	pause   time.Duration // 0: closed
	untilNS int64         // open until then, half-open after
	probing bool          // a leg tries it
	lastNS  int64
}

func (s *state) at(nowNS int64) State {
	switch {
	case s.pause == 0:
		return Closed
	case nowNS < s.untilNS:
		return Open
	default:
		return HalfOpen
	}
}

// Refused appends the nodes that are to get no leg of this kind now: open ones, and half-open ones that are being tried.
func (s *Set) Refused(leg string, nowNS int64, dst []string) []string {
	for k, st := range s.m {
		if k.Leg == leg && (st.at(nowNS) == Open || st.at(nowNS) == HalfOpen && st.probing) {
			dst = append(dst, k.Node)
		}
	}
	return dst
}

// Begin says that a leg is sent.
func (s *Set) Begin(k Key, nowNS int64) {
	if st := s.m[k]; st != nil && st.at(nowNS) == HalfOpen {
		st.probing = true
	}
}

// End says how a leg ended. It returns true when the breaker opens by it.
func (s *Set) End(k Key, r Result, nowNS int64) (opened bool) {
	st := s.m[k]
	if st == nil {
		if r != Bad {
			return false
		}
		if s.m == nil {
			s.m = map[Key]*state{}
		}
		s.prune(nowNS)
		st = &state{}
		s.m[k] = st
	}
	st.lastNS = nowNS
	before := st.at(nowNS)
	switch {
	case r == Neutral:
		st.probing = false
	case r == Good && before != Open: // a leg that was sent before the breaker opened says nothing new
		delete(s.m, k)
	case r == Bad:
		st.row++
		if before == HalfOpen || before == Closed && st.row >= Trip {
			st.pause = min(max(2*st.pause, FirstPause), MaxPause)
			st.untilNS, st.probing = nowNS+st.pause.Nanoseconds(), false
			return true
		}
	}
	return false
}

func (s *Set) prune(nowNS int64) {
	for k, st := range s.m {
		if nowNS-st.lastNS > forget.Nanoseconds() {
			delete(s.m, k)
		}
	}
}

// Status is one breaker that is not in its first state.
type Status struct {
	Key
	State    State
	Failures int // in a row
}

// Snapshot lists the breakers that have something to say, sorted.
func (s *Set) Snapshot(nowNS int64) []Status {
	out := make([]Status, 0, len(s.m))
	for k, st := range s.m {
		out = append(out, Status{k, st.at(nowNS), st.row})
	}
	slices.SortFunc(out, func(a, b Status) int { return cmp.Or(cmp.Compare(a.Leg, b.Leg), cmp.Compare(a.Node, b.Node)) })
	return out
}
