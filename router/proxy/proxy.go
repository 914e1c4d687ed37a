// Package proxy is the router's public face and the life of a request: it parses, tokenizes, places, runs both legs under
// one context, relays the tokens, and hands one phase record per attempt to whoever keeps them. It owns no membership
// (router/pool does), no connections (router/upstream does) and no timelines (router/collect does).
//
// One goroutine runs a sub-request, one more its context leg; while tokens flow, a loop for many requests passes them on instead
// (flow). Sub-requests of one request share its writer under a mutex.
package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/router/keys"
	"meridian.internal/router/pool"
	"meridian.internal/router/timeline"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/poll"
)

// Serving styles, as records and --schedule name them.
const (
	Auto            = "auto"
	GenerationFirst = "generation_first"
	ContextFirst    = "context_first"
	Aggregated      = "aggregated"
)

// ErrOptions is returned when a proxy is made of options that do not fit.
var ErrOptions = errors.New("proxy: bad options")

// Timelines is where merged lines are read from.
type Timelines interface {
	Recent(limit int) []json.RawMessage
	Await(ctx context.Context, id string) (json.RawMessage, bool)
}

// Options of a proxy.
type Options struct {
	Name       string // of this router; it names the subject of the records
	Pool       *pool.Pool
	Client     *upstream.Client
	Loops      *poll.Loops // pass on the streams of nodes; nil: the goroutine of each request does
	Steady     *clock.Steady
	Schedule   string // auto, generation_first, context_first or aggregated
	Tokenizers *Tokenizers
	Begin      func(requestID string) // a request was accepted; its record will come
	Record     func(*phase.Record)    // takes the router's own records; must not block
	// Expect gives the merged line of a request once it is there; nil: there are none, and no headers that tell of it.
	Expect    func(requestID string) (line <-chan *timeline.Line, forget func())
	Timelines Timelines                              // nil: no /timelines
	Estimate  func(node.Info) (clock.Estimate, bool) // clock of a node against this router's; nil: none
	// Exchange takes the clock exchange that a leg was at the same time; the node is named by its key. nil: not wanted.
	Exchange   func(key string, id clock.ID, x ntp.Exchange)
	Keys       *keys.Store // API keys of clients; nil: everybody may do everything
	Metrics    prometheus.Registerer
	Logger     *slog.Logger
	NoBus      bool          // records of nodes cannot reach this router: its own is all that a timeline waits for
	MaxBody    int           // bytes of a request body; 0: 16 MiB
	MaxBodies  int64         // bytes of the bodies of all requests that have not ended; 0: 64 x MaxBody
	Timeout    time.Duration // longest life of a request; 0: 10 min
	ClientIdle time.Duration // a client that takes nothing for so long is cut; 0: 30 s
	MaxRunning int           // sub-requests that run at a time; 0: twice what the generation nodes have slots for
	Queue      int           // sub-requests that may wait for that; 0: 1,024
	QueueTime  time.Duration // longest wait; 0: 10 s
	Hedge      float64       // quantile of prefill times after which a second context node computes a prompt too; 0: never
}

// Proxy serves requests. Safe for concurrent use.
type Proxy struct {
	o   Options
	ids *minter
	met *metrics

	health *health
	door   *door
	bodies *bodies
}

const (
	defaultMaxBody    = 16 << 20
	defaultTimeout    = 10 * time.Minute
	defaultClientIdle = 30 * time.Second
	retryAfter        = time.Second // told to clients when no pair is there
)

// New makes a proxy.
func New(o Options) (*Proxy, error) {
	switch o.Schedule {
	case "":
		o.Schedule = Auto
	case Auto, GenerationFirst, ContextFirst, Aggregated:
	default:
		return nil, fmt.Errorf("%w: schedule %q: want %s, %s, %s or %s", ErrOptions, o.Schedule, Auto, GenerationFirst, ContextFirst, Aggregated)
	}
	if o.Pool == nil || o.Client == nil || o.Steady == nil || o.Name == "" {
		return nil, fmt.Errorf("%w: name, pool, client and clock are needed", ErrOptions)
	}
	if o.Hedge < 0 || o.Hedge >= 1 {
		return nil, fmt.Errorf("%w: hedge quantile %v: want 0 or more, and less than 1", ErrOptions, o.Hedge)
	}
	if o.Begin == nil {
		o.Begin = func(string) {}
	}
	if o.Record == nil {
		o.Record = func(*phase.Record) {}
	}
	if o.Exchange == nil {
		o.Exchange = func(string, clock.ID, ntp.Exchange) {}
	}
	if o.Estimate == nil {
		o.Estimate = func(node.Info) (clock.Estimate, bool) { return clock.Estimate{}, false }
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MaxBody == 0 {
		o.MaxBody = defaultMaxBody
	}
	if o.MaxBodies == 0 {
		o.MaxBodies = bodiesPerBody * int64(o.MaxBody)
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.ClientIdle == 0 {
		o.ClientIdle = defaultClientIdle
	}
	if o.Queue == 0 {
		o.Queue = defaultQueue
	}
	if o.QueueTime == 0 {
		o.QueueTime = defaultQueueTime
	}
	health, door, all := newHealth(o.Steady.Now, o.Hedge), newDoor(&o), &bodies{limit: o.MaxBodies}
	met, err := newMetrics(o.Metrics, health, door, all, o.Pool)
	if err != nil {
		return nil, err
	}
	return &Proxy{o: o, ids: newMinter(o.Name, o.Steady), met: met, health: health, door: door, bodies: all}, nil
}

// Ready tells whether a request could be placed now; the error says why not.
func (p *Proxy) Ready() error {
	return p.o.Pool.Ready(p.Serves())
}

// styleOf fixes the serving style of a choice.
func (p *Proxy) styleOf(c *pool.Choice) string {
	switch {
	case c.Ctx == nil:
		return Aggregated
	case p.o.Schedule == ContextFirst, c.Ctx.Foreign, c.Ctx.KVAddr == "":
		return ContextFirst
	default:
		return GenerationFirst
	}
}

// stopCause names the error that ended ctx, in the words of a client.
func stopCause(ctx context.Context) *api.Error {
	cause := context.Cause(ctx)
	var known *api.Error
	switch {
	case errors.As(cause, &known) && known.Stage == "": // this router stops: all its requests have this cause
		e := *known
		e.Stage = "relay"
		return &e
	case errors.As(cause, &known):
		return known
	case errors.Is(cause, context.DeadlineExceeded):
		return &api.Error{Code: 504, Type: api.TypeTimeout, Stage: "relay", Retryable: true, Message: "the request's time is over"}
	default:
		return &api.Error{Code: statusClientGone, Type: api.TypeCancelled, Stage: "relay", Message: "the client closed the connection"}
	}
}

// statusClientGone is nginx's status for a client that left; nobody receives it.
const statusClientGone = 499
