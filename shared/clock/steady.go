package clock

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"
)

// Options of a steady clock. The zero value is the real clock. The others are the explicit test mode of a node: they make
// a clock that is wrong on purpose, under an epoch of its own, so that nobody takes it for the kernel's.
type Options struct {
	FaultSkewPPM   float64       // the clock runs fast by this many ppm from the start of the process
	FaultStep      time.Duration // the clock jumps by this much, once, FaultStepAfter after the start, without a word
	FaultStepAfter time.Duration // 0: 30 s
	FaultLie       time.Duration // probes are answered with stamps that are wrong by this much; records are not
}

const (
	anchorBrackets = 1000
	// suspendSlackNS is the hysteresis of suspend detection: BOOTTIME - MONOTONIC is constant between suspends and is read
	// to a microsecond; a suspend lasts far longer. It exceeds the quantum of the epoch, so that a new epoch differs.
	suspendSlackNS   = 1_500_000
	suspendQuantumNS = 1_000_000
	suspendCheckNS   = 1_000_000
	suspendTornNS    = 100_000
	maxFaultSkewPPM  = 100_000
)

// Steady is CLOCK_MONOTONIC, read through Go's monotonic reading: Go reads the same clock in the vDSO, so one anchor taken
// at the start turns it into kernel time for ever, at 70 ns a read and without a system call. Safe for concurrent use.
type Steady struct {
	base      time.Time
	anchor    int64 // CLOCK_MONOTONIC at base
	anchorErr int64 // half of the best bracket
	instance  uint32
	facts     facts
	epoch     atomic.Pointer[epochState]
	checked   atomic.Int64 // mono at which the suspend time was last read

	faulty   bool
	rate     float64 // fault: extra seconds per second
	start    int64   // mono at which the fault starts
	step     int64
	stepFrom int64 // mono
	lie      int64
}

// epochState is immutable; it is replaced when a suspend was seen.
type epochState struct {
	suspendNS int64
	id        ID
}

// New anchors a steady clock.
func New(o Options) (*Steady, error) {
	if !(o.FaultSkewPPM >= -maxFaultSkewPPM && o.FaultSkewPPM <= maxFaultSkewPPM) {
		return nil, fmt.Errorf("fault clock skew %v ppm: want a number within ±%d", o.FaultSkewPPM, maxFaultSkewPPM)
	}
	if o.FaultStepAfter < 0 {
		return nil, fmt.Errorf("fault clock step after %v: want a duration of 0 or more", o.FaultStepAfter)
	}
	if o.FaultStepAfter == 0 {
		o.FaultStepAfter = 30 * time.Second
	}
	s := &Steady{base: time.Now()}
	if err := s.takeAnchor(); err != nil {
		return nil, err
	}
	var b [4]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, fmt.Errorf("draw clock instance: %w", err)
	}
	s.instance = binary.BigEndian.Uint32(b[:])
	s.setFault(o)
	facts, err := readFacts()
	if err != nil {
		return nil, err
	}
	if s.faulty {
		facts.fault = fmt.Sprintf("%08x %+v", s.instance, o)
	}
	s.facts = facts
	suspend, err := suspended(1000)
	if err != nil {
		return nil, err
	}
	s.epoch.Store(s.newEpoch(suspend))
	return s, nil
}

func (s *Steady) setFault(o Options) {
	s.faulty = o.FaultSkewPPM != 0 || o.FaultStep != 0 || o.FaultLie != 0
	s.rate = o.FaultSkewPPM * 1e-6
	s.start = s.anchor
	s.step = int64(o.FaultStep)
	s.stepFrom = s.anchor + int64(o.FaultStepAfter)
	s.lie = int64(o.FaultLie)
}

// takeAnchor keeps the tightest of many brackets (Go, kernel, Go): the kernel's reading lies between the two of Go.
func (s *Steady) takeAnchor() error {
	best := int64(1<<63 - 1)
	for range anchorBrackets {
		a := int64(time.Since(s.base))
		k, err := kernelMono()
		b := int64(time.Since(s.base))
		if err != nil {
			return err
		}
		if b-a < best {
			best = b - a
			s.anchor = k - (a + (b-a)/2)
		}
	}
	s.anchorErr = (best + 1) / 2
	return nil
}

// Now returns the clock in ns. It costs about 70 ns and makes no system call.
func (s *Steady) Now() int64 {
	n := s.anchor + int64(time.Since(s.base))
	if s.faulty {
		return n + s.faultAt(n)
	}
	return n
}

// At returns the clock at t, which must carry a monotonic reading (as time.Now gives).
func (s *Steady) At(t time.Time) int64 {
	n := s.anchor + int64(t.Sub(s.base))
	if s.faulty {
		return n + s.faultAt(n)
	}
	return n
}

