package worker

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/phase"
)

// origin is what the headers say of where a request came from.
type origin struct {
	receivedNS  int64
	router      string
	requestID   string
	clientID    string
	sub         int
	attempt     int
	traceparent string
	probe       bool
	streamed    *bool
	limit       time.Duration
	kvWait      time.Duration
	metrics     bool
}

// readOrigin reads the control headers; what is malformed is refused, since a wrong deadline or number is worse than none.
func readOrigin(h http.Header, receivedNS int64, mint func() string) (origin, *api.Error) {
	o := origin{
		receivedNS: receivedNS, router: h.Get(api.HeaderRouter), requestID: h.Get(api.HeaderRouterRequest),
		clientID: h.Get(api.HeaderRequestID), traceparent: h.Get(api.HeaderTraceparent),
		probe: h.Get(api.HeaderProbe) == "1", metrics: h.Get(api.HeaderReturnMetrics) == "1",
	}
	for _, n := range []struct{ header, v string }{{api.HeaderRouter, o.router}, {api.HeaderRouterRequest, o.requestID}} {
		if len(n.v) > maxOriginName {
			o.router, o.requestID = noRouter, mint() // the record of the refusal is a record too
			return o, api.Invalid(n.header, "header %s: %d bytes, at most %d", n.header, len(n.v), maxOriginName)
		}
	}
	if o.router == "" {
		o.router = noRouter
	}
	if o.requestID == "" {
		o.requestID = mint()
	}
	if v := h.Get(api.HeaderStreamed); v != "" {
		b := v == "1"
		o.streamed = &b
	}
	var ms, waitMS int
	for _, n := range []struct {
		header string
		to     *int
	}{{api.HeaderSub, &o.sub}, {api.HeaderAttempt, &o.attempt}, {api.HeaderDeadline, &ms}, {api.HeaderKVWait, &waitMS}} {
		v := h.Get(n.header)
		if v == "" {
			continue
		}
		i, err := strconv.Atoi(v)
		if err != nil || i < 0 || i > 1<<30 {
			return o, api.Invalid(n.header, "header %s: %q is not a whole number of 0 or more", n.header, v)
		}
		*n.to = i
	}
	o.limit, o.kvWait = time.Duration(ms)*time.Millisecond, time.Duration(waitMS)*time.Millisecond
	return o, nil
}

// maxOriginName bounds names that become a part of a subject: NATS cuts the connection at one of some thousand bytes.
const maxOriginName = 128

// noRouter is the router of a direct request.
const noRouter = "none"

// attempt is one leg on its way, and the record of it.
type attempt struct {
	n    *Node
	leg  *Leg
	text *text
	rec  *phase.Record
	seq  Sequence

	done     *infer.Done
	tokens   int // produced here
	finish   string
	stop     []byte // stop_reason
	started  int64  // when the runner got the leg
	sentNS   int64
	firstNS  int64
	lastNS   int64
	told     ledger.Tokens // what the ledger is told of the tokens
	failure  *api.Error
	finished bool // the record is filled
}

// start hands the leg to its runner.
func (a *attempt) start(ctx context.Context) *api.Error {
	a.started = a.n.o.Steady.Now()
	run := a.n.runner(a.leg.Request.Kind)
	if run == nil {
		return a.fail(api.Invalid("disaggregated_params.request_type", "this node (%s) does not serve %s", a.n.o.Role, a.leg.Request.Kind))
	}
	seq, err := run(ctx, a.leg)
	if err != nil {
		return a.fail(a.n.explain(ctx, err))
	}
	a.seq = seq
	return nil
}

// next gives the next piece of the choice; last is true with the final one.
func (a *attempt) next(ctx context.Context) (p piece, last bool, err *api.Error) {
	tokens, done, nerr := a.seq.Next(ctx)
	if nerr != nil {
		return piece{}, false, a.abandon(a.n.explain(ctx, nerr))
	}
	var silent *int32
	if done != nil {
		silent = done.StopToken
	}
	p = a.text.push(tokens, silent)
	a.note(tokens[:len(p.ids)])
	if done == nil && !a.text.ended {
		return p, false, nil
	}
	if done == nil {
		done = a.cut()
	}
	a.done = done
	if done.Err != nil && !a.text.ended {
		return piece{}, false, a.fail(a.n.explain(ctx, done.Err))
	}
	p.text += a.text.end()
	a.finish, a.stop = a.text.reason(done)
	return p, true, nil
}

func (a *attempt) note(tokens []infer.Token) {
	if len(tokens) == 0 {
		return
	}
	if a.firstNS == 0 {
		a.firstNS = tokens[0].AtNS
	}
	a.lastNS = tokens[len(tokens)-1].AtNS
	a.tokens += len(tokens)
	a.told.Add(tokens)
}

// cutLimit is how long a cancelled sequence may take to end: the step in flight, or the transfer's frame.
const cutLimit = 2 * time.Second

// cut cancels the sequence and waits for its end, so that the report is there.
func (a *attempt) cut() *infer.Done {
	a.seq.Cancel()
	ctx, cancel := context.WithTimeout(context.Background(), cutLimit)
	defer cancel()
	for {
		_, done, err := a.seq.Next(ctx)
		if done != nil {
			return done
		}
		if err != nil {
			return &infer.Done{Reason: infer.FinishCancelled, Err: err}
		}
	}
}

// abandon ends a sequence that nobody reads any more.
func (a *attempt) abandon(e *api.Error) *api.Error {
	if a.seq != nil && a.done == nil {
		a.done = a.cut()
	}
	return a.fail(e)
}

func (a *attempt) fail(e *api.Error) *api.Error {
	e.RequestID = a.rec.RequestID
	if a.failure == nil {
		a.failure = e
	}
	return e
}

// explain gives the error that a client sees.
func (n *Node) explain(ctx context.Context, err error) *api.Error {
	var known *api.Error
	switch {
	case errors.As(err, &known):
		c := *known
		return &c
	case errors.As(context.Cause(ctx), &known): // this process stops
		c := *known
		c.Stage = n.stage()
		return &c
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &api.Error{Code: http.StatusGatewayTimeout, Type: api.TypeTimeout, Stage: n.stage(), Message: "the request's time is over: " + err.Error()}
	case ctx.Err() != nil:
		return &api.Error{Code: statusClientGone, Type: api.TypeCancelled, Stage: n.stage(), Message: "the client went away: " + err.Error()}
	}
	if n.o.Kind != nil {
		if e := explainKind(n.o.Kind(err), n.stage(), err.Error()); e != nil {
			return e
		}
	}
	return &api.Error{Code: http.StatusInternalServerError, Type: api.TypeServer, Stage: n.stage(), Retryable: true, Message: err.Error()}
}

// statusClientGone is nginx's status for a client that closed the connection; nobody reads it.
const statusClientGone = 499

func (n *Node) stage() string {
	if n.o.Role == phase.Ctx {
		return "ctx"
	}
	return "gen"
}
