package clocks

import (
	"log/slog"
	"slices"
	"sync"
	"time"

	"meridian.internal/router/check"
	"meridian.internal/router/timeline"
)

const (
	// judgeEvery bounds what a stream of contradictions costs.
	judgeEvery = time.Second
	// forgetAfter is how long a contradiction weighs, at least: then a clock that was repaired is no longer blamed.
	forgetAfter = time.Minute
)

// witness holds the messages of recent requests against each other and names the clocks that they prove wrong.
type witness struct {
	log *slog.Logger

	mu           sync.Mutex // guards what follows; short reads and writes only
	now, before  *check.Clocks
	since        time.Time // of now
	judged       time.Time
	verdicts     []check.Verdict
	contradicted int64 // messages
}

func newWitness(log *slog.Logger) *witness {
	return &witness{log: log, now: &check.Clocks{}, before: &check.Clocks{}}
}

func (w *witness) add(l *timeline.Line, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if at.Sub(w.since) > forgetAfter {
		w.before, w.now, w.since = w.now, &check.Clocks{}, at
	}
	w.contradicted += w.now.Add(l)
	if at.Sub(w.judged) < judgeEvery {
		return
	}
	w.judged = at
	var both check.Clocks
	both.Merge(w.before)
	both.Merge(w.now)
	old := w.verdicts
	w.verdicts = both.Verdicts()
	if !slices.EqualFunc(old, w.verdicts, func(a, b check.Verdict) bool { return slices.Equal(a.Liars, b.Liars) }) {
		for _, v := range w.verdicts {
			w.log.Warn("messages contradict the clock estimates", "clocks", v.Liars, "excess_ns", v.ExcessNS, "verdict", v.String())
		}
	}
}

// named lists the clocks that are proven wrong alone.
func (w *witness) named() (names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.judged) > 2*forgetAfter { // nothing was judged for long: no requests
		return nil
	}
	for _, v := range w.verdicts {
		if len(v.Liars) == 1 {
			names = append(names, v.Liars[0])
		}
	}
	return names
}

func (w *witness) proves(name string) bool { return slices.Contains(w.named(), name) }

func (w *witness) messages() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.contradicted
}
