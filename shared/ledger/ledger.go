// Package ledger is the face of a node's ledgers: it takes the rows of the engine's iterations and the records of ended
// requests, keeps the rows for GET /iteration_stats, and turns both into Prometheus metrics. It owns names, buckets and
// cursors; it measures nothing itself.
//
// Put runs on the engine's goroutine and costs it a copy and some additions; all else happens when somebody reads.
package ledger

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// Options of a ledger.
type Options struct {
	Keep     int  // rows that are kept for readers
	VLLM     bool // export vLLM's names too
	Sink     rows.Sink
	Registry prometheus.Registerer // nil: no metrics
	Logger   *slog.Logger          // nil: nothing is logged
}

// Engine describes the engine whose ledger it is.
type Engine struct {
	rows.Static
	Model       string
	Device      string
	PrefixReuse bool
	Ranks       int // data-parallel; 0: one
	Stages      int // of the pipeline of each; 0: one
	Blocks      int // of a rank
	Load        func() infer.Load
}

// Ledger of one engine. New makes it before the engine, Start completes it once the engine is known.
type Ledger struct {
	o        Options
	ring     *rows.Ring // nil: rows are not kept
	requests *requestMetrics
	batch    *batchMetrics

	mu     sync.Mutex // guards states
	states []state    // by rank
}

// state is what the rows of a rank so far add up to.
type state struct {
	seen           bool      // there was a row
	last           rows.Row  // the newest: filled in by snapshot
	kv             rows.KV   // of the last row that had it; valid if kv.Sampled
	groups         []rows.KV // of that row; nil: there is one. Not written any more
	requests       rows.Requests
	sums           rows.Sums
	reused, missed rows.Counter
	full, partial  int64
	iterMissed     int64
	genBlocks      int64
	onboarded      int64 // bytes, of and to the host tier
	offloaded      int64
	copied         int64 // bytes, inside the device
	hostDropped    int64 // blocks
	diskLoaded     int64
	diskStored     int64
	diskDropped    int64
	diskBroken     int64
	reuse          rows.Ratio
}

// New makes a ledger.
func New(o Options) *Ledger {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Ledger{o: o}
}

// Sink is what the engine is to be asked for.
func (l *Ledger) Sink() rows.Sink {
	s := l.o.Sink
	s.Put = l.Put
	return s
}

// Start makes the ring and the metrics. It must come before the engine runs.
func (l *Ledger) Start(e Engine) error {
	l.states = make([]state, max(e.Ranks, 1))
	if l.o.Sink.Interval > 0 {
		l.ring = rows.NewRing(e.Static, l.kept())
	}
	labels := prometheus.Labels{"model_name": e.Model, "engine_type": e.Device}
	l.requests = newRequestMetrics(labels, l.o.VLLM)
	l.batch = newBatchMetrics(labels, len(l.states))
	if l.o.Registry == nil {
		return nil
	}
	all := append(l.requests.all(), infoMetrics(labels, &e)...)
	if l.ring != nil {
		all = append(append(all, l.batch.all()...), newRowCollector(l, labels))
	}
	if l.o.VLLM {
		all = append(all, newVLLM(l, &e))
	}
	for _, c := range all {
		if err := l.o.Registry.Register(c); err != nil {
			return fmt.Errorf("register metrics of the ledger: %w", err)
		}
	}
	return nil
}

// kept is how many rows are kept: those of so many iterations.
func (l *Ledger) kept() int { return max(l.o.Keep, 1) * max(len(l.states), 1) }

// Put takes a row from the engine.
func (l *Ledger) Put(r *rows.Row) {
	l.ring.Put(r)
	l.batch.observe(r)
	if l.add(r) {
		l.o.Logger.Warn("a total of the KV cache fell; its counter goes on from there", "iter", r.Iter)
	}
}

// add sums a row up; true if a total fell for the first time.
func (l *Ledger) add(r *rows.Row) (fell bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.states[r.Rank]
	s.requests.AddCounts(&r.Requests)
	s.requests.Suspended += r.Requests.Suspended
	s.sums.Add(&r.Sums)
	if k := &r.KV; k.Sampled {
		s.kv, s.groups = *k, r.Groups
		a, b := s.reused.Observe(k.Reused), s.missed.Observe(k.Missed)
		fell = a || b
		s.full += k.DFullReused
		s.partial += k.DPartialReused
		s.iterMissed += k.DMissed
		s.genBlocks += k.DGenAlloc
		s.onboarded += k.OnboardBytes.V
		s.offloaded += k.OffloadBytes.V
		s.copied += k.IntraCopyBytes.V
		s.hostDropped += k.HostDropped.V
		s.diskLoaded += k.DiskLoaded.V
		s.diskStored += k.DiskStored.V
		s.diskDropped += k.DiskDropped.V
		s.diskBroken += k.DiskBroken.V
		if k.DHitRate.OK {
			s.reuse = k.DHitRate
		}
	}
	return fell
}

// snapshot gives the states of the ranks, and of all of them what is not one rank's.
func (l *Ledger) snapshot() (total state, ranks []state) {
	l.mu.Lock()
	ranks = slices.Clone(l.states)
	l.mu.Unlock()
	for rank := range ranks {
		if s := &ranks[rank]; l.ring != nil {
			s.last, s.seen = l.ring.Newest(rank)
		}
	}
	total = ranks[0] // which tells of the queue for all
	for i := range ranks[1:] {
		s := &ranks[1+i]
		total.sums.Prompt += s.sums.Prompt
		total.sums.Cached += s.sums.Cached
		total.last.Requests.Active += s.last.Requests.Active
		total.last.Requests.MaxActive += s.last.Requests.MaxActive
		total.last.Memory.Add(s.last.Memory)
	}
	return total, ranks
}

// Close ends the streams of those who follow the rows.
func (l *Ledger) Close() {
	if l.ring != nil {
		l.ring.Close()
	}
}
