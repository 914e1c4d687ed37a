// Package tail measures what disaggregation does to the tail: running streams while long prompts arrive, once on a
// context node and a generation node, once on two nodes that do both. It owns the load and the numbers; package cluster
// owns the processes.
package tail

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/load"
)

// Shape is the work, the same in both modes.
type Shape struct {
	Streams     int     // that run at any time
	Prompt, Out int     // tokens of a stream
	Long        int     // tokens of a prompt that disturbs
	LongOut     int     // tokens that it generates
	Busy        float64 // part of the context node's time that prefill takes, streams' own prompts included
	Vocab       int
	Warm, Time  time.Duration // before the measurement, and of it
	Seed        uint64
}

// Check says what cannot be measured.
func (s Shape) Check() error {
	switch {
	case s.Streams < 2 || s.Prompt < 1 || s.Out < 2 || s.Long < 1 || s.LongOut < 1:
		return fmt.Errorf("%d streams of %d tokens in and %d out, long prompts of %d in and %d out: want at least 2 streams, 1 in and 2 out", s.Streams, s.Prompt, s.Out, s.Long, s.LongOut)
	case s.Busy <= 0 || s.Busy >= 1:
		return fmt.Errorf("a context node that is busy %v of its time: want more than 0 and less than 1", s.Busy)
	case s.Warm < 0 || s.Time <= 0:
		return fmt.Errorf("%v measured after %v: want a time to measure", s.Time, s.Warm)
	}
	return nil
}

// Window is what streams and long prompts saw between two moments.
type Window struct {
	Mode     string        `json:"mode"`
	Round    int           `json:"round"`
	Streams  int           `json:"streams"`
	LongRate float64       `json:"long_per_s"` // arrivals asked for; 0: undisturbed
	Time     time.Duration `json:"time_ns"`
	ITL      Sample        `json:"itl"`       // of the streams
	TTFT     Sample        `json:"ttft"`      // of the streams
	LongTTFT Sample        `json:"long_ttft"` // of the long prompts
	Failed   int64         `json:"failed"`
	Shed     int64         `json:"shed"` // long prompts that were not sent, as too many waited

	ended []stream
}

// stream is one that ended within the window.
type stream struct {
	tokens int
	p99    time.Duration // of its gaps
}

// Goodput is the tokens a second of those streams that ended in the window with 99 of 100 gaps within the limit.
func (w Window) Goodput(limit time.Duration) float64 {
	n := 0
	for _, s := range w.ended {
		if s.p99 <= limit {
			n += s.tokens
		}
	}
	return float64(n) / w.Time.Seconds()
}

// StreamsPerS is how many streams ended in a second.
func (w Window) StreamsPerS() float64 { return float64(len(w.ended)) / w.Time.Seconds() }

// Target is a running cluster.
type Target struct {
	URL, Model, Mode string
	Round            int
	Progress         io.Writer // may be nil
}

// Alone gives the median time to the first token of a prompt when nothing else runs.
func (t Target) Alone(ctx context.Context, s Shape, prompt int) (time.Duration, error) {
	var all Sample
	p := s.plan(t, prompt, 2)
	p.Concurrency, p.Requests = 1, 5
	p.Each = func(r *client.Result, _ error) {
		if d, ok := r.TTFT(); ok {
			all.add(d)
		}
	}
	sum, err := load.Run(ctx, p, nil)
	if err != nil {
		return 0, err
	}
	if sum.OK != sum.Requests || len(all.values) == 0 {
		return 0, fmt.Errorf("%d of %d prompts of %d tokens were answered: %v", sum.OK, sum.Requests, prompt, sum.Errors)
	}
	return all.Quantile(0.5), nil
}

func (s Shape) plan(t Target, prompt, out int) load.Plan {
	return load.Plan{
		URL: t.URL, Model: t.Model, Prompt: load.Constant(prompt), Output: load.Constant(out), Vocab: s.Vocab, Stream: true,
		IgnoreEOS: true, Seed: s.Seed + uint64(prompt), Timeout: 2 * time.Minute,
	}
}

