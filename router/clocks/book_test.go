package clocks

import (
	"context"
	"encoding/json"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/track"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/serve/servetest"
)

func newBook(t *testing.T, o Options) *Book {
	t.Helper()
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o.Steady, o.Name = s, "r0"
	return New(o)
}

func estimate(b *Book, local clock.ID, at, offset, bound int64) clock.Estimate {
	return clock.Estimate{
		Reference: b.o.Steady.ID(), Local: local, AtNS: at, OffsetNS: offset, LowerNS: offset - bound, UpperNS: offset + bound, State: clock.Synced,
	}
}

func TestEstimateOfItsTime(t *testing.T) {
	b := newBook(t, Options{})
	id := clock.MakeID(7, 1)
	for _, at := range []int64{300, 100, 200} { // any order
		b.put(estimate(b, id, at, at*10, 5))
	}
	for _, c := range []struct {
		name          string
		local, offset int64
	}{
		{"before the first", 50, 1000}, {"at an estimate", 200, 2000}, {"between two", 299, 2000}, {"after the last", 1 << 40, 3000},
	} {
		if e, ok := b.Estimate(id, c.local); !ok || e.OffsetNS != c.offset {
			t.Errorf("%s: got %+v, %v; want offset %d", c.name, e, ok, c.offset)
		}
	}
	other := clock.MakeID(7, 99) // perhaps of a machine cloned from the same snapshot
	if e, ok := b.Estimate(other, 200); ok {
		t.Errorf("a process that only shares the epoch has the estimate %+v", e)
	}
	if _, ok := b.Estimate(clock.MakeID(8, 1), 200); ok {
		t.Error("a clock that was never seen has an estimate")
	}
}

func TestEstimatesAgainstAnotherClockAreDropped(t *testing.T) {
	b := newBook(t, Options{})
	e := estimate(b, clock.MakeID(7, 1), 1, 2, 3)
	e.Reference = clock.MakeID(1234, 1)
	b.put(e)
	if _, ok := b.Newest(node.Info{ClockID: e.Local}); ok {
		t.Error("an estimate against a clock that is not ours was kept")
	}
}

func TestPastIsBounded(t *testing.T) {
	b := newBook(t, Options{})
	id := clock.MakeID(7, 1)
	for i := range int64(3 * keepPast) {
		b.put(estimate(b, id, i, i, 5))
	}
	if n := len(b.past[id]); n != keepPast {
		t.Errorf("%d estimates are kept, want %d", n, keepPast)
	}
	if e, _ := b.published(id, maxStamp); e.AtNS != 3*keepPast-1 {
		t.Errorf("the newest is of %d", e.AtNS)
	}
}

func TestClocksOfDeadProcessesAreForgottenOldestFirst(t *testing.T) {
	b := newBook(t, Options{})
	for i := range int64(keepClocks + 5) {
		b.put(estimate(b, clock.MakeID(7, uint32(i)), 1000*i, i, 5))
	}
	_, first := b.published(clock.MakeID(7, 4), 1<<50)
	_, next := b.published(clock.MakeID(7, 5), 1<<50)
	if len(b.past) != keepClocks || first || !next {
		t.Errorf("%d clocks, want %d; the fifth is there: %v, the sixth: %v", len(b.past), keepClocks, first, next)
	}
}

