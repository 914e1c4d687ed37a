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

// registered keeps the registration of a router until the test ends.
func registered(ctx context.Context, t *testing.T, conn *bus.Conn, router string) {
	t.Helper()
	nodes, err := conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		t.Fatal(err)
	}
	put := func() error {
		_, err := nodes.Put(ctx, "router."+router, []byte("{}"))
		return err
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	until, end := context.WithCancel(ctx)
	ended := make(chan struct{})
	t.Cleanup(func() { end(); <-ended })
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second) // a registration that is not renewed is forgotten
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = put() // the next one comes soon
			case <-until.Done():
				return
			}
		}
	}()
}

func TestRecordsOfARouterThatIsGoneAreAdoptedByOneRouter(t *testing.T) {
	ctx, conn := stream(t)
	consumerOf(ctx, t, conn, "gone")
	consumerOf(ctx, t, conn, "alive")
	registered(ctx, t, conn, "alive")
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
		c, err := New(Options{Router: name, Dir: dir, Conn: conn, Logger: quiet, Grace: time.Minute, AdoptLook: 20 * time.Millisecond, OnLine: func(l *timeline.Line) { lines <- l }})
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

// A router that is back waits for whoever has the lease on its records.
func TestAnAdoptionThatFailsGivesItsLeaseBack(t *testing.T) {
	ctx, conn := stream(t)
	c, err := New(Options{Router: "heir", Dir: t.TempDir(), Conn: conn, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	phases, err := conn.JetStream().Stream(ctx, bus.StreamPhases)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.adopt(ctx, phases, "gone"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Fatalf("a router without a consumer is adopted: %v", err)
	}
	leases, err := conn.KV(ctx, bus.BucketAdoptions)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := leases.Get(ctx, "gone"); !errors.Is(err, jetstream.ErrKeyNotFound) {
		t.Errorf("its lease: %v", err)
	}
}

// A router that is away for long, and has the record of a request in its spool, finds it written by its heir when it is back.
func TestARouterThatComesBackLateAmendsWhatItsHeirWrote(t *testing.T) {
	ctx, conn := stream(t)
	consumerOf(ctx, t, conn, "owner")
	publish := func(role phase.Role) {
		r := rec(role, "open")
		r.Router = "owner"
		if _, err := conn.JetStream().Publish(ctx, bus.PhaseSubject("owner", role, r.Node), phase.Append(nil, r)); err != nil {
			t.Fatal(err)
		}
	}
	written := make(chan *timeline.Line, 10)
	dirs := map[string]string{}
	start := func(name string) (stop func()) {
		dirs[name] = t.TempDir()
		c, err := New(Options{
			Router: name, Dir: dirs[name], Conn: conn, Logger: quiet, Grace: time.Millisecond, Flush: time.Millisecond, Orphan: 10 * time.Millisecond,
			AdoptLook: 20 * time.Millisecond, OnLine: func(l *timeline.Line) { written <- l },
		})
		if err != nil {
			t.Fatal(err)
		}
		c.Begin("another") // it is known which requests live
		run, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- c.Run(run) }()
		return func() {
			t.Helper()
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	next := func(what string) *timeline.Line {
		t.Helper()
		select {
		case l := <-written:
			return l
		case <-ctx.Done():
			t.Fatalf("no line of %s", what)
			return nil
		}
	}
	publish(phase.Ctx)
	stopHeir := start("heir")
	if l := next("the heir"); l.Amends || l.Complete || l.Router != "owner" {
		t.Fatalf("the heir wrote %+v", l)
	}
	stopHeir() // it is gone too, and another one is the heir of what comes late
	publish(phase.Gen)
	stopNext := start("next")
	if l := next("the next heir"); !l.Amends || l.Complete || len(l.Phases) != 2 {
		t.Fatalf("the next heir wrote %+v", l)
	}
	stopNext()
	publish(phase.Disagg) // from the spool of the owner
	stopOwner := start("owner")
	if l := next("the owner"); !l.Amends || !l.Complete {
		t.Errorf("the owner wrote a line with amends %v, complete %v, missing %v", l.Amends, l.Complete, l.Missing)
	}
	stopOwner()
	for name, want := range map[string]int{"heir": 1, "next": 0, "owner": 0} {
		n := 0
		for _, l := range readDir(dirs[name]) {
			if !l.Amends {
				n++
			}
		}
		if n != want {
			t.Errorf("%d lines in the files of %s, want %d", n, name, want)
		}
	}
}

// An heir that died after it wrote a line, and before it left a copy, leaves it when it is back.
func TestAnHeirThatDiedBetweenLineAndCopyLeavesTheCopyLater(t *testing.T) {
	ctx, conn := stream(t)
	consumerOf(ctx, t, conn, "owner")
	of := func(role phase.Role, id string) *phase.Record {
		r := rec(role, id)
		r.Router = "owner"
		return r
	}
	publish := func(list ...*phase.Record) {
		for _, r := range list {
			if _, err := conn.JetStream().Publish(ctx, bus.PhaseSubject("owner", r.Role, r.Node), phase.Append(nil, r)); err != nil {
				t.Fatal(err)
			}
		}
	}
	dirs := map[string]string{"heir": t.TempDir(), "owner": t.TempDir()}
	start := func(name string, conn *bus.Conn) (c *Collector, stop func()) {
		c, err := New(Options{
			Router: name, Dir: dirs[name], Conn: conn, Logger: quiet, Grace: time.Millisecond, Flush: time.Millisecond, Orphan: time.Millisecond, AdoptLook: 20 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		run, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- c.Run(run) }()
		return c, func() {
			t.Helper()
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	lines := func(name string, want ...string) {
		t.Helper()
		got := shape(readDir(dirs[name]))
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("the files of %s have %q, want %q", name, got, want)
		}
	}
	acknowledged := func() {
		t.Helper()
		for {
			cons, err := conn.JetStream().Consumer(ctx, bus.StreamPhases, consumerPrefix+"owner")
			if err != nil {
				t.Fatal(err)
			}
			if i := cons.CachedInfo(); i.NumPending+uint64(i.NumAckPending) == 0 {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	whole := []*phase.Record{of(phase.Disagg, "whole"), of(phase.Ctx, "whole"), of(phase.Gen, "whole")}
	c, stop := start("heir", nil) // it cannot tell anybody
	for _, r := range append(whole, of(phase.Ctx, "part")) {
		c.in <- message{rec: r}
	}
	for _, id := range []string{"part", "whole"} {
		for _, ok := c.Find(id); !ok; _, ok = c.Find(id) {
			time.Sleep(time.Millisecond)
		}
	}
	stop()
	lines("heir", "part -disagg", "whole complete")
	publish(append(whole, of(phase.Ctx, "part"))...)
	_, stop = start("heir", conn)
	acknowledged()
	stop()
	lines("heir", "part -disagg", "whole complete")
	publish(of(phase.Disagg, "whole"), of(phase.Disagg, "part"), of(phase.Gen, "part")) // from the spool of the owner
	_, stop = start("owner", conn)
	acknowledged()
	stop()
	lines("owner", "part amends -gen gen0 sub 0 attempt 0", "part complete amends")
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
	registered(ctx, t, conn, "owner")
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

func TestALineThatIsTooLargeToTellHoldsUpNoOther(t *testing.T) {
	ctx, conn := stream(t)
	c, err := New(Options{Router: "heir", Dir: t.TempDir(), Conn: conn, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	large, small := &fakeAck{dir: t.TempDir()}, &fakeAck{dir: t.TempDir()}
	c.bequests <- bequest{key: "gone.large", line: make([]byte, 2<<20), acks: []ack{large}}
	c.bequests <- bequest{key: "gone.small", line: []byte("{}"), acks: []ack{small}}
	close(c.bequests)
	told := make(chan struct{})
	go func() { c.tellBequests(ctx); close(told) }()
	select {
	case <-told:
	case <-ctx.Done():
		t.Fatal("one that cannot be told is tried for ever")
	}
	if large.seen() != 1 || small.seen() != 1 {
		t.Errorf("%d and %d acknowledgements, want one of each", large.seen(), small.seen())
	}
}
