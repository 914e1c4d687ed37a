package worker

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/nats-io/nats.go"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

func TestLoadAndCacheAreToldOnChangeAndInOrder(t *testing.T) {
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	conn, err := bus.Connect(t.Context(), bus.Options{Server: e, Name: "t"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan *nats.Msg, 100)
	for _, s := range []string{bus.SubjectKV, bus.SubjectLoad} {
		if _, err := conn.NATS().ChanSubscribe(s, got); err != nil {
			t.Fatal(err)
		}
	}
	load := infer.Load{KVMaxBlocks: 9}
	d := &Daemon{Name: "g", Bus: conn, Steady: steady, role: phase.Gen, cache: kvevent.NewLog(7)}
	ranks := []infer.Load{{Iter: 1}}
	tell := &teller{d: d, engine: fakeLoads{&load, &ranks}}
	now := time.Unix(1, 0)
	report := func() node.Report {
		t.Helper()
		m := <-got
		r, err := node.ParseReport(m.Data)
		if err != nil || m.Subject != "meridian.load.g" {
			t.Fatalf("%s: %s, %v", m.Subject, m.Data, err)
		}
		return r
	}
	tell.tell(now)
	if r := report(); r.Seq != 1 || r.Role != node.RoleGen || r.Load != load || r.KVEpoch != 7 || r.KVSeq != 0 || r.ClockID != steady.ID() || r.Ranks != nil {
		t.Errorf("first report %+v", r)
	}
	d.cache.Add(kvevent.Event{Seq: 1, Epoch: 7, Type: kvevent.Stored, Blocks: []kvevent.Block{{Hash: 5}}})
	d.cache.Add(kvevent.Event{Seq: 2, Epoch: 7, Type: kvevent.Removed, Removed: []blockhash.Hash{5}})
	load.Iter = 100 // not a change
	tell.tell(now.Add(time.Millisecond))
	m := <-got
	events, err := kvevent.ParseList(m.Data)
	if err != nil || m.Subject != "meridian.kv.g" || m.Header.Get(bus.HeaderRole) != "gen" || len(events) != 2 || events[0].Epoch != 7 {
		t.Errorf("%s %v: %s, %v", m.Subject, m.Header, m.Data, err)
	}
	load.Running = 1
	tell.tell(now.Add(2 * time.Millisecond))
	if r := report(); r.Seq != 2 || r.Load.Running != 1 || r.KVSeq != 2 {
		t.Errorf("report of the change %+v", r)
	}
	tell.tell(now.Add(node.ReportEvery + time.Millisecond))
	tell.tell(now.Add(node.ReportEvery + 2*time.Millisecond))
	if r := report(); r.Seq != 3 || len(got) != 0 {
		t.Errorf("%+v, %d more: want one report after %v without a change", r, len(got), node.ReportEvery)
	}
	now = now.Add(node.ReportEvery + 2*time.Millisecond)
	ranks = []infer.Load{{Running: 1, Iter: 5}, {Iter: 5}}
	tell.tell(now)
	if r := report(); len(r.Ranks) != 2 || r.Ranks[0] != (infer.Load{Running: 1}) {
		t.Errorf("report of ranks %+v", r)
	}
	ranks = []infer.Load{{Iter: 6}, {Running: 1, Iter: 6}} // the sum stays
	tell.tell(now)
	ranks = []infer.Load{{Iter: 7}, {Running: 1, Iter: 7}}
	tell.tell(now)
	if r := report(); r.Seq != 5 || r.Ranks[1].Running != 1 || len(got) != 0 {
		t.Errorf("%+v, %d more: want a report when a rank has changed, and none for an iteration", r, len(got))
	}
}

// fakeLoads are what an engine says of its load.
type fakeLoads struct {
	load  *infer.Load
	ranks *[]infer.Load
}

func (f fakeLoads) Load() infer.Load    { return *f.load }
func (f fakeLoads) Loads() []infer.Load { return slices.Clone(*f.ranks) }

func TestCacheEventsAreReadWithACursor(t *testing.T) {
	d := &Daemon{Name: "g", cache: kvevent.NewLog(7)}
	for seq := int64(1); seq <= 5; seq++ {
		d.cache.Add(kvevent.Event{Seq: seq, Epoch: 7, Type: kvevent.Stored, Blocks: []kvevent.Block{{Hash: blockhash.Hash(seq), Tier: kvevent.Host, Tokens: []int32{int32(seq)}}}})
	}
	e := echo.New()
	e.GET("/kv_cache_events", d.kvCacheEvents)
	get := func(query, accept string) *httptest.ResponseRecorder {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/kv_cache_events"+query, http.NoBody)
		r.Header.Set("Accept", accept)
		e.ServeHTTP(w, r)
		return w
	}
	want := `{"epoch":7,"events":[{"event_id":4,"epoch":7,"data":{"type":"stored","blocks":[{"block_hash":4,"cache_level":1,"tokens":[4]}]}}],"next":4,"oldest":1,"newest":5,"dropped":0}`
	for range 2 { // nothing is taken away
		if w := get("?after=3&limit=1", ""); strings.TrimSpace(w.Body.String()) != want {
			t.Errorf("page %s\nwant %s", w.Body, want)
		}
	}
	if w := get("?after=9", ""); !strings.Contains(w.Body.String(), `"events":[],"next":9,"oldest":1,"newest":5`) {
		t.Errorf("cursor of another epoch: %s", w.Body)
	}
	if w := get("?after=-1", ""); w.Code == http.StatusOK {
		t.Errorf("after=-1: status %d", w.Code)
	}
	d.cache.Close()
	if w := get("?after=3", "text/event-stream"); !strings.HasPrefix(w.Body.String(), "id: 4\ndata: {\"event_id\":4") || !strings.Contains(w.Body.String(), "\n\nid: 5\n") {
		t.Errorf("stream %s", w.Body)
	}
}
