// Package qualify proves that pairs of nodes work, by a real generation through each: one token on the context node, one
// on the generation node, with the KV between them. Probes are marked, so that no count of requests, usage or timeline
// has them. Which probes are due, and what follows from their results, the pool decides.
package qualify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/sse"
)

// Options of a Prober. All are needed.
type Options struct {
	Router   string // name of this router
	Pool     *pool.Pool
	Client   *upstream.Client
	Now      func() int64 // steady clock, ns
	NextID   func() int64 // disagg_request_id
	Schedule func() (aggregated, fallback bool)
}

// Prober makes the probes that are due.
type Prober struct{ o Options }

// New makes a prober.
func New(o Options) *Prober { return &Prober{o} }

const (
	lookEvery = 50 * time.Millisecond
	timeout   = 15 * time.Second // of one probe: a model may be slow at its first step
	parallel  = 8
	maxAnswer = 1 << 20
)

// Run probes until ctx ends.
func (q *Prober) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	slots := make(chan struct{}, parallel)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		for _, b := range q.o.Pool.Due(q.o.Schedule()) {
			running.Go(func() {
				select {
				case slots <- struct{}{}:
					defer func() { <-slots }()
					q.o.Pool.Probed(b, q.probe(ctx, b))
				case <-ctx.Done():
				}
			})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// errBusy is returned when a node has no room: that says nothing of the pair.
var errBusy = errors.New("qualify: the node has no room now")

func (q *Prober) probe(ctx context.Context, b pool.Probe) pool.Result {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	start := q.o.Now()
	var err error
	if b.Ctx == nil {
		err = q.generate(ctx, b.Gen, q.body(b.Model, true, nil), b.Foreign)
	} else {
		err = q.pair(ctx, b)
	}
	return pool.Result{Err: err, Busy: errors.Is(err, errBusy), TookNS: q.o.Now() - start}
}

// pair sends the context leg, then the generation leg with what its answer says: any worker can do that.
func (q *Prober) pair(ctx context.Context, b pool.Probe) error {
	id, style := q.o.NextID(), api.ContextFirst
	params, err := json.Marshal(api.DisaggParams{RequestType: api.ContextOnly, DisaggRequestID: &id, ScheduleStyle: &style})
	if err != nil {
		return err
	}
	res, err := q.send(ctx, b.Ctx, q.body(b.Model, false, params), b.Foreign)
	if err != nil {
		return err
	}
	defer res.Close()
	text, err := io.ReadAll(io.LimitReader(res, maxAnswer))
	if err != nil {
		return fmt.Errorf("context node %s: read its answer: %w", b.Ctx.Name, err)
	}
	ans, err := api.ParseCtxAnswer(text)
	if err != nil {
		return fmt.Errorf("context node %s: %w", b.Ctx.Name, err)
	}
	fields, err := api.SplitObject(nil, ans.Choices[0].Disagg)
	if err != nil {
		return fmt.Errorf("context node %s: its answer has no disaggregated_params: %w", b.Ctx.Name, err)
	}
	params = api.AppendPatched(nil, fields, []api.Set{
		{Key: "request_type", Value: []byte(`"` + api.GenerationOnly + `"`)},
		{Key: "schedule_style", Value: strconv.AppendInt(nil, api.ContextFirst, 10)},
	})
	return q.generate(ctx, b.Gen, q.body(b.Model, true, params), b.Foreign)
}

// body is a request for two tokens: the context node gives the first, and the second needs the KV.
func (q *Prober) body(model string, stream bool, params []byte) []byte {
	return api.AppendPatched(nil, nil, []api.Set{
		{Key: "model", Value: jsonline.AppendString(nil, model)},
		{Key: "prompt", Value: []byte(`"Is anybody there?"`)},
		{Key: "max_tokens", Value: []byte("2")},
		{Key: "temperature", Value: []byte("0")},
		{Key: "ignore_eos", Value: []byte("true")},
		{Key: "stream", Value: strconv.AppendBool(nil, stream)},
		{Key: "disaggregated_params", Value: params},
	})
}

// generate reads a stream to its end: it must bring something, and no error.
func (q *Prober) generate(ctx context.Context, t *pool.Target, body []byte, foreign bool) error {
	res, err := q.send(ctx, t, body, foreign)
	if err != nil {
		return err
	}
	defer res.Close()
	if !strings.HasPrefix(res.ContentType, sse.ContentType) {
		return fmt.Errorf("generation node %s: answered with %q, want %q", t.Name, res.ContentType, sse.ContentType)
	}
	r := sse.NewReader(res, maxAnswer)
	chunks := 0
	for {
		ev, err := r.Next()
		switch {
		case errors.Is(err, io.EOF) && chunks > 0, err == nil && ev.Done() && chunks > 0:
			return nil
		case err != nil:
			return fmt.Errorf("generation node %s: its stream: %w", t.Name, err)
		case ev.Done():
			return fmt.Errorf("generation node %s: its stream is empty", t.Name)
		}
		chunk, err := api.ReadChunk(ev.Data, false)
		if err != nil {
			return fmt.Errorf("generation node %s: %w", t.Name, err)
		}
		if chunk.Error != nil {
			return fmt.Errorf("generation node %s: %w", t.Name, api.ParseError(http.StatusBadGateway, chunk.Error, "gen"))
		}
		chunks++
	}
}

// send posts a leg. No room now (429, 503) is errBusy.
func (q *Prober) send(ctx context.Context, t *pool.Target, body []byte, foreign bool) (*upstream.Response, error) {
	left := int64(timeout / time.Millisecond)
	if d, ok := ctx.Deadline(); ok {
		left = max(time.Until(d).Milliseconds(), 1)
	}
	res, err := q.o.Client.Do(ctx, &upstream.Request{
		URL: t.URL, Path: "/v1/completions", Body: [][]byte{body}, Foreign: foreign,
		Header: fmt.Appendf(nil, "%s: 1\r\n%s: %s\r\n%s: %d\r\n", api.HeaderProbe, api.HeaderRouter, q.o.Router, api.HeaderDeadline, left),
	})
	if err != nil {
		return nil, fmt.Errorf("%s node %s: %w", t.Role, t.Name, err)
	}
	if res.Status == http.StatusOK {
		return res, nil
	}
	defer res.Close()
	text, err := io.ReadAll(io.LimitReader(res, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("%s node %s: status %d: %w", t.Role, t.Name, res.Status, err)
	}
	if res.Status == http.StatusTooManyRequests || res.Status == http.StatusServiceUnavailable {
		return nil, fmt.Errorf("%w: %s node %s", errBusy, t.Role, t.Name)
	}
	return nil, fmt.Errorf("%s node %s: %w", t.Role, t.Name, api.ParseError(res.Status, text, string(t.Role)))
}
