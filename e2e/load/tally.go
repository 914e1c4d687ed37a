package load

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"meridian.internal/e2e/client"
)

// Summary is the result of a run. Times are measured at the client.
type Summary struct {
	Requests     int64            `json:"requests"` // ended, shed ones not counted
	OK           int64            `json:"ok"`
	Shed         int64            `json:"shed"` // open loop: arrivals over the concurrency limit, not sent
	Errors       map[string]int64 `json:"errors"`
	FirstError   string           `json:"first_error,omitempty"`
	RetryAfter   int64            `json:"retry_after"` // refused with 429 or 503 and a Retry-After header
	DurationNS   int64            `json:"duration_ns"`
	RequestsPerS float64          `json:"requests_per_s"` // successful ones
	PromptTokens int64            `json:"prompt_tokens"`
	CachedTokens int64            `json:"cached_tokens"` // of the prompts, as the server says
	SharedTokens int64            `json:"shared_tokens"` // of the prompts, that were in others before: the shared prefix, or what a conversation said already
	ReusedTokens int64            `json:"reused_tokens"` // of these, cached
	OutputTokens int64            `json:"output_tokens"`
	OutputPerS   float64          `json:"output_tokens_per_s"`
	TTFT         Stats            `json:"ttft"`
	ITL          Stats            `json:"itl"`
	TPOT         Stats            `json:"tpot"`
	E2E          Stats            `json:"e2e"`
}

type tally struct {
	start time.Time

	mu                   sync.Mutex // guards all below
	s                    Summary
	running              int
	ttft, itl, tpot, e2e Histogram
}

func newTally(start time.Time) *tally {
	return &tally{start: start, s: Summary{Errors: map[string]int64{}}}
}

func (t *tally) begin() {
	t.mu.Lock()
	t.running++
	t.mu.Unlock()
}

func (t *tally) shed() {
	t.mu.Lock()
	t.s.Shed++
	t.mu.Unlock()
}

// end takes in an answer to a prompt of which so many tokens were in others before.
func (t *tally) end(r *client.Result, err error, shared int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running--
	t.s.Requests++
	if err != nil {
		t.s.Errors[Kind(err)]++
		if t.s.FirstError == "" {
			t.s.FirstError = err.Error()
		}
		var status *client.StatusError
		if errors.As(err, &status) && status.RetryAfter != "" {
			t.s.RetryAfter++
		}
		return
	}
	t.s.OK++
	t.e2e.Add(r.E2E().Nanoseconds())
	if d, ok := r.TTFT(); ok {
		t.ttft.Add(d.Nanoseconds())
	}
	for i := 1; i < len(r.Chunks); i++ {
		t.itl.Add(r.Chunks[i].Sub(r.Chunks[i-1]).Nanoseconds())
	}
	if r.Usage == nil {
		return
	}
	t.s.PromptTokens += int64(r.Usage.PromptTokens)
	shared = min(shared, r.Usage.PromptTokens)
	t.s.SharedTokens += int64(shared)
	if d := r.Usage.PromptTokensDetails; d != nil {
		t.s.CachedTokens += int64(d.CachedTokens)
		t.s.ReusedTokens += int64(min(d.CachedTokens, shared))
	}
	n := int64(r.Usage.CompletionTokens)
	t.s.OutputTokens += n
	if n > 1 && len(r.Chunks) > 1 {
		t.tpot.Add(r.Chunks[len(r.Chunks)-1].Sub(r.Chunks[0]).Nanoseconds() / (n - 1))
	}
}

func (t *tally) summary(now time.Time) Summary {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.s
	s.DurationNS = now.Sub(t.start).Nanoseconds()
	if seconds := now.Sub(t.start).Seconds(); seconds > 0 {
		s.RequestsPerS = float64(s.OK) / seconds
		s.OutputPerS = float64(s.OutputTokens) / seconds
	}
	s.TTFT, s.ITL, s.TPOT, s.E2E = t.ttft.Stats(), t.itl.Stats(), t.tpot.Stats(), t.e2e.Stats()
	return s
}

// report writes a line of progress every second until the returned function is called.
func (t *tally) report(w io.Writer, total int) func() {
	if w == nil {
		return func() {}
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case now := <-tick.C:
				t.line(w, now, total)
			}
		}
	}()
	return func() { close(end); <-ended }
}

func (t *tally) line(w io.Writer, now time.Time, total int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	of := ""
	if total > 0 {
		of = fmt.Sprintf(" of %d", total)
	}
	fmt.Fprintf(w, "%4.0fs  %d%s done, %d running, %d errors, %d shed\n",
		now.Sub(t.start).Seconds(), t.s.Requests, of, t.running, t.s.Requests-t.s.OK, t.s.Shed)
}
