package estimate

import (
	"math"
	"math/rand/v2"
	"testing"

	"meridian.internal/clocksync/ntp"
)

// slewLab is a lab whose local steady clock is slewed by NTP: raw is the crystal, steady = raw + slew(t).
type slewLab struct {
	lab
	slew    func(t float64) float64
	pairErr float64
}

func newSlewLab(ppm float64, slew func(float64) float64) slewLab {
	l := slewLab{lab: newLab(ppm), slew: slew, pairErr: 300}
	raw := l.offset
	l.offset = func(t float64) float64 { return raw(t) - slew(t) }
	return l
}

// pair reads a clock pair at t: the difference is known within half a bracket.
func (l slewLab) pair(at int64, diff float64) *ntp.Pair {
	e := (l.r.Float64()*2 - 1) * l.pairErr
	return &ntp.Pair{AtNS: at, DiffNS: int64(math.Round(diff + e)), ErrNS: int64(l.pairErr) + 1}
}

func (l slewLab) feed(e *Estimator, from, to float64) (bad []Verdict) {
	for t := from; t < to; t += sec {
		b := l.burst(t, 4)
		b.Local = l.pair(l.local(t+4e5), -l.slew(t+4e5))
		b.Ref = l.pair(int64(t), 0)
		if v := e.Add(b); v.Bad() {
			bad = append(bad, v)
		}
	}
	return bad
}

// sawtooth is chrony's habit: a new frequency every 16 s, and now and then a fast slew.
func sawtooth(ppm, fastPPM float64) func(float64) float64 {
	return func(t float64) float64 {
		total := 0.0
		for k := 0; float64(k)*16*sec < t; k++ {
			d := min(t-float64(k)*16*sec, 16*sec)
			r := ppm * float64(k%5-2) / 2
			if k%7 == 3 {
				r = fastPPM
			}
			total += r * 1e-6 * d
		}
		return total
	}
}

func TestASlewedClockIsFollowedThroughItsRawForm(t *testing.T) {
	for _, c := range []struct {
		name   string
		oneWay float64
		slew   func(float64) float64
		bound  float64 // p50, ns
	}{
		{"no slew, kernel stamps", 300, func(float64) float64 { return 0 }, 1500},
		{"a constant slew is a part of the skew", 300, func(t float64) float64 { return 12e-6 * t }, 1500},
		{"small corrections, kernel stamps", 300, sawtooth(2, 2), 8_000},
		{"small corrections, LAN", 50e3, sawtooth(2, 2), 75_000},
		{"slews of 500 ppm, LAN", 50e3, sawtooth(10, 500), 800_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newSlewLab(40, c.slew)
			l.oneWay, l.jitter = c.oneWay, c.oneWay/5
			e := New(refID, localID, Config{})
			l.feed(e, 0, 60*sec)
			misses, n, widest := 0, 0, []float64{}
			for at := 60 * sec; at < 600*sec; at += sec {
				l.feed(e, at, at+1)
				for _, back := range []float64{0, 3.3 * sec, 40 * sec} {
					iv, ok := e.At(l.local(at + 0.001*sec - back))
					truth := l.offset(at + 0.001*sec - back)
					n++
					if !ok || float64(iv.LowerNS) > truth || float64(iv.UpperNS) < truth {
						misses++
					}
					if back == 0 {
						widest = append(widest, float64(iv.BoundNS()))
					}
				}
			}
			p50 := median(widest)
			st := e.Stats()
			if misses > 0 || p50 > c.bound {
				t.Errorf("%d of %d outside, bound p50 %.0f ns (goal %.0f), %+v", misses, n, p50, c.bound, st)
			}
			if st.Steps+st.Violations+st.Infeasible > 0 {
				t.Errorf("a slew was taken for a fault: %+v", st)
			}
			t.Logf("bound p50 %.0f ns, %+v", p50, st)
		})
	}
}

func median(v []float64) float64 {
	m := math.Inf(1)
	for _, x := range v {
		below := 0
		for _, y := range v {
			if y < x {
				below++
			}
		}
		if below >= len(v)/2 {
			m = min(m, x)
		}
	}
	return m
}

func TestWithoutTheRawFormASlewIsNoticed(t *testing.T) {
	l := newSlewLab(40, sawtooth(2, 500))
	e := New(refID, localID, Config{})
	l.lab.feed(e, 0, 300*sec) // bursts without pairs
	if st := e.Stats(); st.Steps+st.Violations == 0 {
		t.Errorf("stats %+v", st)
	}
}

func TestAFormerSlewIsForgottenAndTheSteadyClocksComparedAgain(t *testing.T) {
	l := newSlewLab(10, func(t float64) float64 { return 5e-6 * min(t, 30*sec) })
	e := New(refID, localID, Config{})
	l.feed(e, 0, 60*sec)
	if !e.Stats().Raw {
		t.Fatalf("not raw after a slew: %+v", e.Stats())
	}
	l.feed(e, 60*sec, 1100*sec)
	if e.Stats().Raw {
		t.Errorf("still raw: %+v", e.Stats())
	}
	for at := 300.0; at < 1100; at += 7 {
		l.check(t, e, at*sec)
	}
}

func TestPairsAreInterpolatedWithinTheirError(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	slew := sawtooth(3, 100)
	var s slewTrack
	for t := 1.0; t < 200; t++ {
		e := (r.Float64()*2 - 1) * 200
		s.add(&ntp.Pair{AtNS: int64(t * sec), DiffNS: int64(slew(t*sec) + e), ErrNS: 201})
	}
	if s.changes == 0 {
		t.Error("no change of rate was seen")
	}
	for at := 2.0; at < 198; at += 0.37 {
		d, err := s.diff(int64(at * sec))
		if miss := math.Abs(d-slew(at*sec)) - err; miss > 1 {
			t.Errorf("at %.2f s: %.0f ± %.0f, the truth is %.0f", at, d, err, slew(at*sec))
		}
	}
}

func TestTornPairsAndOldPairsAreIgnored(t *testing.T) {
	var s slewTrack
	for _, p := range []*ntp.Pair{nil, {AtNS: 5, ErrNS: maxPairErr + 1}, {AtNS: 5, ErrNS: -1}, {AtNS: 5, ErrNS: 1}, {AtNS: 5, ErrNS: 1}, {AtNS: 4, ErrNS: 1}} {
		s.add(p)
	}
	if len(s.pairs) != 1 {
		t.Errorf("pairs %+v", s.pairs)
	}
}
