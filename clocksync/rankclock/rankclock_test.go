package rankclock

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"meridian.internal/shared/clock"
)

// serve runs the clock of a rank in this process.
func serve(t *testing.T, o clock.Options) (*clock.Steady, string) {
	t.Helper()
	s, err := clock.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	at, served := make(chan string, 1), make(chan error, 1)
	go func() {
		served <- Serve(ctx, options(s), func(addr string) error {
			at <- addr
			<-ctx.Done()
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return s, <-at
}

func options(s *clock.Steady) Options {
	return Options{Steady: s, Key: []byte("key"), Logger: slog.New(slog.DiscardHandler)}
}

func node(t *testing.T) *clock.Steady {
	t.Helper()
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestTheBoundHoldsTheTruth: a rank whose clock is the kernel's is proven to be, with the error of both readings as its bound; one whose
// clock is wrong on purpose is estimated, and what it really shows lies within the bound.
func TestTheBoundHoldsTheTruth(t *testing.T) {
	own := node(t)
	same, a := serve(t, clock.Options{})
	wrong, b := serve(t, clock.Options{FaultSkewPPM: 200, FaultStep: 3 * time.Millisecond, FaultStepAfter: time.Nanosecond})
	c, err := Follow(t.Context(), options(own), map[int]string{1: a, 2: b})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	e, ok := c.Newest(1)
	for end := time.Now().Add(time.Minute); e.State != clock.Identity && time.Now().Before(end); e, ok = c.Newest(1) {
		time.Sleep(time.Millisecond) // the proof is tried again if its answer was late
	}
	if !ok || e.State != clock.Identity || e.OffsetNS != 0 || e.BoundNS() != own.AnchorErrNS()+same.AnchorErrNS() || e.Local != same.ID() || e.Reference != own.ID() {
		t.Errorf("the kernel's clock: %+v, %t", e, ok)
	}
	for range 20 {
		e, ok := c.Newest(2)
		before, shows, after := own.Now(), wrong.Now(), own.Now()
		at, bound, converts := e.Convert(shows)
		if !ok || !converts || e.State == clock.Identity || e.Local != wrong.ID() || at+bound < before || at-bound > after {
			t.Fatalf("a wrong clock: %+v puts it at %d ± %d, it was %d to %d", e, at, bound, before, after)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if e, ok := c.Newest(0); ok {
		t.Errorf("rank 0 reads the node's clock, and has the estimate %+v", e)
	}
}

func TestARankWhoseClockDoesNotAnswerIsNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := Follow(ctx, options(node(t)), map[int]string{3: "127.0.0.1:1"})
	if !errors.Is(err, context.DeadlineExceeded) || err.Error() != "clock of rank 3 at 127.0.0.1:1 is not known: context deadline exceeded" {
		t.Errorf("got %v", err)
	}
}

func TestANodeWithoutSuchRanksFollowsNothing(t *testing.T) {
	c, err := Follow(t.Context(), options(node(t)), nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
