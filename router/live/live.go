// Package live owns what nodes and routers tell each other over NATS while they run: loads and KV events of nodes go to the
// pool and the prefix index, and what this router has reserved goes to the others, theirs to the pool. Nothing of it is
// kept by a stream: every kind repairs itself, loads and reservations by the next message, KV events by a snapshot from
// the node (GET /kv_blocks).
//
// One goroutine (Run) takes all messages, in the order in which they come; snapshots are fetched beside it.
package live

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"meridian.internal/router/pool"
	"meridian.internal/router/prefix"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
)

// Options of a Listener. All but Logger are needed.
type Options struct {
	Router string        // name of this router
	Epoch  func() string // clock id of this process
	Conn   *bus.Conn
	Pool   *pool.Pool
	Index  *prefix.Index
	Client *http.Client // for snapshots
	Logger *slog.Logger
}

// Listener takes and sends messages. Its fields are owned by Run.
type Listener struct {
	o       Options
	own     string // subject of what this router has reserved
	twin    string // epoch of another router with the name of this one, the last that was heard
	seq     int64
	told    time.Time // when everything reserved was told last
	fetches map[prefix.Slot]*fetch
	fetched chan result
	running sync.WaitGroup
}

// fetch is a snapshot that is needed.
type fetch struct {
	busy     bool
	failures int
	next     time.Time
}

type result struct {
	slot prefix.Slot
	url  string
	snap kvevent.Snapshot
	err  error
}

const (
	inputs      = 8192 // messages that wait; more are dropped by the client, which is a gap like any other
	maxSnapshot = 256 << 20
	snapTimeout = 10 * time.Second
	maxFetches  = 4
	retryMin    = 200 * time.Millisecond
	retryMax    = 10 * time.Second
	shareGap    = 2 * time.Millisecond // changes within it are told together
)

// New makes a listener.
func New(o Options) *Listener {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Listener{o: o, own: bus.ReserveSubject(o.Router), fetches: map[prefix.Slot]*fetch{}, fetched: make(chan result, maxFetches)}
}

// Run listens until ctx ends.
func (l *Listener) Run(ctx context.Context) error {
	in := make(chan *nats.Msg, inputs)
	for _, subject := range []string{bus.SubjectKV, bus.SubjectLoad, bus.SubjectReserve} {
		sub, err := l.o.Conn.NATS().ChanSubscribe(subject, in)
		if err != nil {
			return fmt.Errorf("listen to %s: %w", subject, err)
		}
		defer sub.Unsubscribe() //nolint:errcheck // the connection may be gone already
	}
	defer l.running.Wait()
	fetching, stop := context.WithCancel(ctx)
	defer stop()
	tick := time.NewTicker(retryMin)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-in:
			l.take(m)
		case <-l.o.Pool.News():
			l.share(time.Now(), false)
			select { // others that change meanwhile go with the next message
			case <-ctx.Done():
			case <-time.After(shareGap):
			}
		case r := <-l.fetched:
			l.reset(r)
		case now := <-tick.C:
			l.share(now, now.Sub(l.told) >= pool.ShareEvery)
			l.fetch(fetching, now)
		}
	}
}

func (l *Listener) take(m *nats.Msg) {
	var err error
	switch {
	case under(m.Subject, bus.SubjectLoad):
		err = l.load(m.Data)
	case under(m.Subject, bus.SubjectKV):
		err = l.events(m)
	case !l.mine(m): // what it told itself comes back
		err = l.others(m.Data)
	}
	if err != nil {
		l.o.Logger.Warn("ignoring a message", "subject", m.Subject, "error", err)
	}
}

// under tells whether a subject is one of a pattern that ends with a star.
func under(subject, pattern string) bool {
	n := len(pattern) - 1
	return len(subject) > n && subject[:n] == pattern[:n]
}

func (l *Listener) load(data []byte) error {
	r, err := node.ParseReport(data)
	if err != nil {
		return err
	}
	if !l.o.Pool.Report(r) {
		return nil // of another process with the name, or late
	}
	if slot, _, ok := l.o.Pool.Slot(r.Role, r.Name); ok && r.KVEpoch != 0 && !l.o.Index.Heard(slot, r.KVEpoch, r.KVSeq) {
		l.need(slot)
	}
	return nil
}

