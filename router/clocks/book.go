// Package clocks owns what a router knows of the nodes' clocks against its own: it probes them itself, or takes the
// estimates that a clocksync publishes while one is registered. Either way every routed request tightens or contradicts
// what is known, and so do the messages between nodes that timelines tell of. It keeps the past, since a stamp is converted
// with the estimate of its own time. The arithmetic is in clocksync/track, clocksync/closure and shared/clock.
//
// Run's goroutine sets the peers; a second one, which Run waits for, reads the bucket of published estimates.
package clocks

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/track"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
)

// Options of a book.
type Options struct {
	Name      string // of this router
	Steady    *clock.Steady
	Conn      *bus.Conn           // nil: no NATS, so no clocksync
	Members   func() []node.Entry // the registry; nil without NATS
	Static    func() []node.Info  // nodes that are in no registry
	KernelDir string
	Key       []byte                                  // HMAC key of clock packets; nil: they are not signed
	Transport func(*http.Transport) http.RoundTripper // shows the cluster's credentials; nil: there are none
	Logger    *slog.Logger
}

const (
	lookEvery  = 200 * time.Millisecond
	watchRetry = time.Second
	keepPast   = 1024 // published estimates of one clock
	// handOver is how long this router goes on probing beside a clocksync, until that has published good estimates.
	handOver = 5 * time.Second
)

// Book answers what is known of a clock at a moment of its own time. Safe for concurrent use.
type Book struct {
	o       Options
	tracker *track.Tracker
	witness *witness
	hints   [track.HintContradicts + 1]atomic.Int64 // exchanges of routed requests, by what became of them

	mu   sync.Mutex                    // guards past; short reads and writes only
	past map[clock.ID][]clock.Estimate // by local clock, in the order of AtNS
}

// New makes a book; Run fills it.
func New(o Options) *Book {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Book{
		o: o, past: map[clock.ID][]clock.Estimate{},
		witness: newWitness(o.Logger),
		tracker: track.New(track.Options{Steady: o.Steady, KernelDir: o.KernelDir, Key: o.Key, Transport: o.Transport, Logger: o.Logger}),
	}
}

// Run probes and listens until ctx ends.
func (b *Book) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return b.tracker.Run(ctx) })
	if b.o.Conn != nil {
		g.Go(func() error { return b.listen(ctx) })
	}
	g.Go(func() error { return b.follow(ctx) })
	return g.Wait()
}

// follow keeps the peers equal to the members, and leaves the probing to a clocksync while there is one.
func (b *Book) follow(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var since time.Time // a clocksync is registered since
	for {
		peers, served := b.peers()
		switch {
		case !served:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) > handOver:
			b.leave(peers)
		}
		b.tracker.SetPeers(peers)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// peers lists the nodes; served tells whether a clocksync is registered.
func (b *Book) peers() (out []track.Peer, served bool) {
	add := func(i node.Info) {
		out = append(out, track.Peer{Name: node.Key(i.Role, i.Name), ClockAddr: i.ClockAddr, URL: i.URL, ClockID: i.ClockID})
	}
	if b.o.Members != nil {
		for _, e := range b.o.Members() {
			switch e.Info.Role {
			case node.RoleClocksync:
				served = served || e.Alive
			case node.RoleCtx, node.RoleGen:
				add(e.Info)
			}
		}
	}
	if b.o.Static != nil {
		for _, i := range b.o.Static() {
			add(i)
		}
	}
	return out, served
}

// leave leaves the probing of those peers to clocksync that it publishes good estimates of; others, such as those in no
// registry, stay ours.
func (b *Book) leave(peers []track.Peer) {
	for i := range peers {
		e, ok := b.fresh(peers[i].ClockID)
		peers[i].Passive = ok && e.Usable() && e.State != clock.Holdover
	}
}

const maxStamp = 1<<63 - 1

// Estimate returns what was known of the clock id when it showed localNS. It takes the tighter of what this router
// measured and what clocksync published.
func (b *Book) Estimate(id clock.ID, localNS int64) (clock.Estimate, bool) {
	own, ok := b.tracker.EstimateAt(id, localNS)
	pub, ok2 := b.published(id, localNS)
	switch {
	case !ok2:
		return own, ok
	case !ok, !own.Usable() && pub.Usable():
		return pub, true
	case pub.Usable() && pub.BoundAt(localNS) < own.BoundAt(localNS):
		return pub, true
	}
	return own, true
}

// Newest is what is known of a node's clock now, as /cluster shows it. A clock that the messages of requests prove wrong is
// shown as quarantined; its stamps are still converted, so that each timeline shows what contradicts, with both numbers.
func (b *Book) Newest(i node.Info) (clock.Estimate, bool) {
	own, ok := b.tracker.Newest(node.Key(i.Role, i.Name))
	pub, ok2 := b.fresh(i.ClockID)
	if !ok || ok2 && pub.Usable() && (!own.Usable() || pub.BoundNS() < own.BoundNS()) {
		own, ok = pub, ok2
	}
	if own.State == clock.Holdover && ok2 && pub.State == clock.Synced {
		own.State = clock.Synced // clocksync, who probes, knows how often is often enough
	}
	if ok && b.witness.proves(i.Name) {
		own.State = clock.Quarantined
	}
	return own, ok
}

// staleAfter is more than the longest interval between two bursts: a published estimate that is older has no successor.
const staleAfter = 15 * time.Second

// fresh is the newest published estimate as it is now: its bound has grown since, and without a successor it says so.
func (b *Book) fresh(id clock.ID) (clock.Estimate, bool) {
	e, ok := b.published(id, maxStamp)
	if !ok || !e.Usable() {
		return e, ok
	}
	now := b.o.Steady.Now() - e.OffsetNS // local time, near enough
	age := now - e.AtNS
	if age <= 0 {
		return e, true
	}
	grew, offset := e.BoundAt(now)-e.BoundNS(), e.OffsetAt(now)
	e.LowerNS += offset - e.OffsetNS - grew
	e.UpperNS += offset - e.OffsetNS + grew
	e.OffsetNS, e.AtNS = offset, now
	switch {
	case e.VoidAfterNS != 0 && now > e.VoidAfterNS:
		e.State = clock.Void
	case age > int64(staleAfter) && e.State == clock.Synced:
		e.State = clock.Holdover
	}
	return e, true
}

// Exchange takes a routed request as a clock exchange with a node, named by its key. It is held against what is known and
// may tighten it; it never moves a point.
func (b *Book) Exchange(key string, id clock.ID, x ntp.Exchange) {
	b.hints[b.tracker.Hint(key, id, x)].Add(1)
}

// Line takes the messages that a timeline tells of. Call it from one goroutine.
func (b *Book) Line(l *timeline.Line) { b.witness.add(l, time.Now()) }

// published finds the newest estimate that was made by localNS, else the first after it.
func (b *Book) published(id clock.ID, localNS int64) (clock.Estimate, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	past := b.past[id]
	if len(past) == 0 {
		return clock.Estimate{}, false
	}
	i := sort.Search(len(past), func(i int) bool { return past[i].AtNS > localNS })
	return past[max(i-1, 0)], true
}

// listen follows the bucket of published estimates.
func (b *Book) listen(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := b.watch(ctx); err != nil && ctx.Err() == nil {
			b.o.Logger.Debug("watch of published clock estimates ended; trying again", "error", err)
		}
		t := time.NewTimer(watchRetry)
		select {
		case <-ctx.Done():
			t.Stop()
		case <-t.C:
		}
	}
	return nil
}