// maxLong bounds how many long prompts are under way: more means that the cluster does not keep up.
const maxLong = 64

// Measure runs the streams, and long prompts beside them at a rate (Poisson; 0: none), and gives what was seen after the
// warm-up. Its prompts are those of no other measurement: the nodes' caches know none of them.
func (t Target) Measure(ctx context.Context, s Shape, longRate float64) (Window, error) {
	if s.Seed += 1 << 32; longRate > 0 {
		s.Seed += 1 << 32
	}
	w := Window{Mode: t.Mode, Round: t.Round, Streams: s.Streams, LongRate: longRate, Time: s.Time}
	from := time.Now().Add(s.Warm)
	to := from.Add(s.Time)
	// The last streams are cut; what came of them counts.
	ctx, cancel := context.WithDeadline(ctx, to)
	defer cancel()
	var mu sync.Mutex // guards w
	streams := s.plan(t, s.Prompt, s.Out)
	streams.Concurrency, streams.Duration = s.Streams, s.Warm+s.Time
	streams.Each = func(r *client.Result, err error) {
		mu.Lock()
		defer mu.Unlock()
		w.see(r, err, from, to)
	}
	long := s.plan(t, s.Long, s.LongOut)
	long.Concurrency, long.Duration, long.Rate = maxLong, s.Warm+s.Time, longRate
	long.Each = func(r *client.Result, _ error) {
		mu.Lock()
		defer mu.Unlock()
		if d, ok := r.TTFT(); ok && r.Chunks[0].After(from) {
			w.LongTTFT.add(d)
		}
	}
	var both sync.WaitGroup
	var failed [2]error
	for i, p := range []load.Plan{streams, long} {
		if i == 1 && longRate == 0 {
			continue
		}
		both.Go(func() {
			var progress io.Writer
			if i == 0 {
				progress = t.Progress
			}
			sum, err := load.Run(ctx, p, progress)
			mu.Lock()
			defer mu.Unlock()
			failed[i] = err
			w.Shed += sum.Shed
			for kind, n := range sum.Errors {
				if kind != "cancelled" && kind != "timeout" { // cut at the end
					w.Failed += n
				}
			}
		})
	}
	both.Wait()
	for _, err := range failed {
		if err != nil {
			return w, err
		}
	}
	if len(w.ITL.values) == 0 {
		return w, fmt.Errorf("no stream ended within %v: measure for longer than a stream takes", s.Time)
	}
	return w, nil
}

// see takes the part of a stream that lies in [from, to). One that an error ended is no stream that ended.
func (w *Window) see(r *client.Result, err error, from, to time.Time) {
	if len(r.Chunks) == 0 {
		return
	}
	if first := r.Chunks[0]; !first.Before(from) && first.Before(to) {
		d, _ := r.TTFT()
		w.TTFT.add(d)
	}
	var own Sample
	for i := 1; i < len(r.Chunks); i++ {
		gap := r.Chunks[i].Sub(r.Chunks[i-1])
		own.add(gap)
		if at := r.Chunks[i]; !at.Before(from) && at.Before(to) {
			w.ITL.add(gap)
		}
	}
	if err != nil || r.End.Before(from) || !r.End.Before(to) || len(own.values) == 0 {
		return
	}
	tokens := len(r.Chunks)
	if r.Usage != nil {
		tokens = r.Usage.CompletionTokens
	}
	w.ended = append(w.ended, stream{tokens: tokens, p99: own.Quantile(0.99)})
}

// LongRate is how many long prompts a second keep the context node busy for the wanted part of its time, beside the
// prompts of the streams.
func LongRate(s Shape, streamsPerS float64, streamPrefill, longPrefill time.Duration) (float64, error) {
	left := s.Busy - streamsPerS*streamPrefill.Seconds()
	if left <= 0 {
		return 0, fmt.Errorf("%.1f streams a second whose prompts take %v each keep the context node busy for more than %.0f %% of its time: fewer streams, or longer ones", streamsPerS, streamPrefill, 100*s.Busy)
	}
	return left / longPrefill.Seconds(), nil
}
