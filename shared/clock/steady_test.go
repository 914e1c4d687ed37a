package clock

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func mustNew(t testing.TB, o Options) *Steady {
	t.Helper()
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTheClockAgreesWithTheKernelWithinItsAnchorError(t *testing.T) {
	s := mustNew(t, Options{})
	outside := 0
	for range 20_000 {
		a := s.Now()
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			t.Fatal(err)
		}
		b := s.Now()
		if k := ts.Nano(); k < a-s.AnchorErrNS() || k > b+s.AnchorErrNS() {
			outside++
		}
	}
	if outside != 0 {
		t.Errorf("%d of 20000 kernel readings lie outside the bracket widened by %d ns", outside, s.AnchorErrNS())
	}
	if s.AnchorErrNS() <= 0 {
		t.Errorf("anchor error %d ns: want a positive half width", s.AnchorErrNS())
	}
}

func TestAtReadsTheStampThatATimeCarries(t *testing.T) {
	s := mustNew(t, Options{FaultSkewPPM: 50})
	a := s.Now()
	at := s.At(time.Now())
	b := s.Now()
	if at < a || at > b {
		t.Errorf("At gave %d, outside [%d, %d]", at, a, b)
	}
}

func TestProcessesOfOneKernelShareTheEpochAndNotTheInstance(t *testing.T) {
	a, b := mustNew(t, Options{}).ID(), mustNew(t, Options{}).ID()
	if a.Epoch() != b.Epoch() {
		t.Errorf("epochs %s and %s differ in one kernel", a.Epoch(), b.Epoch())
	}
	if a.Instance() == b.Instance() {
		t.Errorf("both instances are %s", a.Instance())
	}
	if _, err := ParseID(string(a)); err != nil {
		t.Error(err)
	}
}

func TestAFaultyClockHasAnEpochOfItsOwn(t *testing.T) {
	right := mustNew(t, Options{}).ID().Epoch()
	for _, o := range []Options{{FaultSkewPPM: 50}, {FaultStep: time.Millisecond}, {FaultLie: time.Millisecond}} {
		if got := mustNew(t, o).ID().Epoch(); got == right {
			t.Errorf("%+v has the epoch of the right clock", o)
		}
	}
}

func TestFaultsDoWhatTheySay(t *testing.T) {
	s := mustNew(t, Options{FaultSkewPPM: 100, FaultStep: 5 * time.Millisecond, FaultStepAfter: time.Hour, FaultLie: time.Millisecond})
	if got := s.faultAt(s.start + 1_000_000_000); got != 100_000 {
		t.Errorf("100 ppm after 1 s add %d ns, want 100000", got)
	}
	if got := s.faultAt(s.stepFrom) - s.faultAt(s.stepFrom-1); got != 5_000_000 {
		t.Errorf("the step is %d ns, want 5000000", got)
	}
	before := s.Now()
	reported := s.Reported()
	if after := s.Now(); reported < before+1_000_000 || reported > after+1_000_000 {
		t.Errorf("a liar of 1 ms reports %d, asked between %d and %d", reported, before, after)
	}
}

func TestImpossibleFaultsAreRefusedByName(t *testing.T) {
	for want, o := range map[string]Options{
		"fault clock skew": {FaultSkewPPM: 1e9},
		"step after":       {FaultStepAfter: -1},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that names %q", o, err, want)
		}
	}
}

func TestASuspendMakesANewEpochAndReadNoiseDoesNot(t *testing.T) {
	s := mustNew(t, Options{})
	before := s.ID()
	cur := *s.epoch.Load()
	noisy := cur
	noisy.suspendNS += suspendSlackNS / 2
	s.epoch.Store(&noisy)
	s.checked.Store(0)
	if got := s.ID(); got != before {
		t.Errorf("id became %s after read noise of %d ns", got, suspendSlackNS/2)
	}
	slept := cur
	slept.suspendNS -= 2 * suspendSlackNS
	slept.id = s.newEpoch(slept.suspendNS).id
	s.epoch.Store(&slept)
	s.checked.Store(0)
	if got := s.ID(); got == slept.id || got.Instance() != before.Instance() {
		t.Errorf("id %s after a suspend of %d ns, was %s", got, 2*suspendSlackNS, slept.id)
	}
}

func TestPairsAreReadWithinTheirBracket(t *testing.T) {
	s := mustNew(t, Options{})
	a := s.Now()
	mono, _, half := s.Raw()
	monoW, wall, halfW := s.Wall()
	b := s.Now()
	if mono < a || mono > b || half <= 0 {
		t.Errorf("raw pair at %d ± %d outside [%d, %d]", mono, half, a, b)
	}
	if monoW < a || monoW > b || halfW <= 0 || wall <= 0 {
		t.Errorf("wall pair at %d ± %d outside [%d, %d]", monoW, halfW, a, b)
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("0123456789abcdef.01234567")
	f.Add("0123456789abcdef-01234567")
	f.Add("")
	f.Fuzz(func(t *testing.T, in string) {
		id, err := ParseID(in)
		if err != nil {
			if _, _, err := ID(in).Words(); err == nil {
				t.Errorf("%q is no id and has words", in)
			}
			return
		}
		epoch, instance, err := id.Words()
		if err != nil || MakeID(epoch, instance) != id {
			t.Errorf("%q does not survive a round trip: %x %x %v", in, epoch, instance, err)
		}
	})
}

func BenchmarkNow(b *testing.B) {
	s := mustNew(b, Options{})
	for b.Loop() {
		s.Now()
	}
}

func BenchmarkID(b *testing.B) {
	s := mustNew(b, Options{})
	for b.Loop() {
		s.ID()
	}
}

func BenchmarkRaw(b *testing.B) {
	s := mustNew(b, Options{})
	var h int64
	for b.Loop() {
		_, _, h = s.Raw()
	}
	b.ReportMetric(float64(h), "half-ns")
	_, _, h = s.Wall()
	b.ReportMetric(float64(h), "wallhalf-ns")
}

func TestFlagsCarryEveryFault(t *testing.T) {
	got := Flags{FaultClockSkewPPM: 1, FaultClockStep: 2, FaultClockStepAfter: 3, FaultClockLie: 4}.Options()
	if got != (Options{FaultSkewPPM: 1, FaultStep: 2, FaultStepAfter: 3, FaultLie: 4}) {
		t.Errorf("options %+v", got)
	}
}
