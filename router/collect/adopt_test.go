package collect

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/phase"
)

// consumerOf makes the consumer that a router leaves behind when it dies.
func consumerOf(ctx context.Context, t *testing.T, conn *bus.Conn, router string) {
	t.Helper()
	_, err := conn.JetStream().CreateOrUpdateConsumer(ctx, bus.StreamPhases, jetstream.ConsumerConfig{
		Durable: consumerPrefix + bus.Token(router), FilterSubject: bus.RouterSubjects(router), AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// stream is a JetStream server of its own, for a minute at most.
func stream(t *testing.T) (context.Context, *bus.Conn) {
	t.Helper()
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	conn, err := bus.Connect(ctx, bus.Options{URL: e.URL(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if err := conn.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return ctx, conn
}

func TestRecordsOfARouterThatIsGoneAreAdoptedByOneRouter(t *testing.T) {
	ctx, conn := stream(t)
	consumerOf(ctx, t, conn, "gone")
	consumerOf(ctx, t, conn, "alive")
	nodes, err := conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nodes.Put(ctx, "router.alive", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	pub, err := bus.NewPublisher(conn, bus.PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	const requests = 20
	for i := range requests {
		for _, router := range []string{"gone", "alive"} {
			for _, role := range []phase.Role{phase.Disagg, phase.Ctx, phase.Gen} {
				r := rec(role, router+"-"+string(rune('a'+i)))
				r.Router = router
				if err := pub.Publish(r); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := pub.Close(ctx); err != nil {
		t.Fatal(err)
	}
	lines := make(chan *timeline.Line, 10*requests)
	var dirs []string
	done := make(chan error, 2)
	run, stop := context.WithCancel(ctx)
	for _, name := range []string{"r1", "r2"} {
		dir := t.TempDir()
		dirs = append(dirs, dir)
		c, err := New(Options{Router: name, Dir: dir, Conn: conn, Logger: quiet, AdoptLook: 20 * time.Millisecond, OnLine: func(l *timeline.Line) { lines <- l }})
		if err != nil {
			t.Fatal(err)
		}
		go func() { done <- c.Run(run) }()
	}
	for i := range requests {
		select {
		case l := <-lines:
			if l.Router == "alive" {
				t.Errorf("request %s of a router that is registered was taken", l.RequestID)
			}
		case <-ctx.Done():
			t.Fatalf("%d of %d requests were adopted", i, requests)
		}
	}
	stop()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	seen := map[string]int{}
	for _, dir := range dirs {
		for _, l := range readDir(dir) {
			if seen[l.RequestID]++; seen[l.RequestID] > 1 || !l.Complete {
				t.Errorf("request %s: %d lines, complete %v", l.RequestID, seen[l.RequestID], l.Complete)
			}
		}
	}
	if len(seen) != requests {
		t.Errorf("%d requests are on disk, want %d", len(seen), requests)
	}
}

func TestARouterThatComesBackWritesWhatItsHeirHasNot(t *testing.T) {
	ctx, conn := stream(t)
	consumerOf(ctx, t, conn, "owner")
	publish := func(roles ...phase.Role) {
		for _, role := range roles {
			r := rec(role, "open")
			r.Router = "owner"
			if _, err := conn.JetStream().Publish(ctx, bus.PhaseSubject("owner", role, r.Node), phase.Append(nil, r)); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish(phase.Ctx, phase.Gen) // the router died while the request ran: its own record is in its spool
	written := make(chan *timeline.Line, 10)
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 2)
	dirs := map[string]string{}
	start := func(name string) {
		dirs[name] = t.TempDir()
		c, err := New(Options{
			Router: name, Dir: dirs[name], Conn: conn, Logger: quiet, Grace: time.Millisecond, Flush: time.Millisecond, AdoptLook: 20 * time.Millisecond,
			OnLine: func(l *timeline.Line) { written <- l },
		})
		if err != nil {
			t.Fatal(err)
		}
		c.Begin("another") // it is known which requests live
		go func() { done <- c.Run(run) }()
	}
	start("heir")
	for pending := 0; pending < 2; {
		cons, err := conn.JetStream().Consumer(ctx, bus.StreamPhases, consumerPrefix+"owner")
		if err != nil {
			t.Fatal(err)
		}
		pending = cons.CachedInfo().NumAckPending
		select {
		case l := <-written:
			t.Fatalf("the heir wrote a line that lacks %v", l.Missing)
		default:
		}
	}
	nodes, err := conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nodes.Put(ctx, "router.owner", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	leases, err := conn.KV(ctx, bus.BucketAdoptions)
	if err != nil {
		t.Fatal(err)
	}
	for held := true; held; { // the heir sees that the owner is back
		_, err := leases.Get(ctx, "owner")
		if held = err == nil; err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			t.Fatal(err)
		}
	}
	select {
	case l := <-written:
		t.Fatalf("the heir wrote a line that lacks %v", l.Missing)
	default:
	}
	publish(phase.Disagg)
	start("owner")
	for complete := false; !complete; {
		select {
		case l := <-written:
			complete = l.Complete
		case <-ctx.Done():
			t.Fatal("no line is complete: the heir keeps the records")
		}
	}
	stop()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	n := 0
	for _, l := range slices.Concat(readDir(dirs["heir"]), readDir(dirs["owner"])) {
		if !l.Amends {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d lines of one request", n)
	}
}
