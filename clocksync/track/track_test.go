package track

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/ntp/ntptest"
	"meridian.internal/clocksync/probe"
	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/serve/servetest"
)

func steady(t testing.TB, o clock.Options) *clock.Steady {
	t.Helper()
	s, err := clock.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// background runs f until the test ends.
func background(t testing.TB, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

func serve(t testing.TB, addr string, s *clock.Steady) (string, func()) {
	t.Helper()
	r, err := respond.Listen(addr, s, respond.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Addr().String(), background(t, r.Serve)
}

// following is a tracker and what it reports.
type following struct {
	*Tracker
	updates chan Update
}

func follow(t testing.TB, s *clock.Steady, ps ...Peer) following {
	t.Helper()
	f := following{updates: make(chan Update, 1000)}
	f.Tracker = New(Options{Steady: s, OnUpdate: func(u Update) {
		select {
		case f.updates <- u:
		default:
		}
	}})
	f.SetPeers(ps)
	background(t, f.Run)
	return f
}

// await reads updates until one is as wanted.
func (f following) await(t testing.TB, what string, want func(Update) bool) Update {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case u := <-f.updates:
			if want(u) {
				return u
			}
		case <-limit:
			t.Fatalf("no update that is %s", what)
		}
	}
}

func inState(states ...clock.State) func(Update) bool {
	return func(u Update) bool {
		for _, s := range states {
			if u.Estimate.State == s {
				return true
			}
		}
		return false
	}
}

// covers checks an estimate of a faulty clock against the truth, which a process that holds both clocks can read.
func covers(t *testing.T, e clock.Estimate, ref, local *clock.Steady) {
	t.Helper()
	l0 := local.Now()
	r := ref.Now()
	l1 := local.Now()
	got, bound, ok := e.Convert(l0 + (l1-l0)/2)
	slack := (l1-l0)/2 + ref.AnchorErrNS() + local.AnchorErrNS()
	if d := got - r; !ok || d > bound+slack || -d > bound+slack {
		t.Errorf("converted to %d ± %d (%v), the truth is %d ± %d: %+v", got, bound, ok, r, slack, e)
	}
}

func TestAProcessOfThisKernelIsTheSameClock(t *testing.T) {
	own, other := steady(t, clock.Options{}), steady(t, clock.Options{})
	addr, _ := serve(t, "127.0.0.1:0", other)
	f := follow(t, own, Peer{Name: "gen-0", ClockAddr: addr})
	u := f.await(t, "an identity", inState(clock.Identity))
	want := own.AnchorErrNS() + other.AnchorErrNS()
	if e := u.Estimate; e.OffsetNS != 0 || e.BoundNS() != want || want <= 0 || e.Local != other.ID() || e.Reference != own.ID() {
		t.Errorf("estimate %+v, want offset 0 ± %d", e, want)
	}
	if e, ok := f.EstimateAt(other.ID(), 5); !ok || e.State != clock.Identity || e.AtNS != 5 {
		t.Errorf("at 5 ns: %+v %v", e, ok)
	}
}

func TestAnotherClockIsFollowedWithinItsBound(t *testing.T) {
	own, other := steady(t, clock.Options{}), steady(t, clock.Options{FaultSkewPPM: 80, FaultStep: time.Hour, FaultStepAfter: time.Nanosecond})
	addr, _ := serve(t, "127.0.0.1:0", other)
	f := follow(t, own, Peer{Name: "gen-0", ClockAddr: addr, ClockID: other.ID()})
	var u Update
	for range 5 {
		u = f.await(t, "synced", inState(clock.Synced))
		covers(t, u.Estimate, own, other)
	}
	if u.Lower == nil || u.Upper == nil || u.Estimate.BoundNS() > int64(5*time.Millisecond) {
		t.Errorf("update %+v", u)
	}
	if e, ok := f.EstimateAt(other.ID(), other.Now()); !ok {
		t.Error("no estimate now")
	} else {
		covers(t, e, own, other)
	}
	e, ok := f.Newest("gen-0")
	if !ok || !e.Usable() {
		t.Errorf("newest %+v", e)
	}
	if f.Hint("gen-0", other.ID(), ntp.Exchange{T1: own.Now() - 1e6, T2: other.Now() - 1e6, T3: other.Now(), T4: own.Now() + 1e6}) != HintAgrees {
		t.Error("a true hint was refused")
	}
	if f.Hint("gen-0", other.ID(), ntp.Exchange{T1: own.Now(), T2: own.Now(), T3: own.Now(), T4: own.Now()}) != HintContradicts {
		t.Error("a hint that the offset is 0 was believed")
	}
}

func TestANewProcessUnderTheNameIsANewClock(t *testing.T) {
	own := steady(t, clock.Options{})
	first := steady(t, clock.Options{FaultSkewPPM: 10})
	addr, stop := serve(t, servetest.Addr(t), first) // nobody takes it between the two
	p := Peer{Name: "ctx-0", ClockAddr: addr, ClockID: first.ID()}
	f := follow(t, own, p)
	f.await(t, "synced", inState(clock.Synced))
	stop()
	f.await(t, "a failure", func(u Update) bool { return u.Err != nil })
	second := steady(t, clock.Options{FaultSkewPPM: -10})
	serve(t, addr, second)
	p.ClockID = second.ID()
	f.SetPeers([]Peer{p})
	u := f.await(t, "the new clock", func(u Update) bool { return u.Estimate.Local == second.ID() && u.Estimate.Usable() })
	covers(t, u.Estimate, own, second)
	// Late stamps of the first process are still converted, by its own estimate.
	if e, ok := f.EstimateAt(first.ID(), first.Now()); !ok || e.Local != first.ID() {
		t.Errorf("the first clock: %+v %v", e, ok)
	}
	if s := f.Statuses(); len(s) != 1 || s[0].Epochs != 2 || s[0].Conflicts != 0 {
		t.Errorf("statuses %+v", s)
	}
}

func TestTwoProcessesThatClaimOneNameAreQuarantined(t *testing.T) {
	o := Options{Steady: steady(t, clock.Options{})}
	tr := New(o)
	p := newPeer(Peer{Name: "x"}, &tr.opts, tr.slots)
	own := o.Steady.ID()
	a, b := clock.MakeID(1, 1), clock.MakeID(2, 2)
	p.estimator(own, a)
	p.estimator(own, b)
	if p.conflict != 0 {
		t.Error("a restart counts as a conflict")
	}
	p.estimator(own, a)
	if r := p.finish(clock.Estimate{State: clock.Synced}, o.Steady.Now()); r.State != clock.Quarantined || p.st.Conflicts != 1 {
		t.Errorf("state %s, %d conflicts", r.State, p.st.Conflicts)
	}
}

func TestAPeerThatIsGoneIsRememberedForLateStamps(t *testing.T) {
	own, other := steady(t, clock.Options{}), steady(t, clock.Options{FaultSkewPPM: 5})
	addr, _ := serve(t, "127.0.0.1:0", other)
	f := follow(t, own, Peer{Name: "gen-0", ClockAddr: addr})
	f.await(t, "synced", inState(clock.Synced))
	f.SetPeers(nil)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, ok := f.Newest("gen-0"); !ok {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the peer is still followed")
		}
	}
	if e, ok := f.EstimateAt(other.ID(), other.Now()); !ok || !e.Usable() {
		t.Errorf("estimate %+v %v", e, ok)
	}
	if _, ok := f.EstimateAt(clock.MakeID(9, 9), 1); ok {
		t.Error("an unknown clock has an estimate")
	}
	if e, ok := f.EstimateAt(own.ID(), 1); !ok || e.State != clock.Identity {
		t.Error("our own clock has none")
	}
}