func (l *Listener) events(m *nats.Msg) error {
	events, err := kvevent.ParseList(m.Data)
	if err != nil {
		return err
	}
	name, ok := bus.Name(m.Subject[len(bus.SubjectKV)-1:])
	if !ok {
		return fmt.Errorf("subject %q names no node", m.Subject)
	}
	if slot, _, ok := l.o.Pool.Slot(node.Role(m.Header.Get(bus.HeaderRole)), name); ok && !l.o.Index.Apply(slot, events) {
		l.need(slot)
	}
	return nil
}

// mine tells whether this process told a message. Its name alone does not show it.
func (l *Listener) mine(m *nats.Msg) bool {
	return m.Subject == l.own && bytes.Contains(m.Data, []byte(`"epoch":"`+l.o.Epoch()+`"`))
}

func (l *Listener) others(data []byte) error {
	s, err := pool.ParseShare(data)
	if err != nil {
		return err
	}
	l.o.Pool.Others(s)
	if s.Router == l.o.Router && s.Epoch != l.twin {
		l.twin = s.Epoch
		l.o.Logger.Error("another router has the same --name: each needs one of its own, or a request has two lines, either of which may lack records",
			"name", s.Router, "its_epoch", s.Epoch)
	}
	return nil
}

// share tells others what this router has reserved: everything, or what has changed.
func (l *Listener) share(now time.Time, full bool) {
	if !l.o.Conn.Connected() {
		return
	}
	s := pool.Share{Router: l.o.Router, Epoch: l.o.Epoch(), Full: full, Nodes: l.o.Pool.Reserved(full)}
	if !full && len(s.Nodes) == 0 {
		return
	}
	l.seq++
	s.Seq = l.seq
	data, err := json.Marshal(s)
	if err == nil {
		err = l.o.Conn.NATS().Publish(l.own, data)
	}
	if err != nil {
		return // the next full message says it all
	}
	if full {
		l.told = now
	}
}

func (l *Listener) need(s prefix.Slot) {
	if l.fetches[s] == nil {
		l.fetches[s] = &fetch{}
	}
}

// fetch starts the snapshots that are due.
func (l *Listener) fetch(ctx context.Context, now time.Time) {
	busy := 0
	for _, f := range l.fetches {
		if f.busy {
			busy++
		}
	}
	for slot, f := range l.fetches {
		url, ok := l.o.Pool.URLOf(slot)
		switch {
		case !ok && !f.busy:
			delete(l.fetches, slot) // the node is gone
		case ok && !f.busy && busy < maxFetches && !now.Before(f.next):
			f.busy = true
			busy++
			l.running.Go(func() {
				snap, err := l.get(ctx, url)
				select {
				case l.fetched <- result{slot, url, snap, err}:
				case <-ctx.Done():
				}
			})
		}
	}
}

func (l *Listener) get(ctx context.Context, url string) (kvevent.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, snapTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/kv_blocks", http.NoBody)
	if err != nil {
		return kvevent.Snapshot{}, err
	}
	res, err := l.o.Client.Do(req)
	if err != nil {
		return kvevent.Snapshot{}, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxSnapshot))
	if err != nil {
		return kvevent.Snapshot{}, fmt.Errorf("read KV blocks of %s: %w", url, err)
	}
	if res.StatusCode != http.StatusOK {
		return kvevent.Snapshot{}, fmt.Errorf("KV blocks of %s: status %d", url, res.StatusCode)
	}
	return kvevent.ParseSnapshot(body)
}

// reset takes a snapshot in. One that failed, or is too old already, is fetched again, later each time.
func (l *Listener) reset(r result) {
	f := l.fetches[r.slot]
	if f == nil {
		return
	}
	f.busy = false
	if url, ok := l.o.Pool.URLOf(r.slot); !ok || url != r.url {
		delete(l.fetches, r.slot) // another node has the slot now
		return
	}
	if r.err == nil && l.o.Index.Reset(r.slot, r.snap) {
		delete(l.fetches, r.slot)
		return
	}
	if r.err != nil && f.failures == 0 {
		l.o.Logger.Warn("a node's KV blocks could not be fetched; its cached prefixes are not known", "error", r.err)
	}
	f.next = time.Now().Add(min(retryMin<<min(f.failures, 6), retryMax))
	f.failures++
}
