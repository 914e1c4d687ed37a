package chaos

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/serve/servetest"
)

func natsServer(t *testing.T, listen, dir string) *bus.Embedded {
	t.Helper()
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: listen, StoreDir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestNATSDownServingGoesOnAndRecordsArriveLater(t *testing.T) {
	dir := t.TempDir()
	addr := servetest.Addr(t)
	e := natsServer(t, addr, dir)
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NATS: "nats://" + addr})
	r.ok(t, "before")
	e.Close()
	for i := range 5 {
		r.ok(t, fmt.Sprintf("while-%d", i))
	}
	r.pause(2500 * time.Millisecond) // longer than a lease and than the merge's grace
	r.ok(t, "later")
	e = natsServer(t, addr, dir)
	t.Cleanup(e.Close)
	r.ok(t, "again")
	for _, id := range []string{"before", "while-0", "while-4", "later", "again"} { // with what comes when NATS is back
		if l, err := r.client.Whole(r.ctx, id); err != nil || !l.Complete {
			t.Errorf("timeline of %s: %v, missing %v", id, err, l.Missing)
		}
	}
}

func TestARouterThatIsKilledComesBack(t *testing.T) {
	e := natsServer(t, "127.0.0.1:0", t.TempDir())
	t.Cleanup(e.Close)
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NATS: e.URL()})
	f := r.send("hurt", fields(100, 1500))
	f.begins(t)
	router := r.Routers[0]
	if err := router.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := f.wait(t); err == nil {
		t.Error("the request ended well without its router")
	}
	ended(t, router)
	if err := r.Restart(r.ctx, router); err != nil {
		t.Fatal(err)
	}
	r.idle(t) // the nodes saw the router go
	r.ok(t, "after")
	if l, err := r.client.Whole(r.ctx, "after"); err != nil || !l.Complete {
		t.Errorf("timeline after the restart: %v, missing %v", err, l.Missing)
	}
}

func TestClocksyncKilledUnderLoadIsNotMissed(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1})
	f := r.send("running", fields(100, 300))
	f.begins(t)
	if err := r.Clock.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := f.wait(t); err != nil {
		t.Error(err)
	}
	r.ok(t, "after")
	l, err := r.client.Whole(r.ctx, "after")
	if err != nil || !l.Complete || l.NegativeSpans > 0 {
		t.Errorf("timeline %+v, %v", l, err)
	}
	if err := r.Restart(r.ctx, r.Clock); err != nil {
		t.Error(err)
	}
}

func TestManyStreamsAtATime(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NodeArgs: []string{"--sim-step=1ms", "--sim-shallow"}})
	const streams, each = 32, 6
	errs := make(chan error, streams)
	for s := range streams {
		go func() {
			for i := range each {
				res, err := r.client.Do(r.ctx, client.Request{ID: fmt.Sprintf("many-%d-%d", s, i), Fields: fields(20+s*i, 5+s)})
				if err == nil && res.Usage.CompletionTokens != 5+s {
					err = fmt.Errorf("%d tokens, want %d", res.Usage.CompletionTokens, 5+s)
				}
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range streams {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for s := range streams {
		id := fmt.Sprintf("many-%d-%d", s, each-1)
		if l, err := r.client.Whole(r.ctx, id); err != nil || !l.Complete || l.NegativeSpans > 0 || len(l.Violations) > 0 {
			t.Errorf("timeline of %s: %+v, %v", id, l, err)
		}
	}
	r.idle(t)
}
