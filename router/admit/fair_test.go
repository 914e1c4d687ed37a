package admit

import (
	"errors"
	"testing"
	"time"
)

// A has a backlog; B sends its next request whenever it has none waiting.
func TestAFlowThatEmptiesKeepsItsTurn(t *testing.T) {
	q := &Queue{Limit: 1, Room: 1000}
	run, _, _ := q.Arrive(0, ask("b", 0))
	for range 10 {
		q.Arrive(0, ask("a", 0))
	}
	q.Arrive(0, ask("b", 0))
	served := map[string]int{}
	for range 200 {
		run = q.Leave(0, run)[0]
		served[run.Principal]++
		if run.Principal == "a" || !waits(q, "b") {
			q.Arrive(0, ask(run.Principal, 0))
		}
	}
	if served["a"] < 80 {
		t.Errorf("a, with 10 waiting all the time, got %d of 200 turns, b %d: want about 100 each", served["a"], served["b"])
	}
}

func waits(q *Queue, who string) bool {
	for _, f := range q.flows {
		if f.principal == who {
			return true
		}
	}
	return false
}

// A's backlog is worth 10 s; B, of which nothing waits, would be next but is told that the wait is too long.
func TestAnothersBacklogIsNoReasonToBeLate(t *testing.T) {
	q := &Queue{Limit: 1, Room: 1000}
	at := func(s int64) int64 { return 100*second + s*second }
	patient := func(who string) Ask { return Ask{Principal: who, Weight: 1, Patience: 10 * time.Second} }
	run, _, _ := q.Arrive(at(0), patient("a"))
	for i := range int64(11) { // one a second ends
		q.Arrive(at(i), patient("a"))
		next := q.Leave(at(i+1), run)
		run = next[0]
	}
	n := 0
	for ; ; n++ {
		if _, _, err := q.Arrive(at(11), patient("a")); err != nil {
			break
		}
	}
	_, _, err := q.Arrive(at(11), patient("b"))
	if errors.Is(err, ErrLate) {
		t.Errorf("b is refused (%v) with %d of a waiting; by turns it would run after 1 or 2 of them (about 2 s of its 10)", err, n)
	}
}

// One heavy request fills the room; the busiest principal's is not evicted for a newcomer, since it is one.
func TestOneHeavyRequestMakesRoomForOthers(t *testing.T) {
	q := &Queue{Limit: 1, Room: 1024}
	q.Arrive(0, ask("a", 0))
	if _, _, err := q.Arrive(0, Ask{Principal: "a", Weight: 1024, Patience: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := q.Arrive(0, ask("b", 0)); err != nil {
		t.Errorf("b: %v", err)
	}
}
