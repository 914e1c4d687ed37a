package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"meridian.internal/shared/clock"
)

// step is one thing that happens to a registry, and the events that it causes.
type step struct {
	atMS int
	do   string // put NAME SEQ | put2 NAME SEQ (another process) | beats (of others since then) | drain NAME SEQ | drain2 NAME SEQ | del NAME | tick
	want string
}

func TestMembers(t *testing.T) {
	cases := []struct {
		name  string
		steps []step
	}{
		{"a process joins, renews, changes, leaves", []step{
			{0, "put a 1", "joined a"}, {500, "put a 2", "renewed a"}, {900, "drain a 3", "changed a"}, {1000, "del a", "left a"}, {1100, "tick", ""},
		}},
		{"a process that stops renewing is lost after its lease, and only once", []step{
			{0, "put a 1", "joined a"}, {0, "put w 1", "joined w"}, {500, "put w 2", "renewed w"}, {1000, "put w 3", "renewed w"},
			{1500, "tick", ""}, {1501, "tick", "lost a"}, {1600, "tick", ""}, {1700, "put a 2", "joined a"},
		}},
		{"nobody is lost while the bus is silent", []step{
			{0, "put a 1", "joined a"}, {0, "put w 1", "joined w"}, {5000, "tick", ""}, {60000, "tick", ""},
		}},
		{"after silence everybody gets time to come back", []step{
			{0, "put a 1", "joined a"}, {0, "put w 1", "joined w"}, {30000, "put w 2", "renewed w"}, {30100, "tick", ""},
			{30500, "put w 3", "renewed w"}, {31000, "put a 2", "renewed a"}, {31500, "tick", ""},
		}},
		{"who does not come back after silence is lost", []step{
			{0, "put a 1", "joined a"}, {0, "put w 1", "joined w"}, {10000, "put w 2", "renewed w"},
			{16400, "beats", ""}, {16400, "put w 3", "renewed w"}, {16500, "tick", ""}, {16501, "tick", "lost a"},
		}},
		{"a new process under the name joins", []step{{0, "put a 7", "joined a"}, {500, "put2 a 1", "joined a"}}},
		{"an old value that is told again renews nothing", []step{
			{0, "put a 1", "joined a"}, {0, "put w 1", "joined w"}, {600, "put w 2", "renewed w"}, {1200, "put w 3", "renewed w"},
			{1501, "tick", "lost a"}, {1502, "put a 1", ""}, {1503, "tick", ""},
		}},
		{"of two processes that have one name the same one stays, whoever came first", []step{
			{0, "put2 a 1", "joined a"}, {100, "put a 1", "joined a"}, {500, "put2 a 2", "joined a"}, {600, "put a 2", "contested a"},
			{1000, "put2 a 3", "renewed a"}, {1100, "put a 3", ""}, {1500, "put2 a 4", "renewed a"},
		}},
		{"the other one has the name when that one is gone", []step{
			{0, "put a 1", "joined a"}, {100, "put2 a 1", "joined a"}, {500, "put a 2", "contested a"}, {1000, "put a 3", ""},
			{1500, "put a 4", ""}, {1601, "tick", "lost a"}, {2000, "put a 5", "joined a"}, {2500, "put a 6", "renewed a"},
		}},
		{"one that drains gives the name to its successor", []step{
			{0, "put2 a 1", "joined a"}, {400, "drain2 a 2", "changed a"}, {500, "put a 1", "joined a"}, {900, "drain2 a 3", "contested a"},
			{1000, "put a 2", "renewed a"}, {1400, "drain2 a 4", ""}, {1400, "del a", ""}, {1500, "put a 3", "renewed a"},
			{1900, "put a 4", "renewed a"}, {2000, "del a", "left a"},
		}},
		{"one that takes a name in vain takes nobody along when it leaves", []step{
			{0, "put2 a 1", "joined a"}, {100, "put a 1", "joined a"}, {500, "put2 a 2", "joined a"}, {600, "put a 2", "contested a"},
			{700, "del a", ""}, {1000, "put2 a 3", "renewed a"}, {1100, "put a 3", "contested a"},
		}},
		{"deleting what is not known is nothing", []step{{0, "del a", ""}}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { play(t, c.steps) })
	}
}

func play(t *testing.T, steps []step) {
	t.Helper()
	start := time.Unix(1000, 0)
	m := newMembers(start)
	for _, s := range steps {
		now := start.Add(time.Duration(s.atMS) * time.Millisecond)
		if got := eventsOf(t, m, s.do, now); got != s.want {
			t.Fatalf("at %d ms, %s: events %q, want %q", s.atMS, s.do, got, s.want)
		}
	}
}

func eventsOf(t *testing.T, m *members, do string, now time.Time) string {
	t.Helper()
	var verb, name string
	var seq int64
	fmt.Sscan(do, &verb, &name, &seq)
	info := Info{Name: name, Role: RoleGen, URL: "http://h:1", State: Ready, Seq: seq, ClockID: clock.MakeID(1, 1)}
	var got []string
	add := func(ev Event, ok bool) {
		if ok {
			got = append(got, string(ev.Kind)+" "+ev.Info.Name)
		}
	}
	switch verb {
	case "put":
		add(m.put(name, info, now))
	case "put2":
		info.ClockID = clock.MakeID(1, 2)
		add(m.put(name, info, now))
	case "drain", "drain2":
		info.State = Draining
		if verb == "drain2" {
			info.ClockID = clock.MakeID(1, 2)
		}
		add(m.put(name, info, now))
	case "del":
		add(m.remove(name, now))
	case "beats":
		for at := m.heard; at.Before(now); {
			at = at.Add(RenewEvery)
			m.hear(at)
		}
	case "tick":
		for _, ev := range m.expire(now) {
			add(ev, true)
		}
	default:
		t.Fatalf("unknown step %q", do)
	}
	return strings.Join(got, ", ")
}

func TestTheDeadAreForgottenAfterAMinute(t *testing.T) {
	now := time.Unix(1000, 0)
	m := newMembers(now)
	m.put("a", Info{Name: "a", Seq: 1}, now)
	for range 122 { // somebody else keeps the bus alive
		now = now.Add(500 * time.Millisecond)
		m.hear(now)
		m.expire(now)
	}
	if n := len(m.list()); n != 0 {
		t.Errorf("%d entries left, want none", n)
	}
}

func TestListIsSortedByRoleAndName(t *testing.T) {
	now := time.Unix(1000, 0)
	m := newMembers(now)
	for _, i := range []Info{{Name: "b", Role: RoleGen}, {Name: "a", Role: RoleGen}, {Name: "z", Role: RoleCtx}} {
		m.put(Key(i.Role, i.Name), i, now)
	}
	var names []string
	for _, e := range m.list() {
		names = append(names, e.Info.Name)
	}
	if got := strings.Join(names, ""); got != "zab" {
		t.Errorf("order %q, want zab", got)
	}
}
