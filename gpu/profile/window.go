package profile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"meridian.internal/shared/rows"
)

// Range is iterations First to Last, both included.
type Range struct{ First, Last int64 }

// ParseRanges reads "10-20,30": ranges and single iterations, rising and apart from each other.
func ParseRanges(text string) ([]Range, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var out []Range
	for part := range strings.SplitSeq(text, ",") {
		first, last, ranged := strings.Cut(strings.TrimSpace(part), "-")
		if !ranged {
			last = first
		}
		from, err1 := strconv.ParseInt(strings.TrimSpace(first), 10, 64)
		to, err2 := strconv.ParseInt(strings.TrimSpace(last), 10, 64)
		if err1 != nil || err2 != nil || from < 1 || to < from || to == 1<<63-1 {
			return nil, fmt.Errorf("profile iterations %q: %q is no iteration or range of them; want something like 10-20,30", text, part)
		}
		if n := len(out); n > 0 && from <= out[n-1].Last {
			return nil, fmt.Errorf("profile iterations %q: %q does not come after what is before it", text, part)
		}
		out = append(out, Range{from, to})
	}
	return out, nil
}

// The activities of a window.
const (
	CPU    = "CPU"    // a Go CPU profile of the process
	GPU    = "GPU"    // the device's slices
	Layers = "LAYERS" // a slice for each layer
)

// check refuses a request that cannot be, and gives its activities.
func check(r rows.ProfileRequest) ([]string, error) {
	switch {
	case r.NumSteps != nil && *r.NumSteps < 1:
		return nil, fmt.Errorf("%w: num_steps is %d, must be at least 1", rows.ErrProfileInvalid, *r.NumSteps)
	case r.NumSteps != nil && *r.NumSteps > 1<<30 || r.StartStep > 1<<30:
		return nil, fmt.Errorf("%w: num_steps and start_step must be at most %d", rows.ErrProfileInvalid, 1<<30)
	case r.StartStep < 0:
		return nil, fmt.Errorf("%w: start_step is %d, must be 0 or more", rows.ErrProfileInvalid, r.StartStep)
	case r.Activities == nil:
		return []string{CPU, GPU}, nil
	case len(r.Activities) == 0:
		return nil, fmt.Errorf("%w: activities is empty; want some of CPU, GPU, LAYERS", rows.ErrProfileInvalid)
	}
	for _, a := range r.Activities {
		if a != CPU && a != GPU && a != Layers {
			return nil, fmt.Errorf("%w: activity %q is not available; want some of CPU, GPU, LAYERS", rows.ErrProfileInvalid, a)
		}
	}
	out := slices.Clone(r.Activities)
	slices.Sort(out)
	return slices.Compact(out), nil
}

// state of the one window.
type state int

const (
	idle      state = iota
	claimed         // somebody prepares it
	scheduled       // waits for its first iteration
	active
	flushing // its files are being written
)

func (s state) String() string {
	return [...]string{"idle", "claimed", "scheduled", "active", "flushing"}[s]
}

// window decides what happens to a window; it does nothing itself.
type window struct {
	state       state
	start, stop int64 // iterations [start, stop)
}

// forever is the stop of a window that waits to be stopped.
const forever = int64(1<<63 - 1)

// schedule gives a claimed window its iterations; next is the first that has not been built.
func (w *window) schedule(next int64, startStep int, steps *int) {
	w.state, w.start, w.stop = scheduled, next+int64(startStep), forever
	if steps != nil {
		w.stop = w.start + int64(*steps)
	}
}

// built tells whether the window opens with this iteration.
func (w *window) built(iter int64) (opens bool) {
	if w.state != scheduled || iter < w.start {
		return false
	}
	w.state = active
	return true
}

// holds tells whether an iteration is in the open window.
func (w *window) holds(iter int64) bool {
	return w.state == active && iter >= w.start && iter < w.stop
}

// collected tells whether the window ends with this iteration.
func (w *window) collected(iter int64) (ends bool) { return w.state == active && iter >= w.stop-1 }

// halt stops the window before iteration next, of which pending are in flight: it ends at once, or with the last of them.
func (w *window) halt(next int64, pending bool) (endsNow bool) {
	w.stop = min(w.stop, next)
	return w.state == scheduled || !pending || w.stop <= w.start
}