func TestManyPeersAreFollowedAtOnce(t *testing.T) {
	own, other := steady(t, clock.Options{}), steady(t, clock.Options{FaultSkewPPM: 20})
	addr, _ := serve(t, "127.0.0.1:0", other)
	ps := make([]Peer, 40)
	for i := range ps {
		ps[i] = Peer{Name: fmt.Sprintf("n%02d", i), ClockAddr: addr}
	}
	f := follow(t, own, ps...)
	seen := map[string]bool{}
	for len(seen) < len(ps) {
		u := f.await(t, "synced", inState(clock.Synced))
		seen[u.Peer.Name] = true
	}
	if s := f.Statuses(); len(s) != len(ps) || s[0].Peer.Name != "n00" || s[0].AgeNS < 0 {
		t.Errorf("%d statuses", len(s))
	}
}

func TestBurstsMeetOnTheRaster(t *testing.T) {
	start := time.Now()
	for _, c := range []struct {
		name            string
		since, wait, to time.Duration
	}{
		{"a second's raster for long waits", 1900 * time.Millisecond, 1050 * time.Millisecond, 3 * time.Second},
		{"a finer one for short waits", 1900 * time.Millisecond, 260 * time.Millisecond, 2200 * time.Millisecond},
		{"never at once", 1950 * time.Millisecond, 500 * time.Millisecond, 2450 * time.Millisecond},
		{"many seconds", 0, 9800 * time.Millisecond, 10 * time.Second},
	} {
		if got := c.since + together(c.wait, start, start.Add(c.since)); got != c.to {
			t.Errorf("%s: the next burst begins at %v, want %v", c.name, got, c.to)
		}
	}
}

