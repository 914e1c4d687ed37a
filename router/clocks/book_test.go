package clocks

import (
	"testing"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
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
	other := clock.MakeID(7, 99) // another process with the same clock
	if e, ok := b.Estimate(other, 200); !ok || e.OffsetNS != 2000 {
		t.Errorf("same epoch: got %+v, %v", e, ok)
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
	if n := len(b.past[id.Epoch()]); n != keepPast {
		t.Errorf("%d estimates are kept, want %d", n, keepPast)
	}
	if e, _ := b.Newest(node.Info{ClockID: id}); e.AtNS != 3*keepPast-1 {
		t.Errorf("the newest is of %d", e.AtNS)
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
	b.put(estimate(b, clock.MakeID(1, 5), 1, 2, 3)) // clocksync has measured a
	if rest := b.uncovered(peers); len(rest) != 2 || rest[0].Name != "gen.bb" {
		t.Errorf("left to this router: %+v", rest)
	}
	members[3].Alive = false
	if _, served = b.peers(); served {
		t.Error("a dead clocksync counts")
	}
}
