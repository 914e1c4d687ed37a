package collective

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

type word struct{ Rank, Round int }

// meet comes to a round and waits for its end.
func meet[T any](t *testing.T, m Member[T], round int64, w T) Round[T] {
	t.Helper()
	if err := m.Arrive(round, w); err != nil {
		return Round[T]{Err: err}
	}
	return <-m.Released()
}

func TestEachRankGetsTheWordsOfAllInEveryRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ranks, rounds = 4, 10_000
		h := New[word](ranks, time.Minute)
		var wg sync.WaitGroup
		for rank := range ranks {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(1, uint64(rank)))
				m := h.Member(rank)
				for round := 1; round <= rounds; round++ {
					time.Sleep(time.Duration(random.IntN(1000)) * time.Microsecond)
					r := meet(t, m, int64(round), word{rank, round})
					if r.Err != nil || r.Number != int64(round) || len(r.Words) != ranks {
						t.Errorf("round %d of rank %d: %+v", round, rank, r)
						return
					}
					for i, w := range r.Words {
						if w != (word{i, round}) {
							t.Errorf("round %d: word of rank %d is %+v", round, i, w)
						}
					}
				}
			})
		}
		wg.Wait()
		if n := h.Dropped(); n != 0 {
			t.Errorf("%d words dropped, want none", n)
		}
	})
}

func TestARankIsCalledOnceARoundAndOnlyIfItIsNotThere(t *testing.T) {
	h := New[int](2, time.Minute)
	a, b := h.Member(0), h.Member(1)
	for round := int64(1); round <= 3; round++ {
		if err := a.Arrive(round, 1); err != nil {
			t.Fatal(err)
		}
		if len(b.Called()) != 1 || len(a.Called()) != 0 {
			t.Errorf("round %d: %d calls for who is missing, %d for who is there", round, len(b.Called()), len(a.Called()))
		}
		if err := b.Arrive(round, 2); err != nil {
			t.Fatal(err)
		}
		<-a.Released()
		<-b.Released()
		if len(b.Called()) != 0 {
			t.Errorf("round %d: a call is left after the arrival", round)
		}
	}
}

func TestTheRankThatMissesARoundIsNamedToAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New[int](3, time.Second)
		begin := time.Now()
		time.Sleep(5 * time.Second) // nobody is there yet: no round, no deadline
		_ = h.Member(0).Arrive(1, 0)
		time.Sleep(700 * time.Millisecond)
		_ = h.Member(2).Arrive(1, 0)
		for rank := range 3 {
			r := <-h.Member(rank).Released()
			if !errors.Is(r.Err, ErrMissed) || !strings.Contains(r.Err.Error(), "[1]") {
				t.Errorf("rank %d heard %v, want that [1] missed", rank, r.Err)
			}
		}
		if d := time.Since(begin); d != 6*time.Second {
			t.Errorf("told after %v, want the deadline of 1 s after the first arrival", d)
		}
		if err := h.Member(1).Arrive(1, 0); !errors.Is(err, ErrMissed) {
			t.Errorf("the rank that comes late hears %v, want why it was given up", err)
		}
	})
}

func TestADeadlineIsThatOfItsOwnRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New[int](2, time.Second)
		for round := int64(1); round < 10; round++ { // more than a deadline in all, none of them late
			_ = h.Member(0).Arrive(round, 0)
			time.Sleep(600 * time.Millisecond)
			if r := meet(t, h.Member(1), round, 0); r.Err != nil {
				t.Fatal(r.Err)
			}
			<-h.Member(0).Released()
		}
	})
}

func TestWhatIsOutOfStepIsDroppedCountedAndHarmless(t *testing.T) {
	h := New[int](2, time.Minute)
	a, b := h.Member(0), h.Member(1)
	_ = a.Arrive(1, 7)
	for _, c := range []struct {
		name  string
		m     Member[int]
		round int64
	}{{"twice", a, 1}, {"old", b, 0}, {"ahead", b, 2}} {
		if err := c.m.Arrive(c.round, 99); !errors.Is(err, ErrOutOfStep) {
			t.Errorf("%s: %v, want ErrOutOfStep", c.name, err)
		}
	}
	r := meet(t, b, 1, 8)
	if r.Err != nil || r.Words[0] != 7 || r.Words[1] != 8 {
		t.Errorf("the round has %+v, want the first words 7 and 8", r)
	}
	if err := b.Arrive(1, 9); !errors.Is(err, ErrOutOfStep) {
		t.Errorf("old again: %v, want ErrOutOfStep", err)
	}
	if n := h.Dropped(); n != 3 {
		t.Errorf("dropped %d, want 3: the word from ahead belongs to no round", n)
	}
}

