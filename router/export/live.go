package export

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/jsonline"
)

const (
	liveQueue   = 4096 // requests that wait for the collector; further ones are dropped
	liveBatch   = 64   // requests in one POST
	liveTimeout = 5 * time.Second
	liveFirst   = 200 * time.Millisecond // until the first retry; then twice as long each time
	liveLongest = 5 * time.Second
	liveGiveUp  = time.Minute // after this a batch is dropped
)

// Live sends requests to an OpenTelemetry collector as they end: OTLP over HTTP, in JSON. What the collector cannot take is
// tried again for a minute; what does not fit into the queue meanwhile is dropped. Both are counted, and nobody waits.
type Live struct {
	endpoint string
	client   *http.Client
	log      *slog.Logger
	queue    chan *timeline.Line
	failing  bool // owned by Run

	sent, dropped, retries prometheus.Counter
}

// NewLive checks the URL of a collector; without a path /v1/traces is asked.
func NewLive(endpoint string, log *slog.Logger) (*Live, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("OTLP endpoint %q: want http://host:port", endpoint)
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/v1/traces"
	}
	if log == nil {
		log = slog.Default()
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "meridian_otlp_" + name + "_total", Help: help})
	}
	return &Live{
		endpoint: u.String(), client: &http.Client{Timeout: liveTimeout}, log: log, queue: make(chan *timeline.Line, liveQueue),
		sent:    counter("sent", "Requests that the OpenTelemetry collector took."),
		dropped: counter("dropped", "Requests that were not sent: the queue was full, or the collector did not take them in time."),
		retries: counter("retries", "Posts that were tried again."),
	}, nil
}

// Register adds its counters to reg.
func (v *Live) Register(reg prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{v.sent, v.dropped, v.retries} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register OTLP metrics: %w", err)
		}
	}
	return nil
}

// Add queues a request. It never waits.
func (v *Live) Add(l *timeline.Line) {
	select {
	case v.queue <- l:
	default:
		v.dropped.Inc()
	}
}

// Run sends until ctx ends; then what is queued gets one more try.
func (v *Live) Run(ctx context.Context) error {
	defer v.client.CloseIdleConnections()
	for {
		select {
		case <-ctx.Done():
			v.drain(ctx)
			return nil
		case l := <-v.queue:
			v.deliver(ctx, v.batch(l))
		}
	}
}

// drain tries once to send what is queued when the router ends.
func (v *Live) drain(ctx context.Context) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), liveTimeout)
	defer cancel()
	for {
		select {
		case l := <-v.queue:
			lines := v.batch(l)
			if _, err := v.post(last, body(lines)); err != nil {
				v.dropped.Add(float64(len(lines) + len(v.queue)))
				return
			}
			v.sent.Add(float64(len(lines)))
		default:
			return
		}
	}
}

// batch takes what is queued already.
func (v *Live) batch(first *timeline.Line) []*timeline.Line {
	lines := []*timeline.Line{first}
	for len(lines) < liveBatch {
		select {
		case l := <-v.queue:
			lines = append(lines, l)
		default:
			return lines
		}
	}
	return lines
}

func body(lines []*timeline.Line) []byte {
	w := &jsonline.Writer{}
	w.Open('{')
	w.OpenKey("resourceSpans", '[')
	for _, l := range lines {
		resourceSpans(w, l)
	}
	w.Close(']')
	w.Close('}')
	return w.B
}

// deliver posts a batch until the collector takes it, refuses it for good, or the time is over.
func (v *Live) deliver(ctx context.Context, lines []*timeline.Line) {
	limit, cancel := context.WithTimeout(ctx, liveGiveUp)
	defer cancel()
	text := body(lines)
	for wait := liveFirst; ; wait = min(2*wait, liveLongest) {
		again, err := v.post(context.WithoutCancel(ctx), text) // the end does not cut off what is on its way
		if err == nil {
			v.sent.Add(float64(len(lines)))
			if v.failing {
				v.failing = false
				v.log.Info("the OpenTelemetry collector takes spans again", "url", v.endpoint)
			}
			return
		}
		if !v.failing {
			v.failing = true
			v.log.Warn("the OpenTelemetry collector does not take spans", "url", v.endpoint, "error", err)
		}
		if !again || !pause(limit, wait) {
			v.dropped.Add(float64(len(lines)))
			return
		}
		v.retries.Inc()
	}
}

// pause waits for d; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// post sends one body; again says whether the same body may be taken later.
func (v *Live) post(ctx context.Context, text []byte) (again bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, v.endpoint, bytes.NewReader(text))
	if err != nil {
		return false, fmt.Errorf("post to %s: %w", v.endpoint, err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := v.client.Do(req)
	if err != nil {
		return true, err
	}
	defer res.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10)) // so that the connection is kept
	switch res.StatusCode {
	case http.StatusOK, http.StatusAccepted, http.StatusNoContent:
		return false, nil
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true, errors.New(res.Status)
	}
	return false, errors.New(res.Status)
}