func TestPeers(t *testing.T) {
	entry := func(role node.Role, name string, alive bool) node.Entry {
		return node.Entry{Info: node.Info{Role: role, Name: name, ClockID: clock.MakeID(uint64(len(name)), 1)}, Alive: alive}
	}
	members := []node.Entry{entry(node.RoleCtx, "a", true), entry(node.RoleGen, "bb", false), entry(node.RoleRouter, "r", true), entry(node.RoleClocksync, "c", true)}
	b := newBook(t, Options{
		Members: func() []node.Entry { return members },
		Static:  func() []node.Info { return []node.Info{{Role: node.RoleGen, Name: "s", URL: "http://s"}} },
	})
	peers, served := b.peers()
	if len(peers) != 3 || !served || peers[2].Name != "gen.s" {
		t.Errorf("got %+v, %v", peers, served)
	}
	b.put(estimate(b, clock.MakeID(1, 1), b.o.Steady.Now()-1e9, 2, 3)) // clocksync has measured a a second ago
	old := estimate(b, clock.MakeID(2, 1), b.o.Steady.Now()-60e9, 2, 3)
	b.put(old) // and bb a minute ago
	if b.leave(peers); !peers[0].Passive || peers[1].Passive || peers[2].Passive {
		t.Errorf("only the first is clocksync's: %+v", peers)
	}
	members[3].Alive = false
	if _, served = b.peers(); served {
		t.Error("a dead clocksync counts")
	}
}

func TestAPublishedEstimateAgesAndSaysSo(t *testing.T) {
	b := newBook(t, Options{})
	now := b.o.Steady.Now()
	for _, c := range []struct {
		name  string
		age   int64
		void  int64 // after its time; 0: never
		bound int64 // least
		state clock.State
	}{
		{"fresh", 1e9, 0, 100, clock.Synced},
		{"without a successor for a minute", 60e9, 0, 100 + 60*500 + 60*60*100/2, clock.Holdover},
		{"after its end", 60e9, 30e9, 100, clock.Void},
	} {
		id := clock.MakeID(uint64(c.age+c.void), 1)
		e := estimate(b, id, now-c.age-7_000, 7_000, 100)
		e.SkewErrPPB, e.EtaPPBPerS = 500, 100
		if c.void != 0 {
			e.VoidAfterNS = e.AtNS + c.void
		}
		b.put(e)
		got, ok := b.Newest(node.Info{ClockID: id})
		most := c.bound*11/10 + 600 + (b.o.Steady.Now()-now)/1e6 // and it goes on to age
		if !ok || got.State != c.state || got.BoundNS() < c.bound || c.state != clock.Void && got.BoundNS() > most {
			t.Errorf("%s: %s, bound %d, want %s and about %d", c.name, got.State, got.BoundNS(), c.state, c.bound)
		}
	}
}

