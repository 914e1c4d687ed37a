package worker

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/nats-io/nats.go"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
)

// teller tells routers the load of the engine and which KV blocks it holds. It runs on a goroutine of its own, and the
// engine waits for none of it. What is lost on the way is found by its numbers.
type teller struct {
	d    *Daemon
	load func() infer.Load
	seq  int64
	told infer.Load
	at   time.Time
}

// maxEvents of one message: some 100 KB.
const maxEvents = 1000

// follow makes the log of the cache. Without a bus there is none, and nothing is told.
func (d *Daemon) follow() {
	if d.Bus == nil {
		return
	}
	d.cache = kvevent.NewLog(d.Steady.Now())
	d.server.Echo().GET("/kv_blocks", func(c echo.Context) error {
		return c.JSON(http.StatusOK, d.cache.Snapshot())
	})
}

// KVEvents is what the engine tells of its cache to, and the epoch of these events; nil without --nats.
func (d *Daemon) KVEvents() (func(kvevent.Event), int64) {
	if d.cache == nil {
		return nil, 0
	}
	return d.cache.Add, d.cache.Epoch()
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
	l := t.load()
	l.Iter = 0 // it changes with each step and says nothing of the load
	if l == t.told && now.Sub(t.at) < node.ReportEvery {
		return
	}
	if err := t.report(l); err == nil {
		t.told, t.at = l, now
	}
}

func (t *teller) events() error {
	for {
		events, left := t.d.cache.Take(nil, maxEvents)
		if len(events) == 0 {
			return nil
		}
		data, err := json.Marshal(events)
		if err != nil {
			return err
		}
		m := &nats.Msg{Subject: bus.KVSubject(t.d.Name), Data: data, Header: nats.Header{bus.HeaderRole: {string(t.d.role)}}}
		if err := t.d.Bus.NATS().PublishMsg(m); err != nil {
			return err
		}
		if left == 0 {
			return nil
		}
	}
}

func (t *teller) report(l infer.Load) error {
	t.seq++
	r := node.Report{
		Role: node.Role(t.d.role), Name: t.d.Name, ClockID: t.d.Steady.ID(), Seq: t.seq, Load: l, KVEpoch: t.d.cache.Epoch(), KVSeq: t.d.cache.Taken(),
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return t.d.Bus.NATS().Publish(bus.LoadSubject(t.d.Name), data)
}
