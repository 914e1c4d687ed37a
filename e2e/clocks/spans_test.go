package clocks

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/load"
	"meridian.internal/shared/shuttle"
)

// spansLine is the part of a timeline that says how much of a request's time its spans cover.
type spansLine struct {
	RequestID     string `json:"request_id"`
	Complete      bool   `json:"complete"`
	TTFTNS        int64  `json:"ttft_ns"`
	E2ENS         int64  `json:"e2e_ns"`
	UnaccountedNS int64  `json:"unaccounted_ns"`
	MaxBoundNS    int64  `json:"max_bound_ns"`
	Spans         struct {
		DurNS []int64 `json:"dur_ns"`
	} `json:"spans"`
}

// TestSpansCoverTheTimeOfRequests: what no span covers is at most 1 % of the TTFT, or three times the bound of the clocks, for
// 99 of 100 requests. It is about what the stamps cover, not about speed: on a machine that is slow, the spans are long.
func TestSpansCoverTheTimeOfRequests(t *testing.T) {
	bin := binaries(t)
	const near = 200 * time.Microsecond
	path := cluster.Place{There: shuttle.Path{Delay: near}, Back: shuttle.Path{Delay: near}}
	far := path
	far.ClockShift = 1000 * time.Second
	for name, places := range map[string]map[string]cluster.Place{
		"on loopback":                   nil,
		"across two network namespaces": {"ctx0": path, "gen0": far},
	} {
		t.Run(name, func(t *testing.T) {
			if err := cluster.CanPlace(); len(places) > 0 && err != nil {
				t.Skip(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			c, err := cluster.Start(ctx, cluster.Config{Bin: bin, Dir: t.TempDir(), Ctx: 1, Gen: 1, Places: places, Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Stop() // the test is about what was said before
			const requests = 600
			sum, err := load.Run(ctx, load.Plan{
				URL: c.URL(), Model: "meridian-tiny", Requests: requests, Concurrency: 4, Prompt: dist(t, "uniform:16:64"), Output: dist(t, "uniform:4:16"),
				Vocab: 2000, Stream: true, IgnoreEOS: true, Seed: 1, Timeout: time.Minute,
			}, nil)
			if err != nil || sum.OK != requests {
				t.Fatalf("%d of %d requests ended well: %v, %v", sum.OK, requests, sum.Errors, err)
			}
			cl := client.New(c.URL(), 1)
			defer cl.Close()
			var list struct{ Timelines []spansLine }
			var lines []spansLine
			until(t, "every request has its line", func() bool {
				list.Timelines = nil
				if err := cl.Get(ctx, fmt.Sprintf("/timelines?limit=%d", requests+100), &list); err != nil {
					return false
				}
				lines = newest(list.Timelines)
				return len(lines) == requests && !slices.ContainsFunc(lines, func(l spansLine) bool { return !l.Complete })
			})
			judge(t, lines)
		})
	}
}

// newest leaves out lines that were amended: the newest comes first.
func newest(lines []spansLine) (out []spansLine) {
	seen := map[string]bool{}
	for _, l := range lines {
		if !seen[l.RequestID] {
			seen[l.RequestID], out = true, append(out, l)
		}
	}
	return out
}

// judge wants the spans of each line to add up, and to cover enough.
func judge(t *testing.T, lines []spansLine) {
	t.Helper()
	shares := make([]float64, 0, len(lines)) // of what may be in no span
	for _, l := range lines {
		rest := l.E2ENS
		for _, d := range l.Spans.DurNS {
			rest -= d
		}
		if !l.Complete || rest != l.UnaccountedNS {
			t.Errorf("request %s: complete %v; its spans leave %d ns of %d, it says %d", l.RequestID, l.Complete, rest, l.E2ENS, l.UnaccountedNS)
		}
		shares = append(shares, float64(max(l.UnaccountedNS, -l.UnaccountedNS))/float64(max(l.TTFTNS/100, 3*l.MaxBoundNS)))
	}
	slices.Sort(shares)
	p50, p99, most := shares[len(shares)/2], shares[len(shares)*99/100], shares[len(shares)-1]
	t.Logf("in no span, of what may be: p50 %.3f, p99 %.3f, at most %.3f", p50, p99, most)
	if p99 > 1 {
		t.Errorf("of 1 in 100 requests %.2f times more than 1 %% of the TTFT and three bounds is in no span", p99)
	}
}

func dist(t *testing.T, text string) load.Dist {
	t.Helper()
	d, err := load.ParseDist(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
