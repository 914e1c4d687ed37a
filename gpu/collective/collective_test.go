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

// join makes a hub whose other ranks come over sockets. gone has what Host says of each.
func join(t *testing.T, ranks int, deadline time.Duration) (h *Hub[word], all []Member[word], gone []chan error) {
	t.Helper()
	return joinBy(t, ranks, deadline, func() (here, there net.Conn) { return sockets(t) })
}

// sockets gives the two ends of a Unix socket.
func sockets(t *testing.T) (here, there net.Conn) {
	t.Helper()
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "ranks.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if there, err = net.Dial("unix", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if here, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	return here, there
}

// joinBy is join over connections that are given.
func joinBy(t *testing.T, ranks int, deadline time.Duration, connect func() (here, there net.Conn)) (h *Hub[word], all []Member[word], gone []chan error) {
	t.Helper()
	h = New[word](ranks, deadline)
	ctx, cancel := context.WithCancel(t.Context())
	var hosts sync.WaitGroup
	t.Cleanup(func() { cancel(); hosts.Wait() })
	all, gone = []Member[word]{h.Member(0)}, []chan error{nil}
	for rank := 1; rank < ranks; rank++ {
		here, there := connect()
		said := make(chan error, 1)
		hosts.Go(func() {
			err := h.Host(ctx, rank, here)
			h.Member(rank).Leave(err)
			said <- err
		})
		all, gone = append(all, Join[word](there, rank)), append(gone, said)
	}
	return h, all, gone
}

func TestRanksOfOtherProcessesMeetLikeGoroutines(t *testing.T) {
	const rounds = 500
	h, all, gone := join(t, 3, time.Minute)
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
	for rank, m := range all {
		if m.Leave(nil); rank > 0 {
			if err := <-gone[rank]; err != nil {
				t.Errorf("rank %d left in peace and its host heard %v", rank, err)
			}
		}
	}
}

// lateReader is a connection that is not read before a write to it has failed.
type lateReader struct {
	net.Conn
	failed chan struct{}
}

func (c *lateReader) Read(b []byte) (int, error) {
	<-c.failed
	return c.Conn.Read(b)
}

func (c *lateReader) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		close(c.failed)
	}
	return n, err
}

// TestTheLastWordOfARankThatHasLeftCounts though it can be told nothing any more.
func TestTheLastWordOfARankThatHasLeftCounts(t *testing.T) {
	_, all, gone := joinBy(t, 2, time.Minute, func() (here, there net.Conn) {
		here, there = sockets(t)
		return &lateReader{here, make(chan struct{})}, there
	})
	if err := all[1].Arrive(1, word{1, 7}); err != nil {
		t.Fatal(err)
	}
	all[1].Leave(nil)
	r := meet(t, all[0], 1, word{0, 7}) // which calls rank 1
	if r.Err != nil || r.Words[1] != (word{1, 7}) {
		t.Errorf("the round has %+v, want the word of the rank that left", r)
	}
	if err := <-gone[1]; err != nil {
		t.Errorf("rank 1 left in peace and its host heard %v", err)
	}
}

func TestAProcessThatDiesIsNamedToTheOthers(t *testing.T) {
	_, all, _ := join(t, 3, time.Hour)
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

// TestARankThatReturnsLateHearsWhy: it was given up, and what it brings is nobody's any more.
func TestARankThatReturnsLateHearsWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, all, _ := joinBy(t, 3, 50*time.Millisecond, net.Pipe)
		for _, m := range all[:2] {
			if err := m.Arrive(1, word{}); err != nil {
				t.Fatal(err)
			}
		}
		for rank, m := range all[:2] {
			if r := <-m.Released(); r.Err == nil || !strings.Contains(r.Err.Error(), "[2]") {
				t.Errorf("rank %d heard %v, want that [2] missed", rank, r.Err)
			}
		}
		if r := <-all[2].Released(); r.Err == nil || !strings.Contains(r.Err.Error(), "[2]") {
			t.Errorf("the late rank heard %v, want why it was given up", r.Err)
		}
		if err := all[2].Arrive(1, word{2, 1}); err == nil {
			t.Error("the late rank came to a round that was given up")
		}
		if h.Dropped() != 0 { // it never reached the hub
			t.Errorf("%d words dropped", h.Dropped())
		}
	})
}

// TestARemoteRankThatSaysThingsTwiceDisturbsNobody: what is old or repeated on the wire is dropped and counted.
func TestARemoteRankThatSaysThingsTwiceDisturbsNobody(t *testing.T) {
	h, all, _ := join(t, 2, time.Minute)
	w := all[1].(*remote[word]).w
	send := func(round int64, text int) {
		t.Helper()
		if err := w.send(message[word]{Kind: arrival, Round: round, Word: word{1, text}}); err != nil {
			t.Fatal(err)
		}
	}
	send(1, 1)
	send(1, 99) // twice
	send(0, 99) // old
	if r := <-all[1].Released(); r.Err == nil || !strings.Contains(r.Err.Error(), "out of step") {
		t.Errorf("the rank heard %v, want that it is out of step", r.Err)
	}
	r := meet(t, all[0], 1, word{0, 1})
	if r.Err != nil || r.Words[1] != (word{1, 1}) {
		t.Errorf("the round has %+v, want the first word of rank 1", r)
	}
	for h.Dropped() < 2 {
		time.Sleep(time.Millisecond)
	}
}

func TestARemoteRankOutOfStepHearsSo(t *testing.T) {
	h, all, _ := join(t, 2, time.Hour)
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
		go func() { _ = h.Host(t.Context(), 1, there); close(done) }()
		<-done
	})
}