func TestALostRankIsNamedAtOnce(t *testing.T) {
	h := New[int](2, time.Hour)
	_ = h.Member(0).Arrive(1, 0)
	h.Member(1).Leave(errors.New("device fell off"))
	r := <-h.Member(0).Released()
	if !errors.Is(r.Err, ErrLost) || !strings.Contains(r.Err.Error(), "rank 1: device fell off") {
		t.Errorf("heard %v", r.Err)
	}
}

// join opens a hub whose other ranks come over a socket.
func join(t *testing.T, ranks int, deadline time.Duration) (*Hub[word], []Member[word]) {
	t.Helper()
	h := New[word](ranks, deadline)
	path := filepath.Join(t.TempDir(), "ranks.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- h.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	all := []Member[word]{h.Member(0)}
	for rank := 1; rank < ranks; rank++ {
		m, err := Dial[word](ctx, path, rank)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	return h, all
}

func TestRanksOfOtherProcessesMeetLikeGoroutines(t *testing.T) {
	const rounds = 500
	h, all := join(t, 3, time.Minute)
	var wg sync.WaitGroup
	for rank, m := range all {
		wg.Go(func() {
			for round := 1; round <= rounds; round++ {
				if rank > 0 && round%3 == 0 {
					<-m.Called() // rank 0 is always first then
				}
				r := meet(t, m, int64(round), word{rank, round})
				if r.Err != nil || fmt.Sprint(r.Words) != fmt.Sprint([]word{{0, round}, {1, round}, {2, round}}) {
					t.Errorf("round %d of rank %d: %+v", round, rank, r)
					return
				}
			}
		})
	}
	wg.Wait()
	if h.Dropped() != 0 {
		t.Errorf("%d words dropped", h.Dropped())
	}
	for _, m := range all {
		m.Leave(nil)
	}
}

func TestAProcessThatDiesIsNamedToTheOthers(t *testing.T) {
	_, all := join(t, 3, time.Hour)
	for _, m := range all[:2] {
		if err := m.Arrive(1, word{}); err != nil {
			t.Fatal(err)
		}
	}
	_ = all[2].(*remote[word]).w.conn.Close() // what the system does for a process that was killed
	for rank, m := range all[:2] {
		r := <-m.Released()
		if !errors.Is(r.Err, ErrLost) || !strings.Contains(r.Err.Error(), "rank 2") {
			t.Errorf("rank %d heard %v, want that rank 2 is lost", rank, r.Err)
		}
	}
}

func TestARankThatReturnsIsRefused(t *testing.T) {
	_, all := join(t, 2, time.Hour)
	round := func(n int) {
		t.Helper()
		if err := all[1].Arrive(int64(n), word{1, n}); err != nil {
			t.Fatal(err)
		}
		for _, r := range []Round[word]{meet(t, all[0], int64(n), word{0, n}), <-all[1].Released()} {
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}
	}
	round(1) // the first process has its place
	path := all[1].(*remote[word]).w.conn.RemoteAddr().String()
	again, err := Dial[word](t.Context(), path, 1)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-again.Released(); r.Err == nil || !strings.Contains(r.Err.Error(), "its place is taken") {
		t.Errorf("the second process of rank 1 heard %v", r.Err)
	}
	again.Leave(nil)
	round(2) // the first is not disturbed
}

func TestARemoteRankOutOfStepHearsSo(t *testing.T) {
	h, all := join(t, 2, time.Hour)
	_ = all[1].Arrive(5, word{})
	if r := <-all[1].Released(); r.Err == nil || !strings.Contains(r.Err.Error(), "out of step") {
		t.Errorf("heard %v", r.Err)
	}
	if r := len(h.Member(0).Released()); r != 0 {
		t.Error("the other rank was disturbed")
	}
}

// FuzzSocket holds a hub against what is no rank: it ends the connection, and loses at most the rank that it named.
func FuzzSocket(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h := New[word](2, time.Hour)
		here, there := net.Pipe()
		go func() {
			_, _ = here.Write(b)
			_ = here.Close()
		}()
		done := make(chan struct{})
		go func() { h.session(t.Context(), there); close(done) }()
		<-done
	})
}
