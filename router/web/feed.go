package web

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"sync"
	"time"

	"meridian.internal/router/timeline"
)

const (
	keptRows     = 10_000
	keptClocks   = 600 // samples a node, one a second
	keptWindows  = 360
	windowLength = 10 * time.Second
	sampleEvery  = time.Second
)

// ClockOf is what is known of a node's clock: nil where it is not aligned.
type ClockOf struct {
	Node     string
	OffsetNS *int64 // reference - local
	BoundNS  *int64
}

// Feed keeps what the page shows: a row of each of the newest requests, percentiles of their spans over time, and the clocks
// over time. It never holds a timeline.
type Feed struct {
	now    func() time.Time
	clocks func() []ClockOf

	mu      sync.Mutex // guards what follows; short reads and writes only
	rows    []row      // ring: row of seq s lies at s % keptRows
	seq     int64      // of the newest row; the first is 1
	windows []window   // closed ones, the oldest first
	current *gathering // nil before the first request
	history map[string][]clockSample
}

// clockSample is [unix ms, offset ns, bound ns]; the latter null where the clock was not aligned.
type clockSample [3]*int64

// NewFeed returns an empty feed. clocks is asked once a second by Run.
func NewFeed(now func() time.Time, clocks func() []ClockOf) *Feed {
	return &Feed{now: now, clocks: clocks, rows: make([]row, keptRows), history: map[string][]clockSample{}}
}

// Add takes a line that was written. It does not block.
func (f *Feed) Add(l *timeline.Line) {
	r := newRow(l)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.put(r)
	if l.Amends {
		return // its times were counted when it was first written
	}
	f.roll()
	if f.current == nil {
		f.current = newGathering(f.now().Truncate(windowLength))
	}
	f.current.add(l)
}

// Restore takes the lines of an earlier run, the newest first: they are listed, but belong to no window of this one. A line
// that cannot be parsed is passed over: bin/timeline check reports it.
func (f *Feed) Restore(lines []json.RawMessage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range slices.Backward(lines) {
		if l, err := timeline.Parse(b); err == nil {
			f.put(newRow(l))
		}
	}
}

func (f *Feed) put(r row) {
	f.seq++
	r.Seq = f.seq
	f.rows[f.seq%keptRows] = r
}

// roll closes the window when its time is over.
func (f *Feed) roll() {
	if f.current == nil || f.now().Sub(f.current.start) < windowLength {
		return
	}
	if len(f.windows) == keptWindows {
		f.windows = append(f.windows[:0], f.windows[1:]...)
	}
	f.windows = append(f.windows, f.current.window())
	f.current = nil
}

// Run samples the clocks until ctx ends.
func (f *Feed) Run(ctx context.Context) error {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			f.sample()
		}
	}
}

func (f *Feed) sample() {
	clocks := f.clocks()
	at := f.now().UnixMilli()
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := make(map[string]bool, len(clocks))
	for _, c := range clocks {
		seen[c.Node] = true
		h := f.history[c.Node]
		if len(h) == keptClocks {
			h = append(h[:0], h[1:]...)
		}
		f.history[c.Node] = append(h, clockSample{&at, c.OffsetNS, c.BoundNS})
	}
	for name := range f.history {
		if !seen[name] { // gone from the cluster
			delete(f.history, name)
		}
	}
}

// since returns rows newer than after, the oldest first, at most n of them, and how many were overwritten unseen.
func (f *Feed) since(after int64, n int) (out []row, lost int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	oldest := max(1, f.seq-keptRows+1)
	if after < oldest-1 {
		lost, after = oldest-1-after, oldest-1
	}
	for s := after + 1; s <= f.seq && len(out) < n; s++ {
		out = append(out, f.rows[s%keptRows])
	}
	return out, lost
}

// newest is the number of the newest row.
func (f *Feed) newest() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seq
}

// over returns the windows that began after the unix ms, the running one last: empty where nothing has ended in it, so that who
// reads them knows the time. Before the first request there is none.
func (f *Feed) over(after int64) []window {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.roll()
	out := []window{}
	for _, w := range f.windows {
		if w.AtMS > after {
			out = append(out, w)
		}
	}
	current := f.current
	if current == nil && len(f.windows) > 0 {
		current = newGathering(f.now().Truncate(windowLength))
	}
	if current != nil {
		w := current.window()
		w.MS = f.now().Sub(current.start).Milliseconds()
		out = append(out, w)
	}
	return out
}

// clocksOver returns the samples of every node.
func (f *Feed) clocksOver() map[string][]clockSample {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[string][]clockSample, len(f.history))
	for name, h := range f.history {
		out[name] = append([]clockSample(nil), h...)
	}
	return out
}

// number of samples of a span that a window keeps; of more, a uniform choice.
const windowSamples = 2048

// gathering is the window that runs.
type gathering struct {
	start time.Time
	n     int
	spans map[string]*samples
}

type samples struct {
	n      int64
	before int64 // of n, those that began before the first token
	sum    float64
	kept   []int64
}

func newGathering(start time.Time) *gathering {
	return &gathering{start: start, spans: map[string]*samples{}}
}

// Names under which the page asks for the whole, beside the spans' own.
const (
	wholeTTFT = "ttft"
	wholeE2E  = "e2e"
)

func (g *gathering) add(l *timeline.Line) {
	g.n++
	if l.TTFTNS != nil {
		g.sample(wholeTTFT, *l.TTFTNS, true)
	}
	if l.E2ENS != nil {
		g.sample(wholeE2E, *l.E2ENS, false)
	}
	for _, s := range l.Spans {
		g.sample(s.Name, s.DurNS, l.TTFTNS != nil && s.StartNS < *l.TTFTNS)
	}
}

func (g *gathering) sample(name string, ns int64, before bool) {
	s := g.spans[name]
	if s == nil {
		s = &samples{}
		g.spans[name] = s
	}
	s.n++
	if before {
		s.before++
	}
	s.sum += float64(ns)
	if len(s.kept) < windowSamples {
		s.kept = append(s.kept, ns)
		return
	}
	// A fixed scramble of the count takes the place of a random number: the choice is uniform, and a test sees the same.
	if at := int64(uint64(s.n) * 0x9E3779B97F4A7C15 >> 1 % uint64(s.n)); at < windowSamples {
		s.kept[at] = ns
	}
}

// window is what a stretch of time says of the requests whose lines were written in it.
type window struct {
	AtMS   int64                 `json:"at_ms"` // unix time of its begin
	MS     int64                 `json:"ms"`    // how long it is, or has run
	N      int                   `json:"n"`
	SpanNS map[string]spanNumber `json:"span_ns"`
}

// spanNumber is [count, mean, p50, p90, p99, before], times in ns: the mean is over the requests that had the span, and before
// counts those in which it began before the first token.
type spanNumber [6]int64

func (g *gathering) window() window {
	w := window{AtMS: g.start.UnixMilli(), MS: windowLength.Milliseconds(), N: g.n, SpanNS: make(map[string]spanNumber, len(g.spans))}
	for name, s := range g.spans {
		w.SpanNS[name] = s.number()
	}
	return w
}

func (s *samples) number() spanNumber {
	sorted := slices.Sorted(slices.Values(s.kept))
	at := func(q float64) int64 { return sorted[int(math.Ceil(q*float64(len(sorted))))-1] }
	return spanNumber{s.n, int64(s.sum / float64(s.n)), at(0.50), at(0.90), at(0.99), s.before}
}
