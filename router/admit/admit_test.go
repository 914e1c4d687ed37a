package admit

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

const second = int64(time.Second)

func ask(who string, priority int) Ask {
	return Ask{Principal: who, Priority: priority, Weight: 1, Patience: time.Hour}
}

// fill runs one request and queues the others in the order of names; it returns the running one.
func fill(t *testing.T, q *Queue, names ...string) *Ticket {
	t.Helper()
	first, _, err := q.Arrive(0, ask("first", 0))
	if err != nil || !first.Running {
		t.Fatalf("the first does not run: %v", err)
	}
	for _, n := range names {
		who, priority, _ := strings.Cut(n, "+")
		if w, _, err := q.Arrive(0, ask(who, len(priority))); err != nil || w.Running {
			t.Fatalf("%s: %v", n, err)
		}
	}
	return first
}

// order ends one request after the other and names who runs next.
func order(q *Queue, running *Ticket) string {
	var out []string
	for t := running; t != nil; {
		next := q.Leave(0, t)
		t = nil
		if len(next) > 0 {
			t = next[0]
			out = append(out, t.Principal)
		}
	}
	return strings.Join(out, " ")
}

func TestWhoseTurnItIs(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"one principal: in order", "a a a", "a a a"},
		{"two principals take turns", "a a a b b", "a b a b a"},
		{"a flood delays others by one", "a a a a a a b", "a b a a a a a"},
		{"priority first", "a b+x a b+x c+xx", "c b b a a"},
	} {
		q := &Queue{Limit: 1, Room: 100}
		if got := order(q, fill(t, q, strings.Fields(c.in)...)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if r, w := q.Load(); r != 0 || w != 0 || len(q.flows) != 0 {
			t.Errorf("%s: %d run and %d wait at the end", c.name, r, w)
		}
	}
}

func TestAFullQueue(t *testing.T) {
	for _, c := range []struct{ name, in, who, evicted string }{
		{"nobody stands behind", "a b", "c", ""},
		{"the principal with the most waiting gives way", "a a", "b", "a"},
		{"its own flood helps nobody", "a a", "a", ""},
		{"a lower priority gives way", "a b", "c+x", "a"},
		{"a higher one does not", "a+x a+x", "b", ""},
	} {
		q := &Queue{Limit: 1, Room: 2}
		fill(t, q, strings.Fields(c.in)...)
		who, priority, _ := strings.Cut(c.who, "+")
		_, out, err := q.Arrive(0, ask(who, len(priority)))
		switch {
		case c.evicted == "" && !errors.Is(err, ErrFull):
			t.Errorf("%s: %v, want ErrFull", c.name, err)
		case c.evicted != "" && (err != nil || out.Principal != c.evicted || !out.Evicted):
			t.Errorf("%s: %+v, %v, want %s to leave", c.name, out, err, c.evicted)
		}
		if _, w := q.Load(); w != 2 {
			t.Errorf("%s: %d wait, want 2", c.name, w)
		}
	}
}

func TestWaitsAreEstimatedFromTheDrainRate(t *testing.T) {
	q := &Queue{Limit: 1, Room: 1000}
	now := second
	if got := q.RetryAfter(now); got != time.Second {
		t.Errorf("without experience Retry-After is %v", got)
	}
	run := fill(t, q, strings.Fields(strings.Repeat("a ", 60))...)
	for range 20 { // two a second
		now += second / 2
		run = q.Leave(now, run)[0]
	}
	if got := q.RetryAfter(now); got < 18*time.Second || got > 23*time.Second {
		t.Errorf("40 wait and 2 a second end: Retry-After is %v, want about 20 s", got)
	}
	late := ask("a", 0)
	late.Patience = 10 * time.Second
	if _, _, err := q.Arrive(now, late); !errors.Is(err, ErrLate) {
		t.Errorf("a request that can wait 10 s: %v, want ErrLate", err)
	}
	late.Priority = 1
	if _, _, err := q.Arrive(now, late); err != nil {
		t.Errorf("a higher priority waits for nobody: %v", err)
	}
	if got := q.RetryAfter(now + 100*second); got != time.Second {
		t.Errorf("after a pause nothing is known: %v", got)
	}
}

func TestAHeavyRequestRunsAlone(t *testing.T) {
	q := &Queue{Limit: 4, Room: 10}
	heavy := Ask{Weight: 9, Patience: time.Hour}
	h, _, err := q.Arrive(0, heavy)
	if err != nil || !h.Running {
		t.Fatalf("alone it waits: %v", err)
	}
	small, _, err := q.Arrive(0, ask("a", 0))
	if err != nil || small.Running {
		t.Errorf("another runs beside it: %v", err)
	}
	if next := q.Leave(0, h); len(next) != 1 || next[0] != small {
		t.Errorf("after it runs %v", next)
	}
}

func TestRandomArrivalsAndLeavesConserveEverything(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	q := &Queue{Limit: 8, Room: 20}
	live := map[*Ticket]bool{}
	now := int64(0)
	for range 20000 {
		now += r.Int64N(second / 10)
		if r.IntN(100) == 0 {
			q.Limit = 1 + r.IntN(16)
			q.Next()
		}
		if len(live) == 0 || r.IntN(2) == 0 {
			a := Ask{Principal: string(rune('a' + r.IntN(4))), Priority: r.IntN(3), Weight: 1 + r.IntN(3), Patience: time.Duration(r.IntN(60)) * time.Second}
			t2, evicted, err := q.Arrive(now, a)
			if err == nil {
				live[t2] = true
			}
			delete(live, evicted)
		} else {
			for k := range live {
				q.Leave(now, k)
				delete(live, k)
				break
			}
		}
		run, wait := 0, 0
		for k := range live {
			if k.Running {
				run += k.Weight
			} else {
				wait += k.Weight
			}
		}
		if gr, gw := q.Load(); gr != run || gw != wait || wait > q.Room {
			t.Fatalf("the queue says %d run and %d wait, it is %d and %d of %d", gr, gw, run, wait, q.Room)
		}
		if wait > 0 && run == 0 {
			t.Fatal("something waits and nothing runs")
		}
	}
}
