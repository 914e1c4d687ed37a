// Package track owns the estimates of a changing set of peers: it probes each one at an interval that its clock asks for,
// keeps an estimator per epoch, proves identity where a peer reads our own clock, and answers what is known now and what
// is known of a moment in the past. It knows neither NATS nor the registry: its owner names the peers.
//
// One goroutine per peer probes; what it learns is guarded by the peer's mutex. Run owns the set of goroutines.
package track

import (
	"context"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/probe"
	"meridian.internal/shared/clock"
)

// Peer is a process whose clock is followed. Name is its key.
type Peer struct {
	Name      string
	ClockAddr string   // host:port of its UDP responder; "": HTTP only
	URL       string   // base URL, for HTTP; "": UDP only
	ClockID   clock.ID // as it registered; "" when not known. A reply that says otherwise wins
	// Passive: somebody else probes it. It is not probed; what is known comes by Learn and Hint.
	Passive bool
}

// Options of a tracker.
type Options struct {
	Steady     *clock.Steady
	Key        []byte                                  // HMAC key of UDP packets; empty: none
	KernelDir  string                                  // folder for proofs of a shared kernel; "": by network namespace only
	NoKernelTS bool                                    // plain UDP stamps
	Limits     estimate.Config                         // declared limits and thresholds
	Burst      int                                     // exchanges a burst; 0: 4
	Logger     *slog.Logger                            // nil: silent
	Transport  func(*http.Transport) http.RoundTripper // shows the cluster's credentials; nil: there are none
	OnUpdate   func(Update)                            // after each burst, failed ones too, on the peer's goroutine; must not block. May be nil
}

// History is what earlier processes measured against our own clock, by the epoch of the measured clock. Processes of one
// host share the clock, and so the history.
type History struct {
	Reference string // epoch
	ByEpoch   map[string][]estimate.Stored
}

// Update is what a burst changed.
type Update struct {
	Peer     Peer
	Estimate clock.Estimate
	Lower    *Bound // the burst's best bounds; nil: it failed
	Upper    *Bound
	Verdict  estimate.Verdict
	Err      error
}

// Bound is a one-sided proof: at local time AtNS the offset is at least, or at most, NS.
type Bound struct {
	AtNS int64 `json:"at_ns"`
	NS   int64 `json:"ns"`
}

// Status is what is known of a peer now.
type Status struct {
	Peer         Peer
	Estimate     clock.Estimate
	AgeNS        int64 // since the newest burst; -1: there was none
	Stats        estimate.Stats
	Lost         int64 // exchanges without reply
	Failed       int64 // bursts without reply
	Epochs       int   // epochs seen under this name
	Conflicts    int64 // times that an old epoch came back: two processes claim the name
	Contradicted int64 // bursts that contradicted a proven identity
	LastErr      string
}

// retired is how many peers that are gone are kept for late stamps.
const retired = 256

// Tracker keeps the estimates.
type Tracker struct {
	opts    Options
	changed chan struct{}
	slots   slots
	start   time.Time
	batch   *probe.Batch // nil: stamps of the kernel are not wanted

	mu     sync.Mutex // guards what follows; short reads and writes only
	past   *History
	wanted map[string]Peer
	peers  map[string]*peer
	gone   []*peer // oldest first
}

// New returns a tracker without peers.
func New(o Options) *Tracker {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Burst <= 0 {
		o.Burst = 4
	}
	if o.OnUpdate == nil {
		o.OnUpdate = func(Update) {}
	}
	var batch *probe.Batch
	if !o.NoKernelTS {
		batch = probe.NewBatch(o.Steady, o.Key)
	}
	return &Tracker{
		opts: o, start: time.Now(), batch: batch, changed: make(chan struct{}, 1), slots: slots{make(chan struct{}, max(2, 2*runtime.GOMAXPROCS(0))), make(chan struct{}, 1024)},
		wanted: map[string]Peer{}, peers: map[string]*peer{},
	}
}

// slots bound the bursts that run at once. The work of others delays stamps of this program, but not those of the kernel.
type slots struct{ program, kernel chan struct{} }

// Remember gives the tracker a history, for peers that join from now on.
func (t *Tracker) Remember(h *History) {
	t.mu.Lock()
	t.past = h
	t.mu.Unlock()
}

