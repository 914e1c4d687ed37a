package timeline

import (
	"slices"
	"testing"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// wide is clocks with points that err by errNS and bounds of ±widthNS around them, for one node or the other.
func wide(errNS, widthNS map[clock.ID]int64) Clocks {
	right := clocks()
	return Clocks{Reference: routerID, Estimate: func(id clock.ID, ns int64) (clock.Estimate, bool) {
		e, ok := right.Estimate(id, ns)
		e.OffsetNS += errNS[id]
		e.LowerNS, e.UpperNS = e.OffsetNS-widthNS[id], e.OffsetNS+widthNS[id]
		return e, ok
	}}
}

// transferred is ring with both sides of the hand-over: asked 30 µs, first byte 20 µs, acknowledgement 40 µs on the way.
func transferred() []*phase.Record {
	rs := ring()
	at := func(shift int64, v float64) *int64 { ns := t0 + shift + int64(v*float64(ms)); return &ns }
	rs[1].Transfer = &phase.Transfer{Peer: "gen0", RequestedNS: at(ctxShift, 2.53), StartNS: at(ctxShift, 5.98), InstalledNS: at(ctxShift, 11.04)}
	rs[2].Transfer.RequestedNS = at(genShift, 2.5)
	r, c, g := &rs[0].Stamps, &rs[1].Stamps, &rs[2].Stamps // the router's messages take 300 us
	r.GenDispatchNS, g.ReceiveNS, g.HeadersSentNS, r.GenHeadersNS = at(0, 0.6), at(genShift, 0.9), at(genShift, 1.7), at(0, 2)
	r.CtxDispatchNS, c.ReceiveNS = at(0, 2), at(ctxShift, 2.3)
	return rs
}

func boundsOf(l *Line) map[string]int64 {
	out := map[string]int64{}
	for _, p := range l.Phases {
		out[p.Node] = *p.Clock.BoundNS
	}
	return out
}

func TestMessagesTightenBoundsAndLeaveThePointsAlone(t *testing.T) {
	const us = 1000
	cases := []struct {
		name     string
		err      map[clock.ID]int64
		width    map[clock.ID]int64
		ctx, gen int64 // bounds stated
	}{
		{"bounds that are tighter than any message stay", nil, map[clock.ID]int64{ctxID: 7 * us, genID: 9 * us}, 7 * us, 9 * us},
		{"a context node known by its hand-over to a node that is known well: 30 and 20 us away", nil, map[clock.ID]int64{ctxID: 900 * us, genID: 2 * us}, 32 * us, 2 * us},
		{"and the other way round", nil, map[clock.ID]int64{ctxID: 2 * us, genID: 900 * us}, 2 * us, 32 * us},
		{"a point that is off by 100 us stays where it is, and its bound says how far off it may be", map[clock.ID]int64{ctxID: 100 * us},
			map[clock.ID]int64{ctxID: 900 * us, genID: 2 * us}, 132 * us, 2 * us},
		{"both by the router's messages, of 300 us each way", nil, map[clock.ID]int64{ctxID: 900 * us, genID: 900 * us}, 320 * us, 300 * us},
	}
	for _, c := range cases {
		l := Merge(parts(transferred()), wide(c.err, c.width))
		got := boundsOf(l)
		if got["ctx0"] != c.ctx || got["gen0"] != c.gen || len(l.Violations) != 0 {
			t.Errorf("%s: ctx0 ±%d, gen0 ±%d, want ±%d, ±%d; violations %v", c.name, got["ctx0"], got["gen0"], c.ctx, c.gen, l.Violations)
		}
		if off := *l.Phases[1].Clock.OffsetNS; off != -ctxShift+c.err[ctxID] {
			t.Errorf("%s: the point moved to %d", c.name, off)
		}
	}
}

func TestMessagesThatContradictTogetherAreAViolation(t *testing.T) {
	// Each node is known to ±20 us and is off by 60 us, one each way. Between the two the hand-over shows it; the router's
	// messages are too slow to.
	off := wide(map[clock.ID]int64{ctxID: 60_000, genID: -60_000}, map[clock.ID]int64{ctxID: 20_000, genID: 20_000})
	l := Merge(parts(transferred()), off)
	if len(l.Violations) != 1 || l.Violations[0].Cause != "ctx0.start_ns" || l.Violations[0].Event != "gen0.start_ns" || l.Violations[0].ExcessNS != 60_000 {
		t.Errorf("violations %+v", l.Violations)
	}
	if b := boundsOf(l); b["ctx0"] != 20_000 || b["gen0"] != 20_000 {
		t.Errorf("a contradiction changed the bounds to %v", b)
	}
	// gen0 is not behind the router, ctx0 not behind gen0, and yet ctx0 is 50 us behind the router: no pair shows it alone.
	rs := transferred()
	*rs[2].Stamps.ReceiveNS = t0 + genShift + 600_000       // at once after the router's write
	*rs[1].Transfer.RequestedNS = t0 + ctxShift + 2_500_000 // at once after gen0's write
	*rs[0].Stamps.CtxDoneNS = t0 + 9_100_000 - 50_000       // 50 us before ctx0 had it
	l = Merge(parts(rs), wide(nil, map[clock.ID]int64{ctxID: 60_000, genID: 20_000}))
	if len(l.Violations) != 1 || l.Violations[0].Cause != allClocks || l.Violations[0].ExcessNS != 50_000 {
		t.Errorf("violations %+v", l.Violations)
	}
}

func TestAWrittenLineTellsTheSameMessages(t *testing.T) {
	records := transferred()
	l, err := Parse(Append(nil, Merge(parts(records), clocks())))
	if err != nil {
		t.Fatal(err)
	}
	var got []Link
	l.Links(func(k Link) { got = append(got, k) })
	want := []Link{
		{"", "gen0", 600_000, 900_000, bound}, {"", "ctx0", 2_000_000, 2_300_000, bound}, {"gen0", "", 1_700_000, 2_000_000, bound},
		{"gen0", "", 12_200_000, 14_000_000, bound}, {"ctx0", "", 9_100_000, 12_000_000, bound}, {"ctx0", "gen0", 9_100_000, 12_000_000, 2 * bound},
		{"gen0", "ctx0", 2_500_000, 2_530_000, 2 * bound}, {"ctx0", "gen0", 5_980_000, 6_000_000, 2 * bound}, {"gen0", "ctx0", 11_000_000, 11_040_000, 2 * bound},
	}
	if !slices.Equal(got, want) {
		t.Errorf("links\n%v\nwant\n%v", got, want)
	}
}

func BenchmarkMergeOfACloseRequest(b *testing.B) {
	ps := parts(transferred())
	for _, c := range []struct {
		name  string
		width int64
	}{{"bounds tighter than messages", 1000}, {"bounds that messages tighten", 900_000}} {
		known := wide(nil, map[clock.ID]int64{ctxID: c.width, genID: c.width})
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				Merge(ps, known)
			}
		})
	}
}
