//go:build cuda

package cuda

import (
	"math/rand/v2"
	"testing"

	"meridian.internal/shared/clock"
)

// truth is the offset of simulated clocks.
type truth struct {
	offset int64
	rate   float64
}

func (w truth) at(card int64) int64 { return w.offset + int64(w.rate*float64(card)) }

// burst asks n times; the answer takes from 0.8 µs to a few µs each way.
func (w truth) burst(r *rand.Rand, card int64, n int) []exchange {
	var out []exchange
	for i := range n {
		g := card + int64(i)*3000
		shown := g / cardStep * cardStep
		out = append(out, exchange{ask: g + w.at(g) - 800 - r.Int64N(2000), card: shown, answer: g + w.at(g) + 800 + r.Int64N(2000)})
	}
	return out
}

func TestTheEdgeHoldsTheTruthWithinANarrowBound(t *testing.T) {
	r := rand.New(rand.NewPCG(r1, r2))
	for _, rate := range []float64{0, 1.4e-6, -40e-6, 99e-6} {
		w := truth{offset: -1_700_000_000_000_000_000, rate: rate}
		var e edge
		for s := range int64(90) {
			e.add(w.burst(r, 1_000_000_000+s*1_000_000_000, 24))
			for _, ahead := range []int64{-500_000_000, 0, 999_000_000} {
				card := 1_000_000_000 + s*1_000_000_000 + ahead
				lo, hi, ok := e.at(card)
				if want := w.at(card); !ok || lo > want || hi < want {
					t.Fatalf("rate %g, second %d%+d ns: offset in [%d, %d], truth %d", rate, s, ahead, lo, hi, want)
				}
				if s > 20 && ahead >= 0 && (hi-lo)/2 > 1500 {
					t.Errorf("rate %g, second %d%+d ns: bound of %d ns, want 1500 at most", rate, s, ahead, (hi-lo)/2)
				}
			}
		}
		if e.restarts != 0 {
			t.Errorf("rate %g: %d restarts", rate, e.restarts)
		}
	}
}

const r1, r2 = 5, 6 // seeds

func TestAClockThatWasSetStartsTheEdgeAnew(t *testing.T) {
	r := rand.New(rand.NewPCG(r1, r2))
	var e edge
	w := truth{offset: 1000}
	for s := range int64(5) {
		e.add(w.burst(r, s*1_000_000_000, 24))
	}
	w.offset += 1_000_000
	e.add(w.burst(r, 5_000_000_000, 24))
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
