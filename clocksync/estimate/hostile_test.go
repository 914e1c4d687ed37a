package estimate

import (
	"math"
	"math/rand/v2"
	"testing"

	"meridian.internal/clocksync/ntp"
)

// A peer's answers may be any numbers: they end no process, and an estimate that is made of them is one that can be used.
func TestAnswersThatNoClockGives(t *testing.T) {
	extremes := []int64{0, 1, -1, math.MaxInt64, math.MinInt64, math.MaxInt64 / 2, math.MinInt64 / 2, 1e18, -1e18, 4e18, -4e18, 1e15, 3600e9, 9.1e18, -9.1e18}
	for seed := range uint64(20000) {
		rng := rand.New(rand.NewPCG(seed, 9))
		pick := func() int64 { return extremes[rng.IntN(len(extremes))] + rng.Int64N(3)*1e6 }
		e := New("00000000000000aa.00000001", "00000000000000bb.00000002", Config{})
		own := int64(1e12)
		for range 1 + rng.IntN(12) {
			own += 1e9
			var b Burst
			for range 1 + rng.IntN(3) {
				x := ntp.Exchange{T1: own, T4: own + 1e5, T2: pick()}
				x.T3 = x.T2 + rng.Int64N(2)*50
				b.Exchanges = append(b.Exchanges, x)
			}
			if seed%2 == 0 {
				b.Ref = &ntp.Pair{AtNS: own, DiffNS: 7, ErrNS: 50}
				b.Local = &ntp.Pair{AtNS: pick(), DiffNS: pick(), ErrNS: 50}
			}
			e.Add(b)
			now := e.Estimate(e.LocalAt(own))
			now.Convert(pick())
			e.Past(pick()).Convert(pick())
		}
	}
}
