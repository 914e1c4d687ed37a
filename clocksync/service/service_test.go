package service

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
)

const patience = time.Minute

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func startNATS(t testing.TB) *bus.Embedded {
	t.Helper()
	return startNATSAt(t, "127.0.0.1:0")
}

func startNATSAt(t testing.TB, listen string) *bus.Embedded {
	t.Helper()
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: listen, StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func connect(t testing.TB, e *bus.Embedded) *bus.Conn {
	t.Helper()
	c, err := bus.Connect(t.Context(), bus.Options{URL: e.URL(), Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if err := c.Ready(within(t)); err != nil {
		t.Fatal(err)
	}
	return c
}

// background runs f until the test ends or stop is called.
func background(t testing.TB, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// process is a router or a node as far as clocks are concerned.
type process struct {
	steady   *clock.Steady
	adjusted *clock.Adjusted
	info     node.Info
}

func startProcess(t testing.TB, c *bus.Conn, r node.Role, name string, o clock.Options) *process {
	t.Helper()
	s, err := clock.New(o)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{steady: s, adjusted: clock.NewAdjusted(s)}
	web := httptest.NewServer(clock.OffsetHandler(s, p.adjusted))
	t.Cleanup(web.Close)
	resp, err := respond.Listen("127.0.0.1:0", s, respond.Options{})
	if err != nil {
		t.Fatal(err)
	}
	background(t, resp.Serve)
	p.info = node.Info{Name: name, Role: r, URL: web.URL, ClockAddr: resp.Advertised("127.0.0.1"), ClockID: s.ID(), State: node.Ready, Version: "test"}
	l, err := node.Register(t.Context(), c, func() node.Info { return p.info }, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return p
}

func startService(t testing.TB, e *bus.Embedded, name string, ws ...Worker) (*Service, func()) {
	t.Helper()
	c := connect(t, e)
	log := slog.New(slog.DiscardHandler)
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	reg := node.NewRegistry(c, log, nil)
	svc := New(Options{Name: name, Steady: s, Conn: c, Registry: reg, Workers: ws, Logger: log})
	stop := background(t, svc.Run)
	stopReg := background(t, reg.Run)
	return svc, func() { stop(); stopReg() }
}

// published waits for a value of a pair that is as wanted.
func published(t testing.TB, c *bus.Conn, router, nodeName string, want func(clock.Published) bool) clock.Published {
	t.Helper()
	return watch(t, c, router, nodeName)(want)
}

// watch has every value of a pair from now on told to who waits for one that is as wanted, once.
func watch(t testing.TB, c *bus.Conn, router, nodeName string) (wait func(want func(clock.Published) bool) clock.Published) {
	t.Helper()
	ctx := within(t)
	kv, err := c.KV(ctx, bus.BucketClocks)
	for ; err != nil && ctx.Err() == nil; kv, err = c.KV(ctx, bus.BucketClocks) {
		time.Sleep(10 * time.Millisecond) // it was deleted, and comes back
	}
	if err != nil {
		t.Fatal(err)
	}
	w, err := kv.Watch(ctx, ClockKey(router, nodeName))
	if err != nil {
		t.Fatal(err)
	}
	return func(want func(clock.Published) bool) clock.Published {
		t.Helper()
		defer w.Stop()
		for {
			select {
			case u := <-w.Updates():
				if u == nil {
					continue
				}
				p, err := clock.ParsePublished(u.Value())
				if err == nil && want(p) {
					return p
				}
			case <-ctx.Done():
				t.Fatalf("nothing published for %s and %s that is as wanted", router, nodeName)
			}
		}
	}
}

func usable(p clock.Published) bool { return p.Usable() }

// covers checks a published estimate against the truth, which a process that holds both clocks can read.
func covers(t testing.TB, e clock.Estimate, ref, local *clock.Steady) {
	t.Helper()
	l0 := local.Now()
	r := ref.Now()
	l1 := local.Now()
	got, bound, ok := e.Convert(l0 + (l1-l0)/2)
	slack := (l1-l0)/2 + ref.AnchorErrNS() + local.AnchorErrNS()
	if d := got - r; !ok || d > bound+slack || -d > bound+slack {
		t.Errorf("converted to %d ± %d (%v), the truth is %d ± %d: %+v", got, bound, ok, r, slack, e)
	}
}

func TestEstimatesOfNodesAgainstRoutersArePublishedAndPushed(t *testing.T) {
	nats := startNATS(t)
	c := connect(t, nats)
	router := startProcess(t, c, node.RoleRouter, "r0", clock.Options{FaultSkewPPM: -30})
	skewed := startProcess(t, c, node.RoleGen, "gen 0", clock.Options{FaultSkewPPM: 70})
	same := startProcess(t, c, node.RoleCtx, "ctx-0", clock.Options{})
	svc, _ := startService(t, nats, "cs")

	p := published(t, c, "r0", "gen 0", usable)
	covers(t, p.Estimate, router.steady, skewed.steady)
	if p.Via != "cs" || p.Router != "r0" || p.Node != "gen 0" || p.Reference != router.steady.ID() || p.Local != skewed.steady.ID() {
		t.Errorf("published %+v", p)
	}
	p = published(t, c, "r0", "ctx-0", usable)
	covers(t, p.Estimate, router.steady, same.steady)

	limit := within(t)
	for skewed.adjusted.State().Accepted == 0 && limit.Err() == nil {
		published(t, c, "r0", "gen 0", usable)
	}
	st := skewed.adjusted.State()
	before := router.steady.Now()
	n := skewed.steady.Now()
	after := router.steady.Now()
	off, ok := skewed.adjusted.Offset(n)
	if !ok || st.BoundNS == nil || st.Epoch != skewed.steady.ID().Epoch() || st.Reference != router.steady.ID() {
		t.Fatalf("pushed state %+v", st)
	}
	slack := *st.BoundNS + 1e7 // what it was at the push, and what the offset has drifted since
	if at := n + off; at < before-slack || at > after+slack {
		t.Errorf("the node puts its stamp at %d, it was taken between %d and %d of the router's clock", at, before, after)
	}

	rows := svc.Rows()
	if len(rows) != 5 || rows[0].Node != "ctx-0" || rows[0].Reference != "r0" || rows[0].BoundNS == nil || rows[2].Reference != "cs" {
		b, _ := json.MarshalIndent(rows, "", " ")
		t.Errorf("rows %s", b)
	}
}

func TestProcessesOfOneKernelGetTheIdentity(t *testing.T) {
	nats := startNATS(t)
	c := connect(t, nats)
	router := startProcess(t, c, node.RoleRouter, "r0", clock.Options{})
	gen := startProcess(t, c, node.RoleGen, "gen-0", clock.Options{})
	startService(t, nats, "cs")
	p := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.State == clock.Identity }) // measured, where the proof is late
	want := router.steady.AnchorErrNS() + gen.steady.AnchorErrNS()
	if p.OffsetNS != 0 || p.BoundNS() != want || want <= 0 {
		t.Errorf("published %+v, want offset 0 ± %d", p, want)
	}
}

func TestAForeignWorkerGetsSecondsAlone(t *testing.T) {
	nats := startNATS(t)
	c := connect(t, nats)
	startProcess(t, c, node.RoleRouter, "r0", clock.Options{})
	worker, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	bodies := make(chan map[string]any, 100)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t2 := worker.Now() + 5e9
		if r.Method == http.MethodPost {
			var b map[string]any
			if err := json.NewDecoder(r.Body).Decode(&b); err == nil {
				bodies <- b
			}
			return
		}
		_, _ = fmt.Fprintf(w, `{"receive_ts": %s, "transmit_ts": %s}`, clock.AppendSeconds(nil, t2), clock.AppendSeconds(nil, worker.Now()+5e9))
	}))
	t.Cleanup(web.Close)
	startService(t, nats, "cs", Worker{"trt", web.URL})
	for limit := within(t); ; {
		select {
		case b := <-bodies:
			off, ok := b["offset"].(float64)
			if !ok || len(b) != 1 {
				t.Fatalf("pushed %v, want an offset alone", b)
			}
			if off > -5.01 && off < -4.99 { // what is known of it when no answer was quick errs by more
				return
			}
		case <-limit.Done():
			t.Fatal("no offset of about -5 s was pushed")
		}
	}
}