func TestAPeerWithImpossibleStampsIsNeverUsableAndHarmsNoOther(t *testing.T) {
	own, other := steady(t, clock.Options{}), steady(t, clock.Options{FaultSkewPPM: 20})
	addr, _ := serve(t, "127.0.0.1:0", other)
	liar := ntptest.Answerer(t, func(n int, q ntp.Packet) ntp.Packet { // sends before it has received
		return ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: int64(n+2) * 1e9, T3: int64(n+1) * 1e9}
	})
	f := follow(t, own, Peer{Name: "good", ClockAddr: addr}, Peer{Name: "liar", ClockAddr: liar})
	for good, bad := 0, 0; good < 5 || bad < 5; {
		u := f.await(t, "a burst", func(u Update) bool { return u.Err == nil })
		if u.Peer.Name == "liar" {
			bad++
			if u.Estimate.Usable() || u.Verdict.Impossible == 0 {
				t.Errorf("the liar is %s: %+v", u.Estimate.State, u.Verdict)
			}
			continue
		}
		good++
		if u.Verdict.Bad() {
			t.Errorf("the other one: %+v", u.Verdict)
		}
		if u.Estimate.Usable() {
			covers(t, u.Estimate, own, other)
		}
	}
}

func TestAPeerWhoseEstimateIsTakenOverEndsItsBurst(t *testing.T) {
	own := steady(t, clock.Options{})
	addr, _ := serve(t, "127.0.0.1:0", steady(t, clock.Options{FaultSkewPPM: 20}))
	var old *peer
	taken := 0
	o := Options{Steady: own, Burst: 4, Logger: slog.New(slog.DiscardHandler), OnUpdate: func(u Update) {
		p := newPeer(Peer{Name: "gen-0", ClockAddr: "127.0.0.1:1", ClockID: old.info.ClockID}, old.opts, old.slots)
		p.inherit([]*peer{old}) // its addresses have changed just now
		taken = len(p.ests)
	}}
	one := make(chan struct{}, 1)
	old = newPeer(Peer{Name: "gen-0", ClockAddr: addr}, &o, slots{one, one})
	pr, err := probe.New(own, probe.Options{ClockAddr: addr})
	if err != nil {
		t.Fatal(err)
	}
	defer pr.Close()
	if wait := old.step(t.Context(), pr); taken != 1 || wait <= 0 {
		t.Errorf("%d estimators were taken over; the next burst is in %v", taken, wait)
	}
}