// Reported is what a probe is told of this clock now. It is Now, unless the process was told to lie.
func (s *Steady) Reported() int64 { return s.Now() + s.lie }

// LieNS is what Reported adds: 0 in any clock but a deliberate liar's.
func (s *Steady) LieNS() int64 { return s.lie }

// faultAt is what the fault adds at kernel time mono.
func (s *Steady) faultAt(mono int64) int64 {
	d := int64(math.Round(float64(mono-s.start) * s.rate))
	if mono >= s.stepFrom {
		d += s.step
	}
	return d
}

// AnchorErrNS is the half width of the anchor's bracket: how far Now may be from the kernel's clock, for the whole life of
// the process.
func (s *Steady) AnchorErrNS() int64 { return s.anchorErr }

// Faulty says that the clock is wrong on purpose (the explicit test mode).
func (s *Steady) Faulty() bool { return s.faulty }

// ID returns the clock's id now: after a suspend the epoch is another. The kernel's suspend time is read (some µs) when the
// last reading is more than a millisecond old.
func (s *Steady) ID() ID {
	cur := s.epoch.Load()
	now := s.anchor + int64(time.Since(s.base))
	if now-s.checked.Load() < suspendCheckNS {
		return cur.id
	}
	s.checked.Store(now)
	suspend, err := suspended(3)
	if err != nil || abs(suspend-cur.suspendNS) <= suspendSlackNS {
		return cur.id
	}
	s.epoch.CompareAndSwap(cur, s.newEpoch(suspend))
	return s.epoch.Load().id
}

func (s *Steady) newEpoch(suspendNS int64) *epochState {
	q := (suspendNS + suspendQuantumNS/2) / suspendQuantumNS
	return &epochState{suspendNS: suspendNS, id: MakeID(s.facts.hash(q), s.instance)}
}

// suspended returns BOOTTIME - MONOTONIC, which grows only by suspends. All three readings are the kernel's, so that neither
// a fault nor a test's invented time enters. Readings that were torn by a preemption would look like a suspend: when all
// are, errTorn is returned.
func suspended(tries int) (int64, error) {
	for range tries {
		a, err1 := kernelMono()
		boot, err2 := kernelBoot()
		b, err3 := kernelMono()
		if err := cmp.Or(err1, err2, err3); err != nil {
			return 0, err
		}
		if b-a < suspendTornNS {
			return boot - (a + (b-a)/2), nil
		}
	}
	return 0, errTorn
}

var errTorn = errors.New("clock: every reading of the suspend time was torn by a preemption")

// rawReads is how many brackets Raw takes; it keeps the tightest.
const rawReads = 5

// Raw reads the clock together with CLOCK_MONOTONIC_RAW, which NTP does not slew. The pair is the tightest of five
// brackets: rawNS was read within halfBracketNS of monoNS. A clock with a fault carries the fault in both, since the fault
// stands for the crystal's.
func (s *Steady) Raw() (monoNS, rawNS, halfBracketNS int64) {
	best := int64(1<<63 - 1)
	for range rawReads {
		a := s.anchor + int64(time.Since(s.base))
		raw, err := kernelRaw()
		b := s.anchor + int64(time.Since(s.base))
		if err != nil {
			return s.Now(), s.Now(), 1<<62 - 1
		}
		if b-a < best {
			best = b - a
			mid := a + (b-a)/2
			monoNS, rawNS = mid, raw
		}
	}
	if s.faulty {
		d := s.faultAt(monoNS)
		monoNS, rawNS = monoNS+d, rawNS+d
	}
	return monoNS, rawNS, (best + 1) / 2
}

// Wall reads the clock together with CLOCK_REALTIME: wallNS was read within halfBracketNS of monoNS. Kernel packet stamps
// are wall time and are mapped by this pair. No system call: about 1 µs.
func (s *Steady) Wall() (monoNS, wallNS, halfBracketNS int64) {
	best := int64(1<<63 - 1)
	for range rawReads {
		a := int64(time.Since(s.base))
		w := time.Now().UnixNano()
		b := int64(time.Since(s.base))
		if b-a < best {
			best = b - a
			monoNS, wallNS = s.anchor+a+(b-a)/2, w
		}
	}
	return monoNS, wallNS, (best + 1) / 2
}

// FromKernel returns what this clock shows when CLOCK_MONOTONIC shows monoNS: the same, but for a clock with a fault.
func (s *Steady) FromKernel(monoNS int64) int64 {
	if s.faulty {
		return monoNS + s.faultAt(monoNS)
	}
	return monoNS
}

func abs(x int64) int64 {
	if x < 0 {
		return -x
	}
	return x
}