func TestAnotherDaemonTakesOverWithinFiveSeconds(t *testing.T) {
	nats := startNATS(t)
	c := connect(t, nats)
	startProcess(t, c, node.RoleRouter, "r0", clock.Options{FaultSkewPPM: 1})
	gen := startProcess(t, c, node.RoleGen, "gen-0", clock.Options{FaultSkewPPM: 9})
	_, stopA := startService(t, nats, "a")
	published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.By == "a" })
	startService(t, nats, "b")
	seq := gen.adjusted.State().Seq
	stopA()
	p := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.By == "b" })
	if p.By != "b" {
		t.Errorf("published %+v", p)
	}
	limit := within(t)
	for gen.adjusted.State().Seq <= seq && limit.Err() == nil {
		published(t, c, "r0", "gen-0", usable)
	}
	if got := gen.adjusted.State(); got.Seq <= seq || got.Refused > 0 {
		t.Errorf("the successor's pushes: %+v after seq %d", got, seq)
	}
}

func TestARestartedDaemonGoesOnWhereTheOldOneStopped(t *testing.T) {
	nats := startNATS(t)
	c := connect(t, nats)
	router := startProcess(t, c, node.RoleRouter, "r0", clock.Options{FaultSkewPPM: 3})
	gen := startProcess(t, c, node.RoleGen, "gen-0", clock.Options{FaultSkewPPM: 9})
	_, stop := startService(t, nats, "cs")
	published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.Seq >= 4 })
	stop()
	for router, least := range map[string]int{"r0": 1, "": 1} {
		es, err := ReadLog(within(t), c, "gen-0", router, time.Minute)
		if err != nil || len(es) < least || es[0].Seq > es[len(es)-1].Seq {
			t.Errorf("log against %q: %d estimates, %v", router, len(es), err)
		}
	}
	first := watch(t, c, "r0", "gen-0") // before the daemon is there: its first values have successors soon
	svc, _ := startService(t, nats, "cs")
	p := first(func(p clock.Published) bool { return p.Usable() && p.Seq < 4 })
	covers(t, p.Estimate, router.steady, gen.steady)
	for _, st := range svc.tracker.Statuses() {
		if st.Stats.Restored < 1 {
			t.Errorf("%s: %d bursts restored", st.Peer.Name, st.Stats.Restored)
		}
	}
}

// TestNamesakesDoNotSpoilTheScrape: two samples with the same labels would cost all others.
func TestNamesakesDoNotSpoilTheScrape(t *testing.T) {
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	svc := New(Options{Name: "cs", Steady: s, Logger: slog.New(slog.DiscardHandler), Workers: []Worker{{Name: "a", URL: "http://127.0.0.1:1"}}})
	reg := prometheus.NewRegistry()
	if err := svc.Register(reg); err != nil {
		t.Fatal(err)
	}
	var entries []node.Entry
	for _, role := range []node.Role{node.RoleCtx, node.RoleGen, node.RoleRouter} {
		entries = append(entries, node.Entry{Info: node.Info{Role: role, Name: "a", URL: "http://127.0.0.1:1"}})
	}
	svc.tracker.SetPeers(svc.peers(entries))
	background(t, svc.tracker.Run)
	for limit := within(t); len(svc.tracker.Statuses()) < 4; {
		if pause(limit) != nil {
			t.Fatal("the peers are not followed")
		}
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Millisecond):
		return nil
	}
}
