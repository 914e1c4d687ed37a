//go:build cuda

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"meridian.internal/shared/clock"
)

// truth is the offset of simulated clocks: a rate that wanders to and fro by as much as it may.
type truth struct {
	offset int64
	rate   float64
	swing  float64 // of the rate
}

const swingNS = 600e9 // of a whole swing

func (w truth) at(card int64) int64 {
	phase := 2 * math.Pi * float64(card) / swingNS
	return w.offset + int64(w.rate*float64(card)+w.swing*swingNS/(2*math.Pi)*(1-math.Cos(phase)))
}

// link is the way between host and card, in ns: a read of the card takes there and back, a write there. Each takes longer at times.
type link struct{ read, write float64 }

func (l link) takes(r *rand.Rand, least float64) float64 {
	d := least * (1 + 0.15*r.ExpFloat64())
	if r.IntN(10) == 0 { // other traffic, or a host that does something else
		d += 20_000 * r.Float64() * r.Float64()
	}
	return d
}

// burst asks n times. The card looks for a question by one read after the other; it writes
// its time, waits until that has come, and writes its answer. early: the host takes the time when it sees it, not with the answer.
func (w truth) burst(r *rand.Rand, l link, card int64, n int, early bool) []exchange {
	var out []exchange
	host := func(card float64) int64 { return int64(card) + w.at(int64(card)) }
	for at := float64(card); len(out) < n; {
		poll := l.takes(r, l.read)
		stamp := at + poll*r.Float64() + poll/2
		seen := stamp + l.takes(r, l.write)
		answered := seen + l.takes(r, l.read) + l.takes(r, l.write)
		x := exchange{ask: host(at) - 1, card: int64(stamp) / cardStep * cardStep, answer: host(answered) + 1}
		if early {
			x.answer = host(seen) + 1
		}
		out = append(out, x)
		at = answered + 100
	}
	return out
}

// pcie fits what an H200 in a virtual machine gives: a bound of 0.76 µs after 29 bursts, and of 1.58 µs when its kernel read each question twice.
var pcie = link{read: 1500, write: 750}

// near would show a slope that wanders farther than the edge thinks, which the times of pcie hide.
var near = link{read: 30, write: 20}

func TestTheEdgeHoldsTheTruthWithinANarrowBound(t *testing.T) {
	for _, c := range []struct {
		truth
		link
	}{{truth{rate: 0}, pcie}, {truth{rate: 1.4e-6, swing: 150e-9}, pcie}, {truth{rate: -40e-6, swing: -150e-9}, pcie}, {truth{rate: 99e-6}, pcie}, {truth{rate: 1.4e-6, swing: 150e-9}, near}} {
		w, l := c.truth, c.link
		w.offset = -1_700_000_000_000_000_000
		r := rand.New(rand.NewPCG(r1, r2))
		var e, late edge
		worst, worstLate, narrowest := int64(0), int64(0), int64(math.MaxInt64)
		card := int64(1_000_000_000)
		for n := range 400 {
			card += 500_000_000
			if r.IntN(20) == 0 {
				card += r.Int64N(3_000_000_000) // a long prefill was before the burst
			}
			burst := 1 + r.IntN(48) // the kernel's time may be over before all are asked
			e.add(w.burst(r, l, card, burst, true))
			late.add(w.burst(r, l, card, burst, false))
			narrowest = min(narrowest, late.width)
			for _, ahead := range []int64{-20_000_000_000, -500_000_000, 0, 499_000_000, 5_000_000_000} {
				for _, e := range []*edge{&e, &late} {
					lo, hi, ok := e.at(card + ahead)
					if want := w.at(card + ahead); !ok || lo > want || hi < want {
						t.Fatalf("rate %g, burst %d%+d ns: offset in [%d, %d], truth %d", w.rate, n, ahead, lo, hi, want)
					}
				}
				if n < 40 || ahead < 0 || ahead > 500_000_000 {
					continue
				}
				lo, hi, _ := e.at(card + ahead)
				worst = max(worst, (hi-lo+1)/2)
				lo, hi, _ = late.at(card + ahead)
				worstLate = max(worstLate, (hi-lo+1)/2)
			}
		}
		t.Logf("rate %g: bound of at most %d ns, of %d ns if the time were taken with the answer; narrowest exchange of that %d ns", w.rate, worst, worstLate, narrowest)
		if worst > 1500 || e.restarts != 0 || late.restarts != 0 {
			t.Errorf("rate %g: bound of %d ns, want 1500 at most; %d and %d restarts", w.rate, worst, e.restarts, late.restarts)
		}
		if l == pcie && worstLate < worst+300 {
			t.Errorf("rate %g: the time that is taken early gains %d ns", w.rate, worstLate-worst)
		}
	}
}

