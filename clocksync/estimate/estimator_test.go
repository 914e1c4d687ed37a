package estimate

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

const (
	refID   = clock.ID("00000000000000aa.00000001")
	localID = clock.ID("00000000000000bb.00000002")
)

// lab is a reference and a local clock: local = reference - offset(reference time).
type lab struct {
	r      *rand.Rand
	offset func(t float64) float64
	oneWay float64 // ns
	jitter float64
}

func (l lab) local(t float64) int64 { return int64(math.Round(t - l.offset(t))) }

func (l lab) burst(t float64, n int) Burst {
	var b Burst
	for range n {
		arrive := t + l.oneWay + l.r.ExpFloat64()*l.jitter
		leave := arrive + 1000
		end := leave + l.oneWay + l.r.ExpFloat64()*l.jitter
		b.Exchanges = append(b.Exchanges, ntp.Exchange{T1: int64(t), T2: l.local(arrive), T3: l.local(leave), T4: int64(math.Ceil(end)), ErrNS: 1})
		t = end + 1000
	}
	return b
}

func newLab(ppm float64) lab {
	return lab{r: rand.New(rand.NewPCG(1, 1)), offset: func(t float64) float64 { return 5e12 + ppm*1e-6*t }, oneWay: 50e3, jitter: 10e3}
}

const sec = 1e9

// feed gives a burst each second in [from, to) and returns the verdicts that were bad.
func (l lab) feed(e *Estimator, from, to float64) (bad []Verdict) {
	for t := from; t < to; t += sec {
		if v := e.Add(l.burst(t, 4)); v.Bad() {
			bad = append(bad, v)
		}
	}
	return bad
}

func (l lab) check(t *testing.T, e *Estimator, at float64) Interval {
	t.Helper()
	iv, ok := e.At(l.local(at))
	truth := l.offset(at)
	if !ok || float64(iv.LowerNS) > truth || float64(iv.UpperNS) < truth || iv.OffsetNS < iv.LowerNS || iv.OffsetNS > iv.UpperNS {
		t.Errorf("at %.1f s: %+v (%v), the truth is %.0f", at/sec, iv, ok, truth)
	}
	return iv
}

func TestTheBoundCoversPastPresentAndFuture(t *testing.T) {
	l := newLab(50)
	e := New(refID, localID, Config{})
	if _, ok := e.At(0); ok {
		t.Error("an estimator without samples knows something")
	}
	if bad := l.feed(e, 10*sec, 130*sec); bad != nil {
		t.Fatalf("bad verdicts %+v", bad)
	}
	for at := 0.0; at < 300*sec; at += 3.7 * sec {
		l.check(t, e, at)
	}
	near, far := l.check(t, e, 130*sec), l.check(t, e, 190*sec)
	if near.BoundNS() > 70_000 || far.BoundNS() < 3*near.BoundNS() {
		t.Errorf("bound now %d ns, a minute later %d ns", near.BoundNS(), far.BoundNS())
	}
	mid := l.check(t, e, 70*sec)
	if d := math.Abs(float64(mid.OffsetNS) - l.offset(70*sec)); d > 3000 {
		t.Errorf("with hindsight the point errs by %.0f ns", d)
	}
}

func TestStatesFollowTheEvidence(t *testing.T) {
	l := newLab(20)
	e := New(refID, localID, Config{})
	state := func(at float64) clock.State { return e.Estimate(l.local(at)).State }
	if s := state(0); s != clock.Joining {
		t.Errorf("without samples: %s", s)
	}
	e.Add(l.burst(1*sec, 4))
	if s := state(1 * sec); s != clock.Joining {
		t.Errorf("after 4 exchanges: %s", s)
	}
	l.feed(e, 2*sec, 60*sec)
	if s := state(60 * sec); s != clock.Synced {
		t.Errorf("after a minute: %s", s)
	}
	if s := state(80 * sec); s != clock.Holdover {
		t.Errorf("20 s without a burst: %s", s)
	}
	if s := state(60*sec + 11*60*sec); s != clock.Void {
		t.Errorf("11 min without a burst: %s", s)
	}
	est := e.Estimate(l.local(60 * sec))
	if _, _, ok := est.Convert(l.local(60*sec + 11*60*sec)); ok {
		t.Error("an estimate converts beyond its validity")
	}
	if p := e.Past(l.local(80 * sec)); p.State != clock.Synced {
		t.Errorf("a stamp taken in holdover: %s", p.State)
	}
}

