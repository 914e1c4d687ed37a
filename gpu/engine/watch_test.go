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
			dev, letGo := hangs(5, sim.Cost{Step: 1e6})
			r := newRig(t, Config{MaxBatchSize: 2, Overlap: overlap, StepDeadline: 2 * time.Second}, dev)
			r.runs = ErrHung
			r.run(request(40, 9, 1))
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

// TestACopyThatHangsEndsTheEngine: steps go on, and nothing else says that the device hangs.
func TestACopyThatHangsEndsTheEngine(t *testing.T) {
	ctx := context.Background()
	never := sim.Cost{Step: 1e6, CopyByte: 1e11}
	for _, c := range []struct {
		name string
		cfg  Config
		copy func(r *rig, ended chan<- error)
	}{
		{"to host memory", Config{PrefixReuse: true, HostKVBytes: 1 << 20}, func(r *rig, ended chan<- error) {
			r.run(request(40, 9, 1))
			ended <- ErrHung // nobody waits for it
		}},
		{"to another node", Config{}, func(r *rig, ended chan<- error) {
			s, err := r.Submit(contextOnly(40))
			if err != nil {
				t.Fatal(err)
			}
			span, err := s.Export().NextSpan(ctx)
			if err != nil {
				t.Fatal(err)
			}
			go func() { ended <- s.Export().Read(ctx, span, make([]byte, SpanBytes(r.Info(), span))) }()
		}},
		{"from another node", Config{}, func(r *rig, ended chan<- error) {
			h, span := r.reserve(generation(40, 1, 5)), infer.Span{LayerTo: 4, TokenTo: 40}
			go func() { ended <- h.Write(ctx, span, make([]byte, SpanBytes(r.Info(), span))) }()
		}},
	} {
		synctest.Test(t, func(t *testing.T) {
			c.cfg.StepDeadline = 2 * time.Second
			r := newRig(t, c.cfg, sim.Config{Cost: never})
			r.runs = ErrHung
			ended := make(chan error, 1)
			c.copy(r, ended)
			begin := time.Now()
			s, err := r.Submit(request(20, 3, 8000))
			if err != nil {
				t.Fatal(err)
			}
			res := r.finish(s)
			if took := time.Since(begin); took < 1900*time.Millisecond || took > 2500*time.Millisecond {
				t.Errorf("%s: a request ended after %v, want 2 to 2.5 s", c.name, took)
			}
			if err := res.done.Err; !errors.Is(err, ErrStopped) || !errors.Is(err, ErrHung) || !strings.Contains(err.Error(), "a copy of KV has not ended") {
				t.Errorf("%s: a request ended with %v", c.name, err)
			}
			if err := <-ended; !errors.Is(err, ErrHung) || time.Since(begin) > 2500*time.Millisecond {
				t.Errorf("%s: it ended with %v after %v", c.name, err, time.Since(begin))
			}
		})
	}
}

// TestSlowCopiesAreNoHang: each takes less than the deadline, all of them more; and one takes as long as a slow step may.
func TestSlowCopiesAreNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const block = 4096 // bytes
		r := newRig(t, Config{StepDeadline: time.Second, PrefixReuse: true, HostKVBytes: 1 << 20}, sim.Config{Cost: sim.Cost{Step: 1e6, CopyByte: 9e8 / block}})
		r.run(request(320, 1, 1))
		time.Sleep(20 * time.Second)
		r.run(request(20, 2, 1))
		r.stop()
		r = newRig(t, Config{StepDeadline: time.Second, Overlap: true, PrefixReuse: true, HostKVBytes: 1 << 20}, sim.Config{Cost: sim.Cost{Step: 2e9, CopyByte: 4e9 / block}})
		long, err := r.Submit(request(20, 2, 10)) // it fills no block
		if err != nil {
			t.Fatal(err)
		}
		r.run(request(40, 1, 3)) // its block is copied while the other runs
		if res := r.finish(long); res.done.Reason != infer.FinishLength {
			t.Errorf("beside a slow copy: done %+v", res.done)
		}
	})
}

// stuck is a device that does not come back from a call.
type stuck struct {
	backend.Backend
	submits int // that do
	copies  bool
	held    chan struct{}
}

func (s *stuck) Submit(b *backend.Batch) *backend.Step {
	if s.submits--; s.submits < 0 {
		<-s.held
	}
	return s.Backend.Submit(b)
}

func (s *stuck) CopyOut(regions []backend.Region, dst []byte) *backend.Copy {
	if s.copies {
		<-s.held
	}
	return s.Backend.CopyOut(regions, dst)
}

// TestAnEngineThatHangsInItsDeviceEndsItsRequests: the loop is inside a call, and all else has ended when Run returns.
func TestAnEngineThatHangsInItsDeviceEndsItsRequests(t *testing.T) {
	for _, c := range []struct {
		name    string
		submits int
		copies  bool
		want    string
	}{
		{"the first step", 0, false, "step 1 of 2 sequences"},
		{"a step beside another", 4, false, "the device hangs"},
		{"a copy", 1000, true, "its back end has not come back"},
	} {
		synctest.Test(t, func(t *testing.T) {
			now := clock()
			d, err := sim.New(sim.Config{Now: now, Cost: sim.Cost{Step: 1e6}})
			if err != nil {
				t.Fatal(err)
			}
			s := &stuck{d, c.submits, c.copies, make(chan struct{})}
			e, err := New(Config{Now: now, StepDeadline: time.Second, Overlap: true, MaxBatchSize: 2, PrefixReuse: true, HostKVBytes: 1 << 20}, s)
			if err != nil {
				t.Fatal(err)
			}
			var open []*Sequence
			for i := range int32(3) { // the last one waits
				s, err := e.Submit(request(40, i, 50))
				if err != nil {
					t.Fatal(err)
				}
				open = append(open, s)
			}
			begin := time.Now()
			if err := e.Run(context.Background()); !errors.Is(err, ErrHung) {
				t.Errorf("%s: Run: %v, want ErrHung", c.name, err)
			}
			if took := time.Since(begin); took > 5*time.Second { // the first step may take 3.5
				t.Errorf("%s: Run took %v, want what a step may take and a second", c.name, took)
			}
			if c.copies {
				open = open[2:] // a block is copied when the others have ended
			}
			for _, s := range open {
				res, err := drain(s)
				if why := res.done.Err; err != nil || !errors.Is(why, ErrStopped) || !errors.Is(why, ErrHung) || !strings.Contains(why.Error(), c.want) || res.done.Report.FinishedNS == 0 {
					t.Errorf("%s: a request ended with %+v, %v", c.name, res.done, err)
				}
			}
			if n := e.LeakedBlocks(); n != 0 {
				t.Errorf("%s: %d blocks have no owner", c.name, n)
			}
			close(s.held) // a call that comes back changes nothing
			synctest.Wait()
			if err := errors.Join(e.Check(), d.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestACopyThatHasEndedIsNoHang: who queued it may wait for something else before it looks, such as a disk.
func TestACopyThatHasEndedIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatch(time.Second)
		ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		w.begun(backend.NewCopy()).Finish()
		next := w.begun(backend.NewCopy())
		time.AfterFunc(500*time.Millisecond, next.Finish)
		if w.run(ctx); w.err != nil {
			t.Fatal(w.err)
		}
		ctx, stop = context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		w.begun(backend.NewCopy())
		if w.run(ctx); !errors.Is(w.err, ErrHung) {
			t.Errorf("a copy behind those that have ended: %v, want ErrHung", w.err)
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

func contextOnly(n int) infer.Request {
	r := request(n, 1, 5)
	r.Kind = infer.ContextOnly
	return r
}
