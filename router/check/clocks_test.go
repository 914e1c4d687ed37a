package check

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

const (
	lieNS   = 1_000_000
	boundNS = 20_000
)

// world makes requests of a cluster whose clocks are known: stamp adds what a node's clock is off by.
type world struct {
	r   *rand.Rand
	off map[string]int64
}

func (w world) phase(role phase.Role, name string, at map[string]int64) timeline.Phase {
	instance := crc32.ChecksumIEEE([]byte(name))
	p := timeline.Phase{Role: role, Node: name, Clock: timeline.PhaseClock{ID: clock.MakeID(0xaa, instance), BoundNS: ptr(boundNS)}}
	for n, ns := range at {
		s := timeline.Stamp{Name: n, Ref: ptr(ns + w.off[name] + w.r.Int64N(2*boundNS) - boundNS)}
		if strings.HasPrefix(n, "t.") {
			s.Name = n[2:]
			p.Transfer = append(p.Transfer, s)
		} else {
			p.Stamps = append(p.Stamps, s)
		}
	}
	return p
}

// request is generation first over one pair. slow is how long the messages between router and nodes take at least.
func (w world) request(ctx, gen string, slow int64) *timeline.Line {
	hop := func() int64 { return 20_000 + w.r.Int64N(300_000) }
	t0 := w.r.Int64N(1e9)
	gr := t0 + slow + hop()      // gen receives
	asked := gr + 50_000 + hop() // ctx is asked for KV
	hs := gr + 100_000           // gen sends its headers
	rh := hs + slow + hop()      // the router has them
	cr := rh + slow + hop()      // ctx receives
	first := cr + 10_000_000     // first byte of KV
	gs := first + hop()
	ack := gs + 50_000 + hop()
	r := w.phase(phase.Disagg, "r", map[string]int64{"gen_dispatch_ns": t0, "gen_headers_ns": rh, "ctx_dispatch_ns": rh + 1000})
	c := w.phase(phase.Ctx, ctx, map[string]int64{"receive_ns": cr, "t.requested_ns": asked, "t.start_ns": first, "t.installed_ns": ack})
	g := w.phase(phase.Gen, gen, map[string]int64{"receive_ns": gr, "headers_sent_ns": hs, "t.requested_ns": gr + 50_000, "t.start_ns": gs, "t.installed_ns": gs + 50_000})
	return &timeline.Line{Router: "r", Style: "generation_first", Reference: r.Clock.ID, Phases: []timeline.Phase{r, c, g}}
}

func TestAClockThatLiesByAMillisecondIsNamed(t *testing.T) {
	for _, links := range []struct {
		name string
		slow int64 // of the router's links: they prove nothing if it is large
		// pairs are those that requests used.
		pairs [][2]string
	}{
		{"with the router's messages", 0, [][2]string{{"ctx0", "gen0"}, {"ctx0", "gen1"}}},
		{"by KV transfers alone", 5_000_000, [][2]string{{"ctx0", "gen0"}, {"ctx0", "gen1"}}},
	} {
		const runs = 90
		named := 0
		for seed := range uint64(runs) {
			liar := []string{"ctx0", "gen0", "gen1"}[seed%3]
			w := world{rand.New(rand.NewPCG(seed, 5)), map[string]int64{liar: lieNS * (1 - 2*int64(seed/3%2))}}
			var c, d Clocks
			for range 30 {
				for _, p := range links.pairs {
					c.Add(w.request(p[0], p[1], links.slow))
					d.Add(w.request(p[0], p[1], links.slow))
				}
			}
			c.Merge(&d)
			vs := c.Verdicts()
			if len(vs) != 1 || !slices.Equal(vs[0].Liars, []string{liar}) || vs[0].ExcessNS < lieNS/2 || vs[0].ExcessNS > lieNS+2*boundNS {
				t.Errorf("%s, seed %d: %s lies; %v", links.name, seed, liar, vs)
				continue
			}
			named++
			if s := vs[0].String(); !strings.Contains(s, "the clock of "+liar+" is wrong by at least 0.") && !strings.Contains(s, "at least 1.") {
				t.Errorf("it reads %q", s)
			}
		}
		t.Logf("%s: %d of %d liars named", links.name, named, runs)
	}
}

func TestHonestClocksAreNotBlamed(t *testing.T) {
	w := world{rand.New(rand.NewPCG(1, 1)), nil}
	var c Clocks
	for range 2000 {
		c.Add(w.request("ctx0", "gen0", 0))
		c.Add(w.request("ctx1", "gen0", 0))
	}
	if vs := c.Verdicts(); len(vs) != 0 {
		t.Errorf("%v", vs)
	}
}

func TestTwoClocksWithNothingBetweenThemAndOthersAreBothSuspects(t *testing.T) {
	w := world{rand.New(rand.NewPCG(1, 1)), map[string]int64{"gen0": lieNS}}
	var c Clocks
	for range 30 {
		c.Add(w.request("ctx0", "gen0", 5_000_000))
	}
	vs := c.Verdicts()
	if len(vs) != 1 || !slices.Equal(vs[0].Liars, []string{"ctx0", "gen0"}) || !strings.Contains(vs[0].String(), "one of ctx0, gen0 is wrong") {
		t.Errorf("%v", vs)
	}
}

// Records that name ever more nodes cost neither memory nor time without bound.
func TestNamesWithoutNumberAreNotKept(t *testing.T) {
	var c Clocks
	at := func(v int64) *int64 { return &v }
	for i := range 3 * maxDirections {
		c.Add(&timeline.Line{Router: "r", Reference: "00000000000000aa.00000001", Style: "generation_first", Phases: []timeline.Phase{
			{Role: phase.Disagg, Node: "r", Clock: timeline.PhaseClock{ID: "00000000000000aa.00000001", OffsetNS: at(0), BoundNS: at(0)}, Stamps: []timeline.Stamp{{Name: "gen_dispatch_ns", Ref: at(1000)}, {Name: "gen_headers_ns", Ref: at(500)}}},
			{Role: phase.Gen, Node: fmt.Sprint("n", i), Clock: timeline.PhaseClock{ID: "00000000000000bb.00000002", OffsetNS: at(0), BoundNS: at(10)}, Stamps: []timeline.Stamp{{Name: "receive_ns", Ref: at(100)}, {Name: "headers_sent_ns", Ref: at(900)}}},
		}})
	}
	if n := len(c.routers["r"]); n != maxDirections {
		t.Errorf("%d directions are kept, want %d", n, maxDirections)
	}
	if v := c.Verdicts(); len(v) != 1 {
		t.Errorf("%d verdicts", len(v))
	}
}
