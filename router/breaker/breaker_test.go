package breaker

import (
	"slices"
	"testing"
	"time"
)

var gen0, ctx0 = Key{"gen", "n0"}, Key{"ctx", "n0"}

const second = int64(time.Second)

// play reports results and returns the state after them.
func play(s *Set, k Key, now int64, results ...Result) State {
	for _, r := range results {
		s.End(k, r, now)
	}
	for _, st := range s.Snapshot(now) {
		if st.Key == k {
			return st.State
		}
	}
	return Closed
}

func TestABreakerOpensAfterFailuresInARow(t *testing.T) {
	for _, c := range []struct {
		name    string
		results []Result
		want    State
	}{
		{"two failures", []Result{Bad, Bad}, Closed},
		{"three in a row", []Result{Bad, Bad, Bad}, Open},
		{"a success between", []Result{Bad, Bad, Good, Bad, Bad}, Closed},
		{"overload is no failure", []Result{Neutral, Neutral, Neutral, Neutral, Neutral}, Closed},
		{"overload between does not save it", []Result{Bad, Neutral, Bad, Neutral, Bad}, Open},
		{"a late success of an older leg does not close it", []Result{Bad, Bad, Bad, Good}, Open},
	} {
		var s Set
		if got := play(&s, gen0, 5, c.results...); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestADeadGenerationNodeSaysNothingOfPrefill(t *testing.T) {
	var s Set
	play(&s, gen0, 0, Bad, Bad, Bad)
	if r := s.Refused("ctx", 0, nil); len(r) != 0 {
		t.Errorf("refused for ctx: %v", r)
	}
	if r := s.Refused("gen", 0, nil); !slices.Equal(r, []string{"n0"}) {
		t.Errorf("refused for gen: %v", r)
	}
}

func TestOneLegTriesANodeThatWasOpen(t *testing.T) {
	var s Set
	play(&s, gen0, 0, Bad, Bad, Bad)
	now := second
	if r := s.Refused("gen", now, nil); len(r) != 0 {
		t.Fatalf("after the pause nobody may try it: %v", r)
	}
	s.Begin(gen0, now)
	if r := s.Refused("gen", now, nil); len(r) != 1 {
		t.Error("a second leg is let through while one tries")
	}
	s.End(gen0, Neutral, now) // the probe was cancelled: another may try
	if r := s.Refused("gen", now, nil); len(r) != 0 {
		t.Error("a cancelled probe holds the breaker")
	}
	s.Begin(gen0, now)
	if !s.End(gen0, Bad, now) || play(&s, gen0, now+2*second-1) != Open || play(&s, gen0, now+2*second) != HalfOpen {
		t.Error("a probe that failed does not double the pause")
	}
	if got := play(&s, gen0, now+2*second, Good); got != Closed {
		t.Errorf("a probe that succeeded leaves it %v", got)
	}
	if len(s.m) != 0 {
		t.Error("a closed breaker is kept")
	}
}

func TestThePauseIsBounded(t *testing.T) {
	var s Set
	now := int64(0)
	play(&s, gen0, now, Bad, Bad, Bad)
	for range 20 {
		now += MaxPause.Nanoseconds()
		if got := play(&s, gen0, now); got != HalfOpen {
			t.Fatalf("%v after the longest pause", got)
		}
		s.End(gen0, Bad, now)
	}
}

func TestNodesThatAreGoneAreForgotten(t *testing.T) {
	var s Set
	s.End(ctx0, Bad, 0)
	s.End(gen0, Bad, forget.Nanoseconds()+1)
	if len(s.m) != 1 {
		t.Errorf("%d breakers kept, want 1", len(s.m))
	}
}

func TestRetriesAreBoundedOverTime(t *testing.T) {
	b := NewBudget(0)
	taken := 0
	for b.Take(0) {
		taken++
	}
	if taken != most {
		t.Errorf("a full budget gave %d retries, want %v", taken, most)
	}
	if b.Take(second/2) || !b.Take(second) {
		t.Error("a second does not add one retry")
	}
	for range 9 {
		b.Request(second)
	}
	if !b.Take(second) || b.Take(second) {
		t.Error("nine requests do not add one retry")
	}
	b.Request(1000 * second)
	if left := b.Left(1000 * second); left != most {
		t.Errorf("%v left, want the most, %v", left, most)
	}
	if b.Left(0) != most {
		t.Error("a time before the last one changes the budget")
	}
}

func TestBackoffGrowsAndIsSpread(t *testing.T) {
	for n, limit := range []time.Duration{10 * time.Millisecond, 40 * time.Millisecond, 160 * time.Millisecond, 640 * time.Millisecond, time.Second, time.Second} {
		if a, b, c := Backoff(n, 0), Backoff(n, 0.5), Backoff(n, 0.999); a != 0 || b != limit/2 || c >= limit {
			t.Errorf("retry %d waits %v, %v, %v for draws of 0, 0.5, 0.999; want shares of %v", n, a, b, c, limit)
		}
	}
}
