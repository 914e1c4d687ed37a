package backend

import (
	"errors"
	"testing"
)

func TestAnEventSetIsReadBeforeItIsUsedAgain(t *testing.T) {
	var e EventSets
	take := func(iter int64) *EventSet {
		t.Helper()
		s, err := e.Take(iter)
		if err != nil {
			t.Fatal(err)
		}
		for k := range int64(3) {
			s.Mark(iter*10 + k)
		}
		return s
	}
	one, two := take(1), take(2)
	if one == two {
		t.Fatal("two steps share a set")
	}
	if _, err := e.Take(3); !errors.Is(err, ErrEventsUnread) {
		t.Errorf("step 3 takes the set of step 1, which nobody has read: %v", err)
	}
	if got := one.Read(); got != (Stamps{10, 11, 12}) {
		t.Errorf("step 1: %+v", got)
	}
	if three := take(3); three != one {
		t.Error("the sets are not used in turn")
	}
	if got := two.Read(); got != (Stamps{20, 21, 22}) {
		t.Errorf("step 2: %+v", got)
	}
	if _, err := e.Take(4); err != nil {
		t.Errorf("step 4: %v", err)
	}
}

func TestAStepThatFailedHasNoTimesMadeUp(t *testing.T) {
	var e EventSets
	s, err := e.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	s.Mark(7)
	if got := s.Read(); got != (Stamps{7, 7, 7}) {
		t.Errorf("%+v", got)
	}
}