// SetPeers replaces the set of peers. A peer that keeps its name and addresses keeps its estimate.
func (t *Tracker) SetPeers(ps []Peer) {
	t.mu.Lock()
	t.wanted = make(map[string]Peer, len(ps))
	for _, p := range ps {
		t.wanted[p.Name] = p
	}
	t.mu.Unlock()
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// Run probes until ctx ends.
func (t *Tracker) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if t.batch != nil {
		wg.Go(func() { t.batch.Run(ctx) })
	}
	stops := map[string]context.CancelFunc{}
	defer func() {
		for _, stop := range stops {
			stop()
		}
	}()
	for {
		t.reconcile(ctx, stops, &wg)
		select {
		case <-ctx.Done():
			return nil
		case <-t.changed:
		}
	}
}

// reconcile starts and stops goroutines until they are those of the wanted peers.
func (t *Tracker) reconcile(ctx context.Context, stops map[string]context.CancelFunc, wg *sync.WaitGroup) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, p := range t.peers {
		w, ok := t.wanted[name]
		if ok && w.ClockAddr == p.info.ClockAddr && w.URL == p.info.URL {
			if w.ClockID != p.info.ClockID || w.Passive != p.info.Passive {
				p.hurry() // another process under the old addresses, or it is ours to probe from now on
			}
			p.setInfo(w)
			continue
		}
		stops[name]()
		delete(stops, name)
		delete(t.peers, name)
		t.gone = append(t.gone, p)
		if len(t.gone) > retired {
			t.gone = t.gone[1:]
		}
	}
	for name, w := range t.wanted {
		if t.peers[name] != nil {
			continue
		}
		p := newPeer(w, &t.opts, t.slots)
		p.batch, p.start = t.batch, t.start
		p.past = t.past
		p.inherit(t.gone)
		t.peers[name] = p
		pctx, stop := context.WithCancel(ctx)
		stops[name] = stop
		wg.Go(func() { p.run(pctx) })
	}
}

// Newest returns what is known of a peer's clock now. Not ok: no such peer.
func (t *Tracker) Newest(name string) (clock.Estimate, bool) {
	p := t.peer(name)
	if p == nil {
		return clock.Estimate{}, false
	}
	return p.newest(), true
}

// Statuses returns what is known of all peers, by name.
func (t *Tracker) Statuses() []Status {
	t.mu.Lock()
	ps := slices.Collect(maps.Values(t.peers))
	t.mu.Unlock()
	out := make([]Status, 0, len(ps))
	for _, p := range ps {
		out = append(out, p.status())
	}
	slices.SortFunc(out, func(a, b Status) int { return strings.Compare(a.Peer.Name, b.Peer.Name) })
	return out
}

// EstimateAt returns what is known by now of the clock id at its own time localNS. Samples taken later count too. Not ok: a
// process with this id was never seen. One that only shares the epoch does not count: machines cloned from one snapshot do.
func (t *Tracker) EstimateAt(id clock.ID, localNS int64) (clock.Estimate, bool) {
	if own := t.opts.Steady.ID(); id == own {
		return clock.Estimate{Reference: own, Local: own, AtNS: localNS, State: clock.Identity, Transport: transportIdentity}, true
	}
	t.mu.Lock()
	ps := append(slices.Collect(maps.Values(t.peers)), t.gone...)
	t.mu.Unlock()
	var best clock.Estimate
	found := false
	for _, p := range ps {
		e, ok := p.at(id, localNS)
		if !ok {
			continue
		}
		if !found || e.Usable() && (!best.Usable() || e.BoundNS() < best.BoundNS()) {
			best, found = e, true
		}
	}
	return best, found
}

// Hint feeds an exchange that came for free (the clock header of a routed request) to the bounds of a peer's clock id.
func (t *Tracker) Hint(name string, id clock.ID, x ntp.Exchange) Hinted {
	if p := t.peer(name); p != nil {
		return p.hint(id, x)
	}
	return HintUnknown
}

// Hinted says what became of a hint.
type Hinted int

// The fates of a hint.
const (
	HintUnknown     Hinted = iota // nothing is known of this clock yet
	HintAgrees                    // its bounds meet what is known
	HintContradicts               // it proves that the estimate, or the stamps of the peer, are wrong
)

// Learn feeds an estimate of a passive peer's clock against ours that somebody else has measured.
func (t *Tracker) Learn(name string, e clock.Estimate) {
	if p := t.peer(name); p != nil {
		p.learn(e)
	}
}

func (t *Tracker) peer(name string) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.peers[name]
}

// jitter spreads an interval by ±10 %, so that the bursts of many peers do not meet.
func jitter(d time.Duration, r float64) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*r))
}
