package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"image/png"
	"io"
	"math"
	"strings"
	"testing"

	"meridian.internal/shared/clock"
)

const (
	ref   = clock.ID("00000000000000aa.00000001")
	local = clock.ID("00000000000000bb.00000002")
	older = clock.ID("00000000000000cc.00000003")
)

func at(id clock.ID, s, offset int64) clock.Published {
	return clock.Published{Node: "gen-0", By: "cs", Estimate: clock.Estimate{Reference: ref, Local: id, AtNS: s * 1e9, OffsetNS: offset,
		LowerNS: offset - 30_000, UpperNS: offset + 50_000, RTTNS: 80_000, State: clock.Synced}}
}

func straightClock(n int64) (es []clock.Published) {
	for s := range n {
		es = append(es, at(local, s, 7e15+s*20_000))
	}
	return es
}

func TestASteadyClockHasNoResidual(t *testing.T) {
	s, err := Of(straightClock(50))
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(s.SkewPPM-20) > 1e-6 || s.T[0] != -49 || s.T[49] != 0 {
		t.Errorf("skew %v, times %v to %v", s.SkewPPM, s.T[0], s.T[49])
	}
	for i := range s.T {
		if math.Abs(s.Residual[i]) > 1e-3 || math.Abs(s.Lower[i]+30) > 1e-3 || math.Abs(s.Upper[i]-50) > 1e-3 || s.Bound[i] != 50 || s.RTT[i] != 80 {
			t.Errorf("point %d: %v [%v, %v] bound %v rtt %v", i, s.Residual[i], s.Lower[i], s.Upper[i], s.Bound[i], s.RTT[i])
		}
	}
}

func TestOnlyTheNewestEpochIsDrawn(t *testing.T) {
	es := append([]clock.Published{at(older, 1, 5), at(older, 2, 5)}, straightClock(3)...)
	s, err := Of(es)
	if err != nil || len(s.T) != 3 {
		t.Errorf("%d points, %v", len(s.T), err)
	}
	void := at(local, 9, 0)
	void.LowerNS, void.UpperNS = 0, 0
	for name, es := range map[string][]clock.Published{"none": nil, "only one that states nothing": {void}} {
		if _, err := Of(es); !errors.Is(err, ErrEmpty) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A clock that was stepped has the slope of the stretch since, and states that are not as they should be are marked.
func TestAStepAndBadStatesAreShown(t *testing.T) {
	es := straightClock(40)
	for i := range es[20:] {
		e := &es[20+i].Estimate
		e.OffsetNS, e.LowerNS, e.UpperNS = e.OffsetNS-3e6, e.LowerNS-3e6, e.UpperNS-3e6
		e.State = clock.Suspect
	}
	es[10].State = clock.Holdover
	s, err := Of(es)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Steps) != 1 || s.Steps[0] != 20 || math.Abs(s.SkewPPM-20) > 1e-6 {
		t.Errorf("steps %v, skew %v ppm", s.Steps, s.SkewPPM)
	}
	for i, want := range map[int]float64{0: 3000, 19: 3000, 20: 0, 39: 0} {
		if math.Abs(s.Residual[i]-want) > 1e-3 {
			t.Errorf("residual %d is %v, want %v", i, s.Residual[i], want)
		}
	}
	var svg bytes.Buffer
	if err := s.Write(&svg, "svg"); err != nil {
		t.Fatal(err)
	}
	if want := "stated bound; dashed: a step; orange: holdover or joining; red: suspect, quarantined or void"; !strings.Contains(svg.String(), want) {
		t.Errorf("no title %q", want)
	}
	// A clock that is only fast, and one whose bound is wide, are not stepped.
	fast := []clock.Published{at(local, 0, 0), at(local, 10, 4_900_000)}
	if s, err := Of(fast); err != nil || len(s.Steps) > 0 {
		t.Errorf("steps %v, %v", s.Steps, err)
	}
}

func TestBothFormatsAreWellFormed(t *testing.T) {
	for _, n := range []int64{1, 2, 60} {
		s, err := Of(straightClock(n))
		if err != nil {
			t.Fatal(err)
		}
		var svg, img bytes.Buffer
		if err := s.Write(&svg, "svg"); err != nil {
			t.Fatal(err)
		}
		if err := s.Write(&img, "png"); err != nil {
			t.Fatal(err)
		}
		d := xml.NewDecoder(bytes.NewReader(svg.Bytes()))
		for err == nil {
			_, err = d.Token()
		}
		if !errors.Is(err, io.EOF) || !strings.Contains(svg.String(), "stated bound") {
			t.Errorf("%d points: svg: %v", n, err)
		}
		if _, err := png.Decode(&img); err != nil {
			t.Errorf("%d points: png: %v", n, err)
		}
	}
	s, _ := Of(straightClock(2))
	if err := s.Write(io.Discard, "gif"); err == nil {
		t.Error("gif was written")
	}
}
