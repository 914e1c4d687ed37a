package clock

import (
	"math/rand/v2"
	"testing"
)

const (
	idR = ID("00000000000000aa.00000001")
	idC = ID("00000000000000bb.00000002")
	idN = ID("00000000000000cc.00000003")
)

func TestConvertStatesABoundOrNothing(t *testing.T) {
	e := Estimate{OffsetNS: 1000, SkewPPB: 50_000, SkewErrPPB: 4000, EtaPPBPerS: 100, LowerNS: 950, UpperNS: 1100, AtNS: 10e9,
		ValidFromNS: 5e9, VoidAfterNS: 20e9, State: Synced}
	for _, c := range []struct {
		name       string
		state      State
		local      int64
		ref, bound int64
		ok         bool
	}{
		{"at its own moment the bound is the farther edge", Synced, 10e9, 10e9 + 1000, 100, true},
		{"later it follows the skew and widens", Synced, 11e9, 11e9 + 51_000, 100 + 4000 + 50, true},
		{"earlier it follows the skew and widens", Holdover, 9e9, 9e9 - 49_000, 100 + 4000 + 50, true},
		{"before its validity there is no answer", Synced, 5e9 - 1, 0, 0, false},
		{"after it is void there is no answer", Synced, 20e9 + 1, 0, 0, false},
		{"joining gives no answer", Joining, 10e9, 0, 0, false},
		{"quarantined gives no answer", Quarantined, 10e9, 0, 0, false},
		{"void gives no answer", Void, 10e9, 0, 0, false},
		{"the zero value gives no answer", "", 10e9, 0, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := e
			e.State = c.state
			ref, bound, ok := e.Convert(c.local)
			if ref != c.ref || bound != c.bound || ok != c.ok {
				t.Errorf("got %d ± %d %v, want %d ± %d %v", ref, bound, ok, c.ref, c.bound, c.ok)
			}
		})
	}
}

// line is a true clock: reference = local + off + rate*local.
type line struct{ off, rate float64 }

func (l line) ref(local int64) int64 { return local + int64(l.off+l.rate*float64(local)) }

// estimate is an honest estimate of l at local time at: the truth is inside, not in the middle.
func (l line) estimate(r *rand.Rand, ref, local ID, at int64) Estimate {
	truth := l.ref(at) - at
	lo, up := truth-r.Int64N(100_000), truth+r.Int64N(100_000)
	return Estimate{Reference: ref, Local: local, OffsetNS: lo + r.Int64N(up-lo+1), SkewPPB: int64(l.rate*1e9) + r.Int64N(8001) - 4000,
		SkewErrPPB: 4001, EtaPPBPerS: 100, LowerNS: lo, UpperNS: up, AtNS: at, State: Synced}
}

func TestComposedAndInvertedEstimatesCoverTheTruth(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 20_000 {
		cn := line{float64(r.Int64N(2e15) - 1e15), (r.Float64() - 0.5) * 4e-4} // clocksync as reference of the node
		cr := line{float64(r.Int64N(2e15) - 1e15), (r.Float64() - 0.5) * 4e-4} // clocksync as reference of the router
		at := int64(2e15) + r.Int64N(1e15)
		en := cn.estimate(r, idC, idN, at)
		c := cn.ref(at)
		// The router's stamp at that moment, and an estimate taken some seconds away from it.
		router := int64((float64(c) - cr.off) / (1 + cr.rate))
		er := cr.estimate(r, idC, idR, router+r.Int64N(4e9)-2e9).Invert()
		got, ok := Compose(er, en, "clocksync")
		if !ok {
			t.Fatalf("case %d: not composed", i)
		}
		local := at + r.Int64N(20e9) - 10e9
		ref, bound, ok := got.Convert(local)
		if !ok {
			t.Fatalf("case %d: not converted", i)
		}
		truth := int64((float64(cn.ref(local)) - cr.off) / (1 + cr.rate))
		if d := abs(ref - truth); d > bound+2 {
			t.Fatalf("case %d: error %d ns, bound %d ns", i, d, bound)
		}
		if got.Reference != idR || got.Local != idN || got.Via != "clocksync" {
			t.Fatalf("case %d: %+v", i, got)
		}
	}
}

func TestEstimatesThatDoNotMeetAreNotComposed(t *testing.T) {
	a := Estimate{Reference: idR, Local: idC, State: Synced}
	for name, b := range map[string]Estimate{
		"another epoch in the middle": {Reference: idN, Local: idN, State: Synced},
		"one side is void":            {Reference: idC, Local: idN, State: Void},
	} {
		if _, ok := Compose(a, b, ""); ok {
			t.Errorf("%s: composed", name)
		}
	}
	if _, ok := Compose(Estimate{State: Synced}, Estimate{State: Synced}, ""); ok {
		t.Error("two estimates without ids were composed")
	}
}

func TestTheWorseStateOfTwoWins(t *testing.T) {
	if got := worse(Synced, Holdover); got != Holdover {
		t.Errorf("synced and holdover give %s", got)
	}
	if got := worse(Quarantined, Identity); got != Quarantined {
		t.Errorf("quarantined and identity give %s", got)
	}
}
