package live

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"meridian.internal/router/place"
	"meridian.internal/router/pool"
	"meridian.internal/router/prefix"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
)

// router is a pool with its listener on a bus.
type router struct {
	pool  *pool.Pool
	index *prefix.Index
}

func start(t *testing.T, e *bus.Embedded, name string) router {
	t.Helper()
	return startWith(t, e, name, nil)
}

func startWith(t *testing.T, e *bus.Embedded, name string, logger *slog.Logger) router {
	t.Helper()
	conn, err := bus.Connect(t.Context(), bus.Options{Server: e, Name: name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := router{index: prefix.New(0)}
	r.pool, err = pool.New(pool.Options{Now: steady.Now, Index: r.index, CtxPolicy: place.KVAware})
	if err != nil {
		t.Fatal(err)
	}
	l := New(Options{Router: name, Epoch: func() string { return string(steady.ID()) }, Conn: conn, Pool: r.pool, Index: r.index, Client: http.DefaultClient, Logger: logger})
	ended := make(chan error, 1)
	go func() { ended <- l.Run(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return r
}

func embedded(t *testing.T) *bus.Embedded {
	t.Helper()
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func info(role node.Role, name, url string) node.Info {
	return node.Info{
		Name: name, Role: role, URL: url, State: node.Ready, Seq: 1, ClockID: clock.MakeID(1, 1),
		Model: &node.Model{Name: "m", Hash: "h", TokensPerBlock: 4}, Load: &infer.Load{KVMaxBlocks: 100},
	}
}

// until waits for what comes over the bus.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	const patience = time.Minute
	for end := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %s still not: %s", patience, what)
		}
	}
}

// Two routers place at once on three generation nodes, and neither knows more of the other than what NATS carries.
func TestTwoRoutersOnOneBusDoNotOverloadANode(t *testing.T) {
	e := embedded(t)
	routers := []router{start(t, e, "a"), start(t, e, "b")}
	names := []string{"gen0", "gen1", "gen2"}
	for _, r := range routers {
		r.pool.Put(info(node.RoleCtx, "ctx0", "http://c"))
		for _, n := range names {
			r.pool.Put(info(node.RoleGen, n, "http://g"))
		}
	}
	others := func(r router) int {
		sum := 0
		for _, s := range r.pool.Snapshot() {
			if s.Info.Role == node.RoleGen {
				sum += s.OthersReserved
			}
		}
		return sum
	}
	count := map[string]int{}
	var held []*pool.Choice
	for i := range 30 {
		for k, r := range routers {
			other := routers[1-k]
			c, err := r.pool.Pick(pool.Ask{Model: "m", Tokens: 100})
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, c)
			count[c.Gen.Name]++
			until(t, "the other router knows of the reservation", func() bool { return others(other) == i+1 })
		}
	}
	for _, n := range names {
		if count[n] < 19 || count[n] > 21 {
			t.Errorf("%s got %d of 60 requests, want 20", n, count[n])
		}
	}
	for _, c := range held {
		c.Release()
	}
	until(t, "nothing is reserved any more", func() bool { return others(routers[0])+others(routers[1]) == 0 })
}

// Two routers of one name tell each other apart: each counts what the other has reserved, and says what is wrong.
func TestARouterOfTheSameNameIsAnotherRouter(t *testing.T) {
	e := embedded(t)
	said := make(chan string, 100)
	logger := slog.New(slog.NewTextHandler(lines(said), nil))
	routers := []router{startWith(t, e, "a", logger), start(t, e, "a")}
	for _, r := range routers {
		r.pool.Put(info(node.RoleGen, "gen0", "http://g"))
		r.pool.Put(info(node.RoleCtx, "ctx0", "http://c"))
	}
	c, err := routers[1].pool.Pick(pool.Ask{Model: "m", Tokens: 100})
	if err != nil {
		t.Fatal(err)
	}
	reserved := func() int {
		for _, s := range routers[0].pool.Snapshot() {
			if s.Info.Role == node.RoleGen {
				return s.OthersReserved
			}
		}
		return 0
	}
	until(t, "the reservation of the other one is counted", func() bool { return reserved() == 1 })
	if line := <-said; !strings.Contains(line, "level=ERROR") || !strings.Contains(line, "same --name") {
		t.Errorf("said %q", line)
	}
	c.Release()
	until(t, "the release is counted", func() bool { return reserved() == 0 })
	if len(said) > 0 {
		t.Errorf("and said %q", <-said)
	}
}

// lines sends what is logged.
type lines chan<- string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

func TestEventsReachTheIndexAndAGapIsRepairedByTheNode(t *testing.T) {
	e := embedded(t)
	cache := kvevent.NewLog(7)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/kv_blocks" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		_ = json.NewEncoder(w).Encode(cache.Snapshot())
	}))
	t.Cleanup(srv.Close)
	r := start(t, e, "a")
	r.pool.Put(info(node.RoleCtx, "c.0", srv.URL))
	conn, err := bus.Connect(t.Context(), bus.Options{Server: e, Name: "node"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	seq := int64(0)
	stored := func(h uint64) kvevent.Event {
		seq++
		ev := kvevent.Event{Seq: seq, Epoch: 7, Type: kvevent.Stored, Blocks: []kvevent.Block{{Hash: blockhash.Hash(h)}}}
		cache.Add(ev)
		return ev
	}
	tell := func(events ...kvevent.Event) {
		t.Helper()
		data, err := json.Marshal(events)
		if err != nil {
			t.Fatal(err)
		}
		m := &nats.Msg{Subject: bus.KVSubject("c.0"), Data: data, Header: nats.Header{bus.HeaderRole: {"ctx"}}}
		if err := conn.NATS().PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	load := int64(0)
	report := func(l infer.Load) {
		t.Helper()
		load++
		data, err := json.Marshal(node.Report{
			Role: node.RoleCtx, Name: "c.0", ClockID: clock.MakeID(1, 1), Seq: load, Load: l, KVEpoch: 7, KVSeq: seq,
		})
		if err == nil {
			err = conn.NATS().Publish(bus.LoadSubject("c.0"), data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	holds := func(n int) func() bool { return func() bool { return r.index.Stats().Blocks == n } }
	until(t, "the listener hears", func() bool {
		report(infer.Load{Running: 3})
		s := r.pool.Snapshot()
		return len(s) == 1 && s[0].Info.Load.Running == 3
	})
	tell(stored(1), stored(2))
	until(t, "two blocks are known", holds(2))
	stored(3) // its message is lost
	tell(stored(4))
	until(t, "a gap is repaired", func() bool { return holds(4)() && r.index.Stats().Behind == 0 })
	stored(5) // lost, and nothing follows but a report
	report(infer.Load{})
	until(t, "a lost last event is found by the report", func() bool { return holds(5)() && r.index.Stats().Behind == 0 })
	if g := r.index.Stats().Gaps; g != 2 {
		t.Errorf("%d gaps were counted, want 2", g)
	}
}

// Two processes have one name. The registry ignores one of them; its loads are ignored too, but not what they say of KV events.
func TestWhatATwinSaysOfItsCacheIsIgnoredToo(t *testing.T) {
	x := prefix.New(0)
	p, err := pool.New(pool.Options{Index: x, Now: func() int64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	l := New(Options{Pool: p, Index: x})
	p.Put(node.Info{Name: "gen0", Role: node.RoleGen, URL: "http://a:1", State: node.Ready, Seq: 1, ClockID: clock.MakeID(1, 2), Model: &node.Model{Name: "m", Hash: "h"}})
	say := func(instance uint32, epoch, seq int64) {
		b, _ := json.Marshal(node.Report{Role: node.RoleGen, Name: "gen0", ClockID: clock.MakeID(1, instance), Seq: seq, KVEpoch: epoch})
		if err := l.load(b); err != nil {
			t.Fatal(err)
		}
	}
	for i := range int64(10) {
		say(2, 100, i+1) // the one that is taken for gen0
		say(1, 200, i+1) // the ignored one
	}
	if st := x.Stats(); st.Gaps > 0 {
		t.Errorf("%d gaps after 10 reports of each; snapshots wanted: %d", st.Gaps, len(l.fetches))
	}
}
