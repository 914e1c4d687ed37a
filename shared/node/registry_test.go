package node

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

var quiet = slog.New(slog.DiscardHandler)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func connect(t *testing.T, e *bus.Embedded) *bus.Conn {
	t.Helper()
	c, err := bus.Connect(t.Context(), bus.Options{Server: e, Name: "test", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func embedded(t *testing.T) *bus.Embedded {
	t.Helper()
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// watch runs a registry until the test ends, and it must end well.
func watch(t *testing.T, c *bus.Conn) (*Registry, <-chan Event) {
	t.Helper()
	events := make(chan Event, 1000)
	r := NewRegistry(c, quiet, func(ev Event) { events <- ev })
	run, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(run) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return r, events
}

func register(t *testing.T, c *bus.Conn, role Role, name string, instance uint32) *Lease {
	t.Helper()
	info := Info{Name: name, Role: role, URL: "http://127.0.0.1:1", State: Ready, ClockID: clock.MakeID(1, instance)}
	l, err := Register(t.Context(), c, func() Info { return info }, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// await drops events until one of a kind for a name arrives.
func await(ctx context.Context, t *testing.T, events <-chan Event, kind EventKind, name string) {
	t.Helper()
	for {
		select {
		case ev := <-events:
			if ev.Kind == kind && ev.Info.Name == name {
				return
			}
		case <-ctx.Done():
			t.Fatalf("no event %s %s", kind, name)
		}
	}
}

func TestRegistrySeesJoinRenewalLeaveAndLoss(t *testing.T) {
	e, ctx := embedded(t), within(t)
	here, there := connect(t, e), connect(t, e)
	r, events := watch(t, here)

	register(t, here, RoleRouter, "router", 1)
	await(ctx, t, events, Joined, "router")
	leaving := register(t, there, RoleCtx, "leaving", 2)
	await(ctx, t, events, Joined, "leaving")
	await(ctx, t, events, Renewed, "leaving")
	leaving.Close()
	await(ctx, t, events, Left, "leaving")

	lost := register(t, there, RoleGen, "lost", 3)
	await(ctx, t, events, Joined, "lost")
	there.Close() // its renewals end without a word
	await(ctx, t, events, Lost, "lost")
	lost.Close()
	nodes := r.Nodes()
	if len(nodes) != 2 || nodes[0].Info.Name != "lost" || nodes[0].Alive || !nodes[1].Alive {
		t.Errorf("nodes %+v, want lost (dead) and router (alive)", nodes)
	}
}

func TestALeaseThatEndsWhileItIsRenewedIsTakenBack(t *testing.T) {
	e, ctx := embedded(t), within(t)
	conn := connect(t, e)
	_, events := watch(t, conn)
	for i := range 20 {
		l := register(t, conn, RoleGen, "brief", uint32(i+1))
		await(ctx, t, events, Joined, "brief")
		l.Changed() // a renewal is on its way
		await(ctx, t, events, Renewed, "brief")
		l.Close()
		for ev := (Event{}); ev.Kind != Left; {
			select {
			case ev = <-events:
				if ev.Kind == Lost {
					t.Fatalf("round %d: the entry ended with its lease", i)
				}
			case <-ctx.Done():
				t.Fatal("no end")
			}
		}
	}
}

func TestRegisterRefusesABadRegistration(t *testing.T) {
	if _, err := Register(t.Context(), nil, func() Info { return Info{} }, quiet); err == nil {
		t.Error("no error")
	}
}

func TestOneThatLeavesDoesNotTakeAlongWhoHasItsName(t *testing.T) {
	e, ctx := embedded(t), within(t)
	conn := connect(t, e)
	_, events := watch(t, conn)
	register(t, conn, RoleGen, "twin", 9) // of two that are ready, the higher instance has the name
	await(ctx, t, events, Joined, "twin")
	other := register(t, conn, RoleGen, "twin", 5)
	await(ctx, t, events, Joined, "twin") // it is taken for a successor
	await(ctx, t, events, Joined, "twin") // until the other renews
	other.Close()
	register(t, conn, RoleCtx, "mark", 1) // what is told after the end
	for marked := false; !marked; {
		select {
		case ev := <-events:
			if ev.Kind == Left || ev.Kind == Lost {
				t.Fatalf("%s %s", ev.Info.Name, ev.Kind)
			}
			marked = ev.Info.Name == "mark"
		case <-ctx.Done():
			t.Fatal("no mark")
		}
	}
}