func TestTheTravellingEstimateCoversWhereverItIsUsed(t *testing.T) {
	l := newLab(-120)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 100*sec)
	for at := 50 * sec; at < 200*sec; at += 5 * sec {
		est := e.Estimate(l.local(at))
		if int(at/sec)%10 == 5 { // as a stamp of the past is converted, and those that came with it
			est = e.Past(l.local(at))
		}
		for d := -30 * sec; d <= 30*sec; d += 7 * sec {
			n := l.local(at + d)
			ref, bound, ok := est.Convert(n)
			if err := math.Abs(float64(ref) - (at + d)); !ok || err > float64(bound)+1 {
				t.Errorf("estimate for %.0f s used at %+.0f s errs by %.0f ns, bound %d (%v)", at/sec, d/sec, err, bound, ok)
			}
		}
	}
}

func TestAStepStartsASegmentAndOldStampsKeepTheirEstimate(t *testing.T) {
	l := newLab(50)
	before := l.offset
	l.offset = func(t float64) float64 {
		if t >= 100*sec {
			return before(t) + 2e6
		}
		return before(t)
	}
	e := New(refID, localID, Config{})
	if bad := l.feed(e, 0, 100*sec); bad != nil {
		t.Fatal(bad)
	}
	v := e.Add(l.burst(100.5*sec, 4))
	if !v.Step {
		t.Fatalf("verdict of the first burst after a step of 2 ms: %+v", v)
	}
	l.feed(e, 101.5*sec, 200*sec)
	for _, at := range []float64{10, 50, 98, 100.6, 110, 150, 210} {
		l.check(t, e, at*sec)
	}
	if s := e.Estimate(l.local(110 * sec)).State; s != clock.Suspect {
		t.Errorf("soon after a step: %s", s)
	}
	if s := e.Estimate(l.local(200 * sec)).State; s != clock.Synced {
		t.Errorf("long after a step: %s", s)
	}
	// Between the last sample before and the first one after, either may be true.
	if iv, ok := e.At(l.local(99.9 * sec)); !ok || float64(iv.UpperNS-iv.LowerNS) < 2e6 {
		t.Errorf("between: %+v %v", iv, ok)
	}
}

func TestALimitThatDoesNotHoldIsDoubled(t *testing.T) {
	l := newLab(0)
	l.oneWay, l.jitter = 300, 100
	l.offset = func(t float64) float64 { return 5e12 + 20e-6*8*sec/(2*math.Pi)*math.Sin(2*math.Pi*t/(8*sec)) } // 15 ppm/s
	e := New(refID, localID, Config{})
	l.feed(e, 0, 120*sec)
	st := e.Stats()
	if st.Violations == 0 || st.EtaPPMPerS < 0.2 {
		t.Errorf("stats %+v", st)
	}
	if s := e.Estimate(l.local(120 * sec)).State; s != clock.Quarantined && s != clock.Suspect {
		t.Errorf("state %s", s)
	}
}

func TestALiarIsQuarantinedAndMayComeBack(t *testing.T) {
	l := newLab(10)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 60*sec)
	for i := range 3 {
		b := l.burst(60*sec+float64(i)*sec, 4)
		for j := range b.Exchanges {
			b.Exchanges[j].T3 += 1e6 // answers before it could
		}
		if v := e.Add(b); v.Impossible != 4 {
			t.Errorf("verdict %+v", v)
		}
	}
	if s := e.Estimate(l.local(63 * sec)).State; s != clock.Quarantined {
		t.Errorf("after three lies: %s", s)
	}
	l.check(t, e, 62*sec) // the lies were not used
	l.feed(e, 63*sec, 63*sec+cleanBursts*sec)
	if s := e.Estimate(l.local(80 * sec)).State; s == clock.Quarantined {
		t.Error("16 clean bursts do not end a quarantine")
	}
}

