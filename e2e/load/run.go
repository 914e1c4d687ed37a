package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"meridian.internal/e2e/client"
)

// Plan says what to send.
type Plan struct {
	URL         string
	Model       string
	Requests    int           // in all; 0: until Duration is over
	Duration    time.Duration // no new request after it; 0: no limit
	Concurrency int           // closed loop: so many at a time. Open loop: at most so many; more are shed
	Rate        float64       // open loop: arrivals a second (Poisson); 0: closed loop
	Prompt      Dist
	Output      Dist
	Prefix      int // first tokens of each prompt that others have too
	Prefixes    int // how many different ones there are, in turn; 0: one
	Vocab       int // token ids are drawn from [firstID, Vocab)
	Stream      bool
	IgnoreEOS   bool
	Temperature float64
	Seed        uint64
	Timeout     time.Duration // of one request; 0: none
	// Each gets every answer, also what had come of one that failed and why, from the goroutine that read it; nil: nobody does.
	Each func(*client.Result, error)
}

// firstID keeps special tokens, which have the lowest ids, out of prompts.
const firstID = 10

// Check says which field cannot be used.
func (p Plan) Check() error {
	switch {
	case p.Requests < 0 || p.Duration < 0:
		return fmt.Errorf("--requests %d --duration %v: want 0 or more", p.Requests, p.Duration)
	case p.Requests == 0 && p.Duration == 0:
		return errors.New("--requests and --duration: give one, or the load has no end")
	case p.Concurrency < 1:
		return fmt.Errorf("--concurrency %d: want at least 1", p.Concurrency)
	case p.Rate < 0:
		return fmt.Errorf("--rate %v: want 0 or more", p.Rate)
	case p.Prefixes < 0 || p.Prefix < 0:
		return fmt.Errorf("--prefix %d --prefixes %d: want 0 or more", p.Prefix, p.Prefixes)
	case p.Vocab <= firstID:
		return fmt.Errorf("--vocab %d: want more than %d", p.Vocab, firstID)
	}
	return nil
}

// maker makes the requests of a plan, in order, from one seed. It has one user.
type maker struct {
	plan     Plan
	r        *rand.Rand
	prefixes [][]int
	made     int
	arrived  time.Duration // from the start to the last arrival
}

func newMaker(p Plan) *maker {
	m := &maker{plan: p, r: rand.New(rand.NewPCG(p.Seed, 0x6d6572696469616e))}
	for range max(p.Prefixes, 1) {
		m.prefixes = append(m.prefixes, m.ids(p.Prefix))
	}
	return m
}

func (m *maker) ids(n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = firstID + m.r.IntN(m.plan.Vocab-firstID)
	}
	return ids
}

func (m *maker) next() client.Request {
	n := m.plan.Prompt.Draw(m.r)
	prefix := m.prefixes[m.made%len(m.prefixes)]
	prompt := append(append(make([]int, 0, n), prefix[:min(n, len(prefix))]...), m.ids(max(0, n-len(prefix)))...)
	f := map[string]any{
		"model": m.plan.Model, "prompt": prompt, "max_tokens": m.plan.Output.Draw(m.r), "temperature": m.plan.Temperature,
		"stream": m.plan.Stream, "seed": m.r.Int32(),
	}
	if m.plan.IgnoreEOS {
		f["ignore_eos"] = true
	}
	if m.plan.Stream {
		f["stream_options"] = map[string]any{"include_usage": true}
	}
	m.made++
	return client.Request{Fields: f}
}

// arrival is the time from the start to the next arrival of a Poisson process. It does not begin at the arrival before: what a
// request costs the sender, and a timer that is late, would lower the rate.
func (m *maker) arrival() time.Duration {
	m.arrived += time.Duration(m.r.ExpFloat64() / m.plan.Rate * float64(time.Second))
	return m.arrived
}

// Run sends the load and returns the summary. Progress goes to progress (may be nil) once a second. When ctx ends, running
// requests are cancelled and the summary covers what had ended.
func Run(ctx context.Context, p Plan, progress io.Writer) (Summary, error) {
	if err := p.Check(); err != nil {
		return Summary{}, err
	}
	c := client.New(p.URL, p.Concurrency)
	defer c.Close()
	t := newTally(time.Now())
	stop := t.report(progress, p.Requests)
	defer stop()
	var wg sync.WaitGroup
	free := make(chan struct{}, p.Concurrency)
	m := newMaker(p)
	admitting := ctx
	if p.Duration > 0 {
		var stop context.CancelFunc
		admitting, stop = context.WithDeadline(ctx, t.start.Add(p.Duration))
		defer stop()
	}
	for (p.Requests == 0 || m.made < p.Requests) && p.admit(admitting, t.start, m, free) {
		r := m.next()
		if p.Rate > 0 && len(free) == cap(free) {
			t.shed()
			continue
		}
		free <- struct{}{}
		t.begin()
		wg.Go(func() {
			defer func() { <-free }()
			res, err := one(ctx, c, p.Timeout, r)
			t.end(res, err, p.Prefix)
			if p.Each != nil {
				p.Each(res, err)
			}
		})
	}
	wg.Wait()
	return t.summary(time.Now()), nil
}

// admit waits for the moment of the next request: an arrival, or a free place. It returns false when ctx ended.
func (p Plan) admit(ctx context.Context, start time.Time, m *maker, free chan struct{}) bool {
	if p.Rate > 0 {
		timer := time.NewTimer(time.Until(start.Add(m.arrival())))
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return ctx.Err() == nil // both may have come
		}
	}
	select {
	case <-ctx.Done():
		return false
	case free <- struct{}{}:
		<-free // only this goroutine fills the channel, so the place stays free
		return ctx.Err() == nil
	}
}

func one(ctx context.Context, c *client.Client, timeout time.Duration, r client.Request) (*client.Result, error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return c.Do(ctx, r)
}

// Kind names an error for the summary.
func Kind(err error) string {
	var status *client.StatusError
	var netErr net.Error
	var op *net.OpError
	switch {
	case errors.As(err, &status) && status.Status != 0:
		return fmt.Sprintf("status_%d_%s", status.Status, status.Stage)
	case errors.As(err, &status):
		return "stream_error_" + status.Stage
	case errors.Is(err, client.ErrNoEnd), errors.Is(err, io.ErrUnexpectedEOF):
		return "truncated"
	case errors.Is(err, context.Canceled):
		return "cancelled"
	case errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	case errors.As(err, &op) && op.Op == "dial":
		return "connect"
	default:
		return "other"
	}
}
