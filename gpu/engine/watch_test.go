package engine

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

func TestPaceAllowsWhatStepsTake(t *testing.T) {
	const least = time.Minute
	type step struct {
		tokens int
		took   time.Duration
	}
	for _, c := range []struct {
		name   string
		past   []step
		tokens int
		want   time.Duration
	}{
		{"the first step of one token", nil, 0, least},
		{"a first chunk of a large model on a processor", nil, 2048, 65 * least},
		{"fast steps", []step{{1, 10 * time.Millisecond}, {64, 20 * time.Millisecond}}, 2048, least},
		{"a chunk, when a token took seconds", []step{{1, 3300 * time.Millisecond}}, 2048, 2080 * time.Second},
		{"a token, after slow chunks", []step{{1, 3300 * time.Millisecond}, {2048, 10 * 208 * time.Second}}, 1, 330 * time.Second},
	} {
		p := newPace(least)
		for _, s := range c.past {
			p.learn(s.tokens, s.took.Nanoseconds())
		}
		if got := p.limit(c.tokens).Round(time.Millisecond); got != c.want {
			t.Errorf("%s: a step of %d tokens may take %v, want %v", c.name, c.tokens, got, c.want)
		}
	}
}

func TestPaceForgets(t *testing.T) {
	p := newPace(time.Minute)
	p.learn(1, time.Hour.Nanoseconds())
	for range 1000 {
		p.learn(1, 1e6)
	}
	if got := p.limit(1); got != time.Minute {
		t.Errorf("a step may take %v after 1000 short ones, want 1m0s", got)
	}
}

// hangs is a simulated device whose step of a number sleeps until it is let go.
func hangs(at int64, cost sim.Cost) (dev sim.Config, letGo func()) {
	held := make(chan struct{})
	return sim.Config{Cost: cost, Fail: func(iter int64) error {
		if iter == at {
			<-held
		}
		return nil
	}}, func() { close(held) }
}

func TestADeviceThatHangsEndsTheEngine(t *testing.T) {
	for _, overlap := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			dev, letGo := hangs(5, sim.Cost{Step: 1e6, CopyByte: 1e18})
			r := newRig(t, Config{MaxBatchSize: 2, Overlap: overlap, StepDeadline: 2 * time.Second, PrefixReuse: true, HostKVBytes: 1 << 20}, dev)
			r.runs = ErrHung
			r.run(request(40, 9, 1)) // its blocks are on their way to the host for ever
			begin := time.Now()
			var open []*Sequence
			for i := range int32(3) { // the last one waits
				s, err := r.Submit(request(20, i, 50))
				if err != nil {
					t.Fatal(err)
				}
				open = append(open, s)
			}
			for _, s := range open {
				res := r.finish(s)
				if took := time.Since(begin); took < 2*time.Second || took > 2500*time.Millisecond {
					t.Errorf("a request ended after %v, want 2 to 2.5 s", took)
				}
				if err := res.done.Err; !errors.Is(err, ErrStopped) || !errors.Is(err, ErrHung) || !strings.Contains(err.Error(), "step 5 of 2 sequences") {
					t.Errorf("a request ended with %v", err)
				}
				if res.done.Report.FinishedNS == 0 {
					t.Errorf("the report says no end: %+v", res.done.Report)
				}
			}
			if _, err := r.Submit(request(20, 7, 5)); !errors.Is(err, ErrStopped) {
				t.Errorf("the engine goes on: %v", err)
			}
			letGo() // a step that comes back changes nothing
			synctest.Wait()
		})
	}
}

// stuck is a device that does not come back from Submit.
type stuck struct {
	backend.Backend
	held chan struct{}
}

func (s stuck) Submit(b *backend.Batch) *backend.Step {
	<-s.held
	return s.Backend.Submit(b)
}

func TestAnEngineThatHangsInItsDeviceIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := clock()
		d, err := sim.New(sim.Config{Now: now})
		if err != nil {
			t.Fatal(err)
		}
		s := stuck{d, make(chan struct{})}
		e, err := New(Config{Now: now, StepDeadline: time.Second}, s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Submit(request(20, 1, 5)); err != nil {
			t.Fatal(err)
		}
		if err := e.Run(context.Background()); !errors.Is(err, ErrHung) {
			t.Errorf("Run: %v, want ErrHung", err)
		}
		close(s.held)
		<-e.stopped
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestSlowStepsAreNoHang: steps that take many times the least deadline, and a rest between them.
func TestSlowStepsAreNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, StepDeadline: time.Second, MaxNumTokens: 2048}, sim.Config{Cost: sim.Cost{Step: 9e8, PrefillToken: 27e6, Decode: 27e6}})
		defer r.stop()
		for _, n := range []int{1, 2000, 7000} {
			if res := r.run(request(n, 1, 5)); res.done.Reason != infer.FinishLength {
				t.Errorf("a prompt of %d tokens: done %+v", n, res.done)
			}
			time.Sleep(time.Hour)
		}
	})
}