func TestExchangesThatExcludeEachOtherAreNotUsed(t *testing.T) {
	l := newLab(10)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 60*sec)
	b := l.burst(60*sec, 2)
	b.Exchanges[1].T2 += 5e6
	b.Exchanges[1].T3 += 5e6
	if v := e.Add(b); v.Impossible == 0 {
		t.Errorf("verdict %+v", v)
	}
	l.check(t, e, 61*sec)
}

func TestHintsTightenAndNeverLoosen(t *testing.T) {
	l := newLab(10)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 60*sec)
	before := l.check(t, e, 60*sec)
	tight := l
	tight.oneWay, tight.jitter = 5e3, 0
	if !e.Hint(tight.burst(59.9*sec, 1).Exchanges[0]) {
		t.Fatal("a true hint was refused")
	}
	after := l.check(t, e, 60*sec)
	if after.UpperNS-after.LowerNS >= before.UpperNS-before.LowerNS {
		t.Errorf("bound %+v after a tight hint, %+v before", after, before)
	}
	lie := tight.burst(59.95*sec, 1).Exchanges[0]
	lie.T2 -= 1e6
	lie.T3 -= 1e6
	if e.Hint(lie) {
		t.Error("a hint that contradicts was taken")
	}
	if got := l.check(t, e, 60*sec); got != after {
		t.Errorf("a refused hint changed %+v to %+v", after, got)
	}
}

func TestARestartOfTheProcessKeepsTheEstimate(t *testing.T) {
	l := newLab(10)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 60*sec)
	before := l.check(t, e, 60*sec)
	next := clock.ID(localID.Epoch() + ".00000009")
	e.Restarted(next)
	after := l.check(t, e, 60*sec)
	if e.Local() != next || after.UpperNS-after.LowerNS < before.UpperNS-before.LowerNS+2*instanceSlackNS-10 {
		t.Errorf("%s: %+v, before %+v", e.Local(), after, before)
	}
	e.Restarted(next)
	if got := l.check(t, e, 60*sec); got != after {
		t.Error("the same process widened the bound again")
	}
}

func TestDurationsUseTheRateAlone(t *testing.T) {
	l := newLab(50)
	e := New(refID, localID, Config{})
	l.feed(e, 0, 120*sec)
	ns, errNS := e.Duration(l.local(100*sec), l.local(101*sec))
	if d := math.Abs(float64(ns) - sec); d > float64(errNS)+1 || errNS > 10_000 {
		t.Errorf("a second takes %d ± %d ns", ns, errNS)
	}
}

func TestMonthsDoNotWearOutThePrecision(t *testing.T) {
	l := newLab(50)
	e := New(refID, localID, Config{})
	t0 := 90 * 86400 * sec
	l.feed(e, 0, 100*sec)
	for at := 0.0; at < 20*3600*sec; at += 7 * sec { // several rebases
		e.Add(l.burst(t0+at, 4))
	}
	iv := l.check(t, e, t0+20*3600*sec)
	if iv.BoundNS() > 90_000 {
		t.Errorf("bound %d ns", iv.BoundNS())
	}
	l.check(t, e, t0+20*3600*sec-300*sec)
	if n := e.Stats().Constraints; n > 2*maxPoints {
		t.Errorf("%d constraints kept", n)
	}
}

func TestTheIntervalAdaptsToTheBound(t *testing.T) {
	for _, c := range []struct {
		name       string
		oneWay     float64
		least, max time.Duration
	}{
		{"kernel stamps on loopback", 300, 500 * time.Millisecond, 1500 * time.Millisecond},
		{"a LAN", 50e3, 800 * time.Millisecond, 1500 * time.Millisecond},
		{"a WAN", 2.5e6, 3 * time.Second, maxInterval},
	} {
		l := newLab(10)
		l.oneWay, l.jitter = c.oneWay, c.oneWay/10
		e := New(refID, localID, Config{})
		if e.Interval() != minInterval {
			t.Errorf("%s: a newcomer is probed every %v", c.name, e.Interval())
		}
		l.feed(e, 0, 600*sec)
		if d := e.Interval(); d < c.least || d > c.max {
			t.Errorf("%s: every %v, want %v to %v", c.name, d, c.least, c.max)
		}
	}
}

