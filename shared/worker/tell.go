package worker

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/nats-io/nats.go"

	"meridian.internal/shared/api"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
	"meridian.internal/shared/sse"
)

// teller tells routers the load of the engine and which KV blocks it holds. It runs on a goroutine of its own, and the
// engine waits for none of it. What is lost on the way is found by its numbers.
type teller struct {
	d      *Daemon
	engine loads
	seq    int64
	sent   int64 // number of the last event that was sent, or lost
	told   infer.Load
	ranks  []infer.Load // told with it
	at     time.Time
}

type loads interface {
	Load() infer.Load
	Loads() []infer.Load
}

// maxEvents of one message: some 100 KB.
const maxEvents = 1000

// follow makes the log of the cache.
func (d *Daemon) follow() {
	d.cache = kvevent.NewLog(d.Steady.Now())
	d.server.Echo().GET("/kv_blocks", func(c echo.Context) error {
		return c.JSON(http.StatusOK, d.cache.Snapshot())
	})
	d.server.Echo().GET("/kv_cache_events", d.kvCacheEvents)
}

// KVEvents is what the engine tells of its cache to, and the epoch of these events.
func (d *Daemon) KVEvents() (func(kvevent.Event), int64) { return d.cache.Add, d.cache.Epoch() }

// kvCacheEvents answers with the events after a number, or follows them. It takes nothing away.
func (d *Daemon) kvCacheEvents(c echo.Context) error {
	after, err := api.Cursor(c.Request())
	if err != nil {
		return err
	}
	limit, err := api.QueryNumber(c.Request(), "limit", maxEvents)
	if err != nil {
		return err
	}
	if !sse.Wanted(c.Request()) {
		return c.JSON(http.StatusOK, d.cache.Read(after, int(min(limit, maxEvents))))
	}
	sse.Follow(c.Request().Context(), c.Response(), after, sse.Feed{
		Read: func(after int64, limit int) (events [][]byte, next, dropped int64) {
			p := d.cache.Read(after, limit)
			for i := range p.Events {
				b, _ := json.Marshal(p.Events[i]) // plain data: cannot fail
				events = append(events, b)
			}
			return events, p.Next, p.Dropped
		},
		Changed: d.cache.Changed, Closed: d.cache.Closed,
	})
	return nil
}

func (t *teller) run(ctx context.Context) error {
	tick := time.NewTicker(node.LookEvery)
	defer tick.Stop()
	for {
		t.tell(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// tell sends the new events, and then the load if it has changed or was not told for long. While NATS is away it waits: a
// snapshot closes the gap.
func (t *teller) tell(now time.Time) {
	if !t.d.Bus.Connected() {
		return
	}
	if err := t.events(); err != nil {
		t.at = time.Time{} // the events are lost: the next report tells the routers that there were more
	}
	l, ranks := t.engine.Load(), ofRanks(t.engine)
	l.Iter = 0 // it changes with each step and says nothing of the load
	for i := range ranks {
		ranks[i].Iter = 0
	}
	if l == t.told && slices.Equal(ranks, t.ranks) && now.Sub(t.at) < node.ReportEvery {
		return
	}
	if err := t.report(l, ranks); err == nil {
		t.told, t.ranks, t.at = l, ranks, now
	}
}

// ofRanks are the loads of the ranks, nil if there is one.
func ofRanks(e loads) []infer.Load {
	if list := e.Loads(); len(list) > 1 {
		return list
	}
	return nil
}

func (t *teller) events() error {
	for {
		p := t.d.cache.Read(t.sent, maxEvents)
		t.sent = p.Next // also of what was lost: receivers see the gap, and so they do if this message is lost
		if len(p.Events) == 0 {
			return nil
		}
		for i := range p.Events { // who asks a cache for a block names it by its hash
			if b := slices.Clone(p.Events[i].Blocks); len(b) > 0 {
				for j := range b {
					b[j].Tokens = nil
				}
				p.Events[i].Blocks = b
			}
		}
		data, err := json.Marshal(p.Events)
		if err != nil {
			return err
		}
		m := &nats.Msg{Subject: bus.KVSubject(t.d.Name), Data: data, Header: nats.Header{bus.HeaderRole: {string(t.d.role)}}}
		if err := t.d.Bus.NATS().PublishMsg(m); err != nil {
			return err
		}
	}
}

func (t *teller) report(l infer.Load, ranks []infer.Load) error {
	t.seq++
	r := node.Report{
		Role: node.Role(t.d.role), Name: t.d.Name, ClockID: t.d.Steady.ID(), Seq: t.seq, Load: l, Ranks: ranks, KVEpoch: t.d.cache.Epoch(), KVSeq: t.sent,
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return t.d.Bus.NATS().Publish(bus.LoadSubject(t.d.Name), data)
}