const r1, r2 = 5, 6 // seeds

func TestAClockThatWasSetStartsTheEdgeAnew(t *testing.T) {
	r := rand.New(rand.NewPCG(r1, r2))
	var e edge
	w := truth{offset: 1000}
	for s := range int64(5) {
		e.add(w.burst(r, pcie, s*1_000_000_000, 24, true))
	}
	w.offset += 1_000_000
	e.add(w.burst(r, pcie, 5_000_000_000, 24, true))
	lo, hi, ok := e.at(5_000_000_000)
	if want := w.at(5_000_000_000); !ok || e.restarts != 1 || lo > want || hi < want {
		t.Errorf("offset in [%d, %d], truth %d, %d restarts", lo, hi, want, e.restarts)
	}
	got, ok := e.estimate(5_000_000_000, "card")
	if !ok || got.State != clock.Joining || got.LowerNS > got.OffsetNS || got.UpperNS < got.OffsetNS || got.Local != "card" {
		t.Errorf("estimate %+v", got)
	}
}

func TestOneDurationInOneHundredMayDiffer(t *testing.T) {
	var c cardClock
	for _, d := range [][2]int64{{1000, 2900}, {5000, 2900}, {1_000_000, 1_009_000}, {1_000_000, 1_012_000}} {
		c.compare(d[0], d[1])
	}
	if c.pairs != 4 || c.clashes != 2 {
		t.Errorf("%d of %d differ, want 2 of 4", c.clashes, c.pairs)
	}
}

// TestATimeOfTheCardEndsAnExchangeWhenItIsSeenAndWhole plays the card at the moments at which the host looks at its clock: when it asks, when it
// has seen a new time, and with the answer.
func TestATimeOfTheCardEndsAnExchangeWhenItIsSeenAndWhole(t *testing.T) {
	const seq, first, whole, torn = 9, 7, 5<<32 | 5, 5<<32 | 4
	for _, c := range []struct {
		name    string
		moments []func(b box)
		want    exchange
		ok      bool
	}{
		{"the time comes before the answer", []func(box){func(b box) { b.set(whole, 0) }, func(b box) { b.set(whole, seq) }}, exchange{1, whole, 2}, true},
		{"half of the time comes before the whole", []func(box){func(b box) { b.set(torn, 0) }, func(b box) { b.set(whole, seq) }}, exchange{1, whole, 3}, true},
		{"both are seen at the same time", []func(box){func(b box) { b.set(whole, seq) }}, exchange{1, whole, 2}, true},
		{"the kernel ends", []func(box){func(b box) { atomic.StoreUint32(b.word(3), first) }}, exchange{ask: 1}, false},
	} {
		b, n := box(view(make([]uint64, boxBytes/8))), 0
		b.set(3, seq-1) // of the question before
		x, ok, err := b.ask(seq, first, func() int64 {
			if n++; n <= len(c.moments) {
				c.moments[n-1](b)
			}
			return int64(n)
		})
		if x != c.want || ok != c.ok || err != nil || *b.word(0) != seq {
			t.Errorf("%s: %+v, %t, %v; want %+v, %t", c.name, x, ok, err, c.want, c.ok)
		}
	}
	late := int64(0)
	if _, ok, err := box(view(make([]uint64, boxBytes/8))).ask(seq, first, func() int64 { late += lostNS; return late }); ok || err == nil {
		t.Errorf("a card that never answers: %t, %v", ok, err)
	}
}

// set writes a time and the number of an answer.
func (b box) set(card uint64, answer uint32) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&b[128])), card)
	atomic.StoreUint32(b.word(1), answer)
}

func TestAnswersAreWhereTheKernelWritesThem(t *testing.T) {
	b := box(make([]byte, boxBytes))
	for i, at := range []int{0, 16, 48} { // box[at] of kernels/common.cuh
		*b.word([]int{0, 1, 3}[i]) = uint32(i + 1)
		if got := binary.LittleEndian.Uint32(b[4*at:]); got != uint32(i+1) {
			t.Errorf("word %d is not box[%d]", i, at)
		}
	}
	binary.LittleEndian.PutUint64(b[4*32:], 99)
	if b.card() != 99 {
		t.Errorf("the card's time is not at box + 32")
	}
}