func FuzzEstimator(f *testing.F) {
	f.Add(uint64(1), int64(0), int64(1), int64(2), int64(3))
	f.Add(uint64(2), int64(math.MaxInt64), int64(math.MinInt64), int64(0), int64(-1))
	f.Fuzz(func(t *testing.T, seed uint64, t1, t2, t3, t4 int64) {
		l := newLab(10)
		l.r = rand.New(rand.NewPCG(seed, 5))
		e := New(refID, localID, Config{})
		l.feed(e, 0, 20*sec)
		e.Add(Burst{Exchanges: []ntp.Exchange{{T1: t1, T2: t2, T3: t3, T4: t4}}})
		e.Hint(ntp.Exchange{T1: t1, T2: t2, T3: t3, T4: t4})
		l.feed(e, 21*sec, 24*sec)
		for _, n := range []int64{0, t2, t3, l.local(30 * sec)} {
			if iv, ok := e.At(n); ok && (iv.LowerNS > iv.UpperNS || iv.OffsetNS < iv.LowerNS || iv.OffsetNS > iv.UpperNS) {
				t.Fatalf("at %d: %+v", n, iv)
			}
			e.Estimate(n)
		}
	})
}

// BenchmarkBurst is the cost of one node-second: a burst taken and an estimate stated. 100 nodes at 1 Hz are to take at
// most 0.5 % of a core: 50 µs each.
func BenchmarkBurst(b *testing.B) {
	for _, c := range []struct {
		name   string
		oneWay float64
	}{{"LAN", 50e3}, {"kernel", 300}} {
		b.Run(c.name, func(b *testing.B) {
			l := newLab(50)
			l.oneWay, l.jitter = c.oneWay, c.oneWay/3
			e := New(refID, localID, Config{})
			l.feed(e, 0, 1000*sec)
			bursts := make([]Burst, 4096)
			for i := range bursts {
				bursts[i] = l.burst((1000+float64(i))*sec, 4)
			}
			i := 0
			for b.Loop() {
				if i == len(bursts) {
					e = New(refID, localID, Config{})
					i = 0
				}
				x := bursts[i]
				e.Add(x)
				e.Estimate(x.Exchanges[0].T3 + 1e9)
				i++
			}
		})
	}
}

// A request that waited for long began before a step of the clock and ends after it.
func TestAHintThatBeganBeforeAStepDoesNotReachBackOverIt(t *testing.T) {
	l := newLab(0)
	steady := l.offset
	l.offset = func(t float64) float64 {
		if t >= 100.5*sec {
			return steady(t) + 1e6
		}
		return steady(t)
	}
	e := New(refID, localID, Config{})
	if bad := l.feed(e, 10*sec, 102*sec); len(bad) != 1 || !bad[0].Step {
		t.Fatalf("bad verdicts %+v, want one step", bad)
	}
	began, ended := l.burst(95*sec, 1).Exchanges[0], l.burst(101.3*sec, 1).Exchanges[0]
	e.Hint(ntp.Exchange{T1: began.T1, T2: began.T2, T3: ended.T3, T4: ended.T4, ErrNS: 1})
	for _, at := range []float64{90 * sec, 97 * sec, 100 * sec, 101 * sec, 102 * sec} {
		l.check(t, e, at)
	}
}

// Of a clock that was stepped often the oldest segments are forgotten: what was before those that are left lies beyond a step.
func TestNothingIsKnownOfBeforeTheOldestStepThatIsRemembered(t *testing.T) {
	l := newLab(0)
	steady := l.offset
	l.offset = func(t float64) float64 { return steady(t) + 50e6*math.Floor(t/(70*sec)) }
	e := New(refID, localID, Config{})
	l.feed(e, 10*sec, (maxClosed+3)*70*sec)
	if iv, ok := e.At(l.local(20 * sec)); ok {
		t.Errorf("a stamp of before the forgotten steps: %+v, the truth is %.0f", iv, l.offset(20*sec))
	}
	l.check(t, e, (maxClosed+2)*70*sec-10*sec)
	l.check(t, e, 5*70*sec)
}