func (b *Book) watch(ctx context.Context) error {
	if err := b.o.Conn.Ready(ctx); err != nil {
		return err
	}
	kv, err := b.o.Conn.KV(ctx, bus.BucketClocks)
	if err != nil {
		return err
	}
	w, err := kv.Watch(ctx, bus.Token(b.o.Name)+".*")
	if err != nil {
		return err
	}
	defer w.Stop() //nolint:errcheck // the subscription may be gone already
	tick := time.NewTicker(watchRetry)
	defer tick.Stop()
	last, reconnects := time.Now(), b.o.Conn.NATS().Stats().Reconnects
	for {
		select {
		case <-ctx.Done():
			return nil
		case u, open := <-w.Updates():
			if !open {
				return errors.New("watch was closed")
			}
			last = time.Now()
			if u != nil {
				b.heard(u.Value())
			}
		case <-tick.C:
			// The bucket is kept in memory: after a restart of NATS it is another, of which this watch hears nothing.
			if b.o.Conn.NATS().Stats().Reconnects != reconnects || time.Since(last) > staleAfter {
				return errors.New("watch is silent")
			}
		}
	}
}

// heard takes a value of the bucket; a deletion, or something that is none of ours, says nothing.
func (b *Book) heard(value []byte) {
	p, err := clock.ParsePublished(value)
	if err != nil || !b.put(p.Estimate) {
		return
	}
	for _, r := range []node.Role{node.RoleCtx, node.RoleGen} {
		b.tracker.Learn(node.Key(r, p.Node), p.Estimate)
	}
}

// put keeps an estimate of a clock against ours; those against another epoch of this router's clock are of no use. It counts
// for the process that it was measured with alone: equal epochs do not prove one clock, since cloned machines share them.
// Not fresh: it is of no use, or known already.
func (b *Book) put(e clock.Estimate) (fresh bool) {
	if e.Reference.Epoch() != b.o.Steady.ID().Epoch() || strings.TrimSpace(e.Local.Epoch()) == "" {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	past := b.past[e.Local]
	i := sort.Search(len(past), func(i int) bool { return past[i].AtNS > e.AtNS })
	if i > 0 && past[i-1] == e {
		return false
	}
	past = append(past, clock.Estimate{})
	copy(past[i+1:], past[i:])
	past[i] = e
	if len(past) > keepPast {
		past = append(past[:0], past[len(past)-keepPast:]...)
	}
	b.past[e.Local] = past
	if len(b.past) > keepClocks {
		b.forgetOldest()
	}
	return true
}

// keepClocks is how many clocks are remembered: a restart of a process makes another.
const keepClocks = 4096

// forgetOldest drops the clock that was measured longest ago, as seen on our own.
func (b *Book) forgetOldest() {
	var oldest clock.ID
	least := int64(maxStamp)
	for id, past := range b.past {
		last := past[len(past)-1]
		if at := last.AtNS + last.OffsetNS; at < least {
			oldest, least = id, at
		}
	}
	delete(b.past, oldest)
}
