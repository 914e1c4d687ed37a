package routerbench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"meridian.internal/shared/clock"
)

// load is one row of the closed loop.
type load struct {
	name    string
	streams int
	tokens  int
	prompt  int  // bytes
	pace    Pace // of the workers
}

func loads() []load {
	const prompt = 2 << 10
	return []load{
		{name: "t1-c1", streams: 1, tokens: 1, prompt: prompt},
		{name: "t1-c16", streams: 16, tokens: 1, prompt: prompt},
		{name: "t64-c16", streams: 16, tokens: 64, prompt: prompt},
		{name: "t256-c64", streams: 64, tokens: 256, prompt: prompt},
		{name: "64KB-c16", streams: 16, tokens: 1, prompt: 64 << 10},
		{name: "paced-c128", streams: 128, tokens: 64, prompt: prompt, pace: Pace{Gap: 5 * time.Millisecond}},
	}
}

// sample is what one subject did in one turn.
type sample struct {
	requests int
	tokens   int
	seconds  float64
	cpu      time.Duration // of the subject's processes
	latency  []int64       // ns, sorted; of whole requests
	delay    []int64       // ns, sorted; of paced tokens from the worker's write to the client's read
	failed   int
	err      error // the first failure
}

func (s *sample) perSecond(n int) float64 { return float64(n) / s.seconds }

// percentile is by nearest rank; 0 without values.
func percentile(sorted []int64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return float64(sorted[min(max(rank, 1), len(sorted))-1])
}

// warmTime is how long a turn runs at most before it is counted: connections are opened, heaps reach their size.
const warmTime = 300 * time.Millisecond

// lateTime is how long an answer may go on after its turn. It tells slow from never.
const lateTime = 10 * time.Second

// turn plays a load against a subject for d.
func (l load) turn(ctx context.Context, steady *clock.Steady, s *subject, d time.Duration) (*sample, error) {
	answer := time.Duration(l.tokens) * l.pace.Gap
	warm := min(warmTime, d) + answer
	t := &turn{load: l, subject: s, steady: steady}
	ctx, cancel := context.WithTimeout(ctx, warm+d)
	defer cancel()
	var all sync.WaitGroup
	parts := make([]sample, l.streams)
	start := time.Now()
	t.by = start.Add(warm + d + lateTime)
	t.from, t.to = steady.Now()+int64(warm), steady.Now()+int64(warm+d)
	for i := range parts {
		all.Go(func() {
			time.Sleep(answer * time.Duration(i) / time.Duration(l.streams)) // paced streams begin one after another, not all at once
			t.loop(ctx, &parts[i])
		})
	}
	time.Sleep(time.Until(start.Add(warm)))
	before, err := s.cpu()
	if err != nil {
		return nil, err
	}
	time.Sleep(time.Until(start.Add(warm + d)))
	after, err := s.cpu()
	all.Wait()
	if err != nil {
		return nil, err
	}
	sum := &sample{seconds: d.Seconds(), cpu: after - before}
	for _, p := range parts {
		sum.requests, sum.tokens, sum.failed = sum.requests+p.requests, sum.tokens+p.tokens, sum.failed+p.failed
		sum.latency, sum.delay = append(sum.latency, p.latency...), append(sum.delay, p.delay...)
		if sum.err == nil {
			sum.err = p.err
		}
	}
	slices.Sort(sum.latency)
	slices.Sort(sum.delay)
	return sum, nil
}

type turn struct {
	load
	subject  *subject
	steady   *clock.Steady
	from, to int64     // of what counts, steady ns
	by       time.Time // when the last answer must have ended
}

// loop is one client: a request, its whole answer, the next request.
func (t *turn) loop(ctx context.Context, out *sample) {
	c, err := t.subject.connect(t.load)
	if err != nil {
		out.failed, out.err = 1, fmt.Errorf("connect to %s: %w", t.subject.name, err)
		return
	}
	defer c.close()
	c.endBy(t.by)
	if t.pace.Gap > 0 {
		c.last().delay = func(sent int64) {
			if now := t.steady.Now(); now >= t.from && now < t.to {
				out.delay = append(out.delay, now-sent)
				out.tokens++
			}
		}
	}
	for ctx.Err() == nil {
		start := t.steady.Now()
		err := c.play()
		end := t.steady.Now()
		switch {
		case errors.Is(ctx.Err(), context.Canceled): // somebody wants an end: the subject may be gone
			return
		case err != nil:
			out.failed, out.err = 1, err
			return
		case end >= t.to:
			return
		case end < t.from:
			continue
		}
		out.requests++
		out.latency = append(out.latency, end-start)
		if t.pace.Gap == 0 {
			out.tokens += t.load.tokens
		}
	}
}
