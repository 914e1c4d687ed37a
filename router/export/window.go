package export

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"

	"meridian.internal/shared/clock"
)

// Errors of profile windows.
var (
	ErrWindow = errors.New("export: not the trace of a profile window")
	ErrClock  = errors.New("export: no timeline tells where the clock of the profile window is")
)

// windowSchema is what gpu/profile writes.
const windowSchema = "meridian.trace/1"

// Window is a profile window of a node's rank: what its iterations did, on the clock that stamped it (docs/ledgers.md).
type Window struct {
	Node   string
	Rank   int
	Clock  clock.ID
	slices []windowSlice
}

type windowSlice struct {
	track, name  string
	startNS, dur int64
	iter         int64
}

// ReadWindow reads the trace of a profile window. The requests in it are left out: timelines have them.
func ReadWindow(r io.Reader) (*Window, error) {
	var doc struct {
		Metadata struct {
			Schema  string   `json:"schema"`
			Node    string   `json:"node"`
			Rank    int      `json:"rank"`
			ClockID clock.ID `json:"clock_id"`
		} `json:"metadata"`
		Events []struct {
			Kind string  `json:"ph"`
			TID  int     `json:"tid"`
			Name string  `json:"name"`
			TS   float64 `json:"ts"`  // us
			Dur  float64 `json:"dur"` // us
			Args struct {
				Name string `json:"name"`
				Iter int64  `json:"iter"`
			} `json:"args"`
		} `json:"traceEvents"`
	}
	if err := json.NewDecoder(r).Decode(&doc); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrWindow, err)
	}
	m := doc.Metadata
	if m.Schema != windowSchema || m.Node == "" || m.ClockID == "" || m.Rank < 0 {
		return nil, fmt.Errorf("%w: metadata with schema %q, node %q, rank %d and clock_id %q; want %s and all of them", ErrWindow, m.Schema, m.Node, m.Rank, m.ClockID, windowSchema)
	}
	w := &Window{Node: m.Node, Rank: m.Rank, Clock: m.ClockID}
	tracks := map[int]string{}
	for i, e := range doc.Events {
		switch {
		case e.Kind == "M" && e.Name == "thread_name":
			tracks[e.TID] = e.Args.Name
		case e.Kind != "X":
		case math.Abs(e.TS) > maxMicros || e.Dur < 0 || e.Dur > maxMicros:
			return nil, fmt.Errorf("%w: event %d: ts %g and dur %g are no times", ErrWindow, i, e.TS, e.Dur)
		default:
			w.slices = append(w.slices, windowSlice{tracks[e.TID], e.Name, nanos(e.TS), nanos(e.Dur), e.Args.Iter})
		}
	}
	return w, nil
}

// maxMicros keeps sums of times within 64 bits of ns; up to there a float has the ns of the first hundred days.
const maxMicros = 1e15

func nanos(micros float64) int64 { return int64(math.Round(micros * 1e3)) }

// window places a profile window among the lines that were placed before.
func (y *layout) window(w *Window) ([]slice, error) {
	where, ok := y.clocks[w.Clock]
	if !ok {
		return nil, fmt.Errorf("%w: clock %s of %s", ErrClock, w.Clock, w.Node)
	}
	rank := ""
	if w.Rank > 0 {
		rank = ranked(w.Rank)
	}
	out := make([]slice, 0, len(w.slices))
	for _, s := range w.slices {
		out = append(out, slice{
			process: w.Node, track: "profile" + rank + ": " + s.track, name: s.name, start: where.at(s.startNS), dur: s.dur, bound: where.boundNS,
			args: []arg{{key: "iter", num: s.iter}},
		})
	}
	return out, nil
}
