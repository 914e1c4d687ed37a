package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// gaps are the times of the decode steps of one batch size and the times between them on the device, in µs.
type gaps struct {
	batch        int
	steps, empty []float64
}

// gapsOf reads them out of the Chrome trace of a profile window: from the end of a step to the forward of the next one, where
// both are decode steps of that batch.
func gapsOf(trace []byte, batch int) (gaps, error) {
	var t struct {
		TraceEvents []struct {
			Name    string
			Ts, Dur float64 // µs
			Args    struct {
				Iter           int64
				Batch, Context *int
			}
		}
	}
	if err := json.Unmarshal(trace, &t); err != nil {
		return gaps{}, fmt.Errorf("read a trace: %w", err)
	}
	type step struct {
		from, to float64
		decodes  bool
	}
	all := map[int64]step{}
	for _, e := range t.TraceEvents {
		s := all[e.Args.Iter]
		switch {
		case strings.HasPrefix(e.Name, "forward "):
			s.from, s.decodes = e.Ts, e.Args.Batch != nil && *e.Args.Batch == batch && e.Args.Context != nil && *e.Args.Context == 0
		case !strings.HasPrefix(e.Name, "sample "):
			continue
		}
		s.to = max(s.to, e.Ts+e.Dur)
		all[e.Args.Iter] = s
	}
	g := gaps{batch: batch}
	for iter, s := range all {
		if !s.decodes {
			continue
		}
		g.steps = append(g.steps, s.to-s.from)
		if next := all[iter+1]; next.decodes {
			g.empty = append(g.empty, next.from-s.to)
		}
	}
	if len(g.empty) == 0 {
		return g, fmt.Errorf("of %d steps in a trace no two that follow each other decode %d sequences", len(all), batch)
	}
	slices.Sort(g.steps)
	slices.Sort(g.empty)
	return g, nil
}

// String is the line that a person reads.
func (g gaps) String() string {
	at := func(v []float64, part float64) float64 { return v[int(part*float64(len(v)-1))] }
	return fmt.Sprintf("decode of %d in a profile window: step p50 %.1f µs of %d; gap p50 %.1f, p90 %.1f, p99 %.1f, most %.1f µs of %d", g.batch, at(g.steps, 0.5),
		len(g.steps), at(g.empty, 0.5), at(g.empty, 0.9), at(g.empty, 0.99), g.empty[len(g.empty)-1], len(g.empty))
}
