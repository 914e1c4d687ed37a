package node

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
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
func await(t *testing.T, ctx context.Context, events <-chan Event, kind EventKind, name string) {
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
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	ctx := within(t)
	here, there := connect(t, e), connect(t, e)
	events := make(chan Event, 1000)
	r := NewRegistry(here, quiet, func(ev Event) { events <- ev })
	run, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(run) }()

	register(t, here, RoleRouter, "router", 1)
	await(t, ctx, events, Joined, "router")
	leaving := register(t, there, RoleCtx, "leaving", 2)
	await(t, ctx, events, Joined, "leaving")
	await(t, ctx, events, Renewed, "leaving")
	leaving.Close()
	await(t, ctx, events, Left, "leaving")

	lost := register(t, there, RoleGen, "lost", 3)
	await(t, ctx, events, Joined, "lost")
	there.Close() // its renewals end without a word
	await(t, ctx, events, Lost, "lost")
	lost.Close()
	nodes := r.Nodes()
	if len(nodes) != 2 || nodes[0].Info.Name != "lost" || nodes[0].Alive || !nodes[1].Alive {
		t.Errorf("nodes %+v, want lost (dead) and router (alive)", nodes)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestRegisterRefusesABadRegistration(t *testing.T) {
	if _, err := Register(t.Context(), nil, func() Info { return Info{} }, quiet); err == nil {
		t.Error("no error")
	}
}