// While clocksync probes, requests still tighten and contradict what it publishes.
func TestRequestsAreHeldAgainstPublishedEstimates(t *testing.T) {
	b := newBook(t, Options{})
	id := clock.MakeID(9, 1)
	const offset = int64(-5e12)
	key := node.Key(node.RoleGen, "g")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	b.tracker.SetPeers([]track.Peer{{Name: key, URL: "http://127.0.0.1:1", ClockID: id, Passive: true}})
	go func() { done <- b.tracker.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	exchange := func(t1, lie int64) {
		b.Exchange(key, id, ntp.Exchange{T1: t1, T2: t1 + 40_000 - offset + lie, T3: t1 + 90_000 - offset + lie, T4: t1 + 130_000})
	}
	known := func() bool { _, ok := b.tracker.Newest(key); return ok }
	for !known() {
		runtime.Gosched()
	}
	if exchange(b.o.Steady.Now(), 0); b.hints[track.HintUnknown].Load() != 1 {
		t.Error("an exchange with a clock that nobody has measured is not counted as such")
	}
	for i := range int64(10) {
		e := estimate(b, id, b.o.Steady.Now()-offset-(10-i)*1e9, offset, 300_000)
		e.EtaPPBPerS = 100
		b.put(e)
		b.tracker.Learn(key, e)
	}
	now := b.o.Steady.Now()
	at := now - offset
	before, _ := b.Estimate(id, at)
	exchange(now, 0)
	after, ok := b.Estimate(id, at)
	if !ok || before.BoundNS() < 250_000 || after.BoundNS() > 60_000 || after.LowerNS > offset || after.UpperNS < offset {
		t.Errorf("a request of 40 us each way changed the bound from %d to %d: %+v", before.BoundNS(), after.BoundNS(), after)
	}
	exchange(b.o.Steady.Now(), 1_000_000)
	if a, c := b.hints[track.HintAgrees].Load(), b.hints[track.HintContradicts].Load(); a != 1 || c != 1 {
		t.Errorf("%d agree, %d contradict, want 1 each", a, c)
	}
	if again, _ := b.Estimate(id, at); again.LowerNS > offset || again.UpperNS < offset {
		t.Errorf("stamps that lie moved the bounds to [%d, %d]", again.LowerNS-offset, again.UpperNS-offset)
	}
}

func TestAClockThatMessagesProveWrongIsShownAndForgivenLater(t *testing.T) {
	b := newBook(t, Options{})
	id := clock.MakeID(9, 1)
	b.put(estimate(b, id, b.o.Steady.Now(), 0, 1000))
	ns := func(v int64) *int64 { return &v }
	phaseOf := func(role phase.Role, name string, clockID clock.ID, stamps ...timeline.Stamp) timeline.Phase {
		return timeline.Phase{Role: role, Node: name, Clock: timeline.PhaseClock{ID: clockID, BoundNS: ns(1000)}, Stamps: stamps}
	}
	line := func(received int64) *timeline.Line {
		own := b.o.Steady.ID()
		return &timeline.Line{Router: "r0", Style: "generation_first", Reference: own, Phases: []timeline.Phase{
			phaseOf(phase.Disagg, "r0", own, timeline.Stamp{Name: "gen_dispatch_ns", Ref: ns(0)}),
			phaseOf(phase.Gen, "g", id, timeline.Stamp{Name: "receive_ns", Ref: ns(received)}),
		}}
	}
	state := func() clock.State {
		e, _ := b.Newest(node.Info{Name: "g", Role: node.RoleGen, ClockID: id})
		return e.State
	}
	t0 := time.Now()
	b.witness.add(line(-1500), t0)
	if s := state(); s != clock.Synced {
		t.Errorf("%s because of a stamp that the bounds explain", s)
	}
	b.witness.add(line(-900_000), t0.Add(2*time.Second))
	if s := state(); s != clock.Quarantined || b.witness.messages() != 1 {
		t.Errorf("%s after a message that was received 0.9 ms before it was sent; %d counted", s, b.witness.messages())
	}
	if _, ok := b.Estimate(id, b.o.Steady.Now()); !ok {
		t.Error("its stamps are no longer converted")
	}
	for i := range 3 {
		b.witness.add(line(50_000), t0.Add(time.Duration(i+1)*(forgetAfter+time.Second)))
	}
	if s := state(); s != clock.Synced {
		t.Errorf("%s three minutes later", s)
	}
}

// The bucket of published estimates is kept in memory: after a restart of NATS it is another.
func TestEstimatesAreHeardAgainAfterNATSCameBackEmpty(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	server := func(listen string) *bus.Embedded {
		e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: listen, StoreDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		return e
	}
	addr := servetest.Addr(t)
	nats := server(addr)
	conn, err := bus.Connect(ctx, bus.Options{URL: nats.URL(), Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	b := newBook(t, Options{Conn: conn})
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- b.Run(run) }()
	t.Cleanup(func() { stop(); <-done })
	// heard publishes an estimate until the book has it.
	heard := func(id clock.ID) {
		t.Helper()
		value, err := json.Marshal(clock.Published{Router: "r0", Node: "g", Estimate: estimate(b, id, 1e9, 5e12, 100)})
		if err != nil {
			t.Fatal(err)
		}
		for known := false; !known; _, known = b.published(id, maxStamp) {
			if kv, err := conn.KV(ctx, bus.BucketClocks); err == nil {
				_, _ = kv.Put(ctx, "r0.g", value)
			}
			if ctx.Err() != nil {
				t.Fatalf("the estimate of %s was never heard", id)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	heard(clock.MakeID(1, 1))
	nats.Close()
	server(addr)
	heard(clock.MakeID(2, 1))
}
