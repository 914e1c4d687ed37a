package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// anchorsNS is what the clocks of two processes that read one kernel clock may differ by: each anchors it anew.
const anchorsNS = 2000

// clockWatch holds what is said of clocks against the truth. It has one user at a time.
type clockWatch struct {
	truth map[string]int64 // node -> true offset against a process beside the cluster; 0: no entry needed
	rows  map[string]*clockRow
	first []string // misses, the first few
}

// clockRow sums up what one source said of one node.
type clockRow struct {
	said, unusable, misses int
	errs, bounds           []int64
	states                 map[string]int
}

const maxMisses = 20 // that are listed

func newClockWatch(places map[string]cluster.Place) *clockWatch {
	w := &clockWatch{truth: map[string]int64{}, rows: map[string]*clockRow{}}
	for name, p := range places {
		w.truth[name] = -int64(p.ClockShift)
	}
	return w
}

// said is one statement: an offset and an interval that the true offset is in.
type said struct {
	source, node, state  string
	offset, lower, upper int64
}

func (w *clockWatch) take(s said) {
	key := s.node + "\x00" + s.source
	r := w.rows[key]
	if r == nil {
		r = &clockRow{states: map[string]int{}}
		w.rows[key] = r
	}
	r.said++
	r.states[s.state]++
	switch s.state {
	case "synced", "holdover", "suspect", "identity":
	default:
		r.unusable++
		return
	}
	truth := w.truth[s.node]
	r.errs = append(r.errs, max(s.offset-truth, truth-s.offset))
	r.bounds = append(r.bounds, max(s.upper-s.offset, s.offset-s.lower))
	if s.lower > truth+anchorsNS || s.upper < truth-anchorsNS {
		if r.misses++; len(w.first) < maxMisses {
			w.first = append(w.first, fmt.Sprintf("%s says that the clock of %s is %s and within %+d and %+d ns of the truth", s.source, s.node, s.state, s.lower-truth, s.upper-truth))
		}
	}
}

// run asks clocksync and the router until ctx ends. One that is away says nothing.
func (w *clockWatch) run(ctx context.Context, clocksync, router string) {
	a, b := client.New(clocksync, 1), client.New(router, 1)
	defer a.Close()
	defer b.Close()
	for ctx.Err() == nil {
		pause(ctx, watchEvery)
		w.ask(ctx, a, b)
	}
}

func (w *clockWatch) ask(ctx context.Context, clocksync, router *client.Client) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var rows struct {
		Clocks []struct {
			Node, Reference, State string
			OffsetNS               *int64 `json:"offset_ns"`
			LowerNS                *int64 `json:"lower_ns"`
			UpperNS                *int64 `json:"upper_ns"`
		}
	}
	if clocksync.Get(ctx, "/clocks", &rows) == nil {
		for _, r := range rows.Clocks {
			if r.OffsetNS != nil {
				w.take(said{source: "clocksync to " + r.Reference, node: r.Node, state: r.State, offset: *r.OffsetNS, lower: *r.LowerNS, upper: *r.UpperNS})
			}
		}
	}
	var view struct {
		Nodes []struct {
			Name  string
			Clock *struct {
				State    string
				OffsetNS *int64 `json:"offset_ns"`
				BoundNS  *int64 `json:"bound_ns"`
			}
		}
	}
	if router.Get(ctx, "/cluster", &view) == nil {
		for _, n := range view.Nodes {
			if c := n.Clock; c != nil && c.OffsetNS != nil && c.BoundNS != nil {
				w.take(said{source: "router", node: n.Name, state: c.State, offset: *c.OffsetNS, lower: *c.OffsetNS - *c.BoundNS, upper: *c.OffsetNS + *c.BoundNS})
			}
		}
	}
}

// lines holds the clocks of every phase of every timeline against the truth.
func (w *clockWatch) lines(traces string) error {
	names, _ := filepath.Glob(filepath.Join(traces, "timeline-*.jsonl"))
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		in := bufio.NewScanner(f)
		in.Buffer(nil, 64<<20)
		for in.Scan() {
			w.line(in.Bytes())
		}
		err = errors.Join(in.Err(), f.Close())
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
	}
	return nil
}

func (w *clockWatch) line(b []byte) {
	var l struct {
		Phases []struct {
			Role, Node string
			Clock      []json.RawMessage // id, state, bound, offset, and more
		}
	}
	if json.Unmarshal(b, &l) != nil {
		return // a torn tail; timeline check judges lines
	}
	for _, p := range l.Phases {
		if p.Role == "disagg" || len(p.Clock) < 4 {
			continue
		}
		var state string
		var bound, offset *int64
		if err := errors.Join(json.Unmarshal(p.Clock[1], &state), json.Unmarshal(p.Clock[2], &bound), json.Unmarshal(p.Clock[3], &offset)); err != nil {
			continue
		}
		if bound != nil && offset != nil {
			w.take(said{source: "timelines", node: p.Node, state: state, offset: *offset, lower: *offset - *bound, upper: *offset + *bound})
		}
	}
}

// print shows a row for each node and source.
func (w *clockWatch) print() {
	fmt.Printf("%-10s %-24s %17s %8s %6s %12s %12s %12s %12s  %s\n", "clock of", "by", "true offset", "said", "misses", "error p50", "error max", "bound p50", "bound max", "states")
	for _, key := range slices.Sorted(maps.Keys(w.rows)) {
		r := w.rows[key]
		node, source, _ := strings.Cut(key, "\x00")
		var states []string
		for _, s := range slices.Sorted(maps.Keys(r.states)) {
			states = append(states, fmt.Sprintf("%s %d", s, r.states[s]))
		}
		fmt.Printf("%-10s %-24s %17d %8d %6d %12s %12s %12s %12s  %s\n", node, source, w.truth[node], r.said, r.misses, middle(r.errs), most(r.errs),
			middle(r.bounds), most(r.bounds), strings.Join(states, ", "))
	}
}

func middle(v []int64) string { return duration(median(v)) }

func most(v []int64) string {
	if len(v) == 0 {
		return duration(nil)
	}
	m := slices.Max(v)
	return duration(&m)
}

// verdict is an error if a bound missed the truth, or if a node's clock was never known.
func (w *clockWatch) verdict() error {
	var errs []error
	for _, m := range w.first {
		errs = append(errs, errors.New(m))
	}
	misses := 0
	for _, key := range slices.Sorted(maps.Keys(w.rows)) {
		r := w.rows[key]
		misses += r.misses
		if r.said == r.unusable {
			node, source, _ := strings.Cut(key, "\x00")
			errs = append(errs, fmt.Errorf("the clock of %s was never known to %s", node, source))
		}
	}
	if misses > 0 {
		errs = append(errs, fmt.Errorf("%d bounds miss the truth", misses))
	}
	return errors.Join(errs...)
}
