package proxy

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/router/admit"
	"meridian.internal/router/keys"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// session is one request of a client.
type session struct {
	p        *Proxy
	w        *echo.Response
	rc       http.ResponseController
	req      *api.Request
	id       string // the router's own
	clientID string
	// principal is the id of the API key that the request came with, fit for logs and metric labels; "" where no keys
	// are configured.
	principal string
	who       *keys.Principal // counts the request against the limits of its key; nil: there are no keys
	lowered   bool            // req.Priority is what the key allows, not what the body says
	unpinned  bool            // the key does not allow the body's prompt_cache_retention
	trace     string
	perf      bool // the client asked for what its request cost
	times     *requestTimes
	life      time.Duration // longest life of the request, from its arrival
	bodyBytes int64         // of the memory of all bodies; see bodies
	body      *[]byte       // memory of the body; nil: it was not read
	seed      uint64
	head      api.Head
	idJSON    []byte
	model     []byte // JSON
	created   []byte // JSON
	subs      []*sub
	out       *stream // nil: not streamed

	subs0 [1]*sub // memory of subs
	sub0  sub     // of the first of them
	out0  stream  // of out
}

// requestTimes is the memory of a request's stamps, and of those of its first attempt. It is apart from the session, which a
// record must not hold until its line is written.
type requestTimes struct {
	received int64
	parsed   int64 // 0: it was refused before
	admitted int64 // 0: it was not let in
	end      int64
	first    times
}

// sub is one choice of one prompt: it has its own id, legs and attempts.
type sub struct {
	s       *session
	index   int
	first   bool          // first choice of its prompt: its prompt tokens count
	ids     []int32       // nil: a worker tokenizes
	blocks  []pool.Prefix // of ids; nil: not hashed, or no policy asks
	prompt  []byte        // JSON that replaces prompt; nil: the client's is sent
	tries   []*attempt
	started bool    // a byte of it went to the client
	moved   bool    // it has left a node that broke, outside the retry budget
	given   []int32 // tokens whose text the client has, or the answer that is assembled here
	opaque  bool    // a chunk named no tokens: nobody can go on after it
	hash    string  // checkpoint that gave them
	answer  answer

	tries0 [1]*attempt // memory of tries
	try0   attempt     // of the first of them
}

// serve runs one request.
func (p *Proxy) serve(c echo.Context, chat bool) error {
	s := &session{p: p, w: c.Response(), times: &requestTimes{received: p.o.Steady.Now()}, id: mintRequestID()}
	p.met.inflight.Inc()
	defer p.met.inflight.Dec()
	defer s.endKey()
	defer s.giveBody()
	e := s.prepare(c.Request(), chat)
	s.w.Header()[api.HeaderRequestID] = []string{s.publicID()}
	if e != nil && e.Status() == http.StatusUnauthorized {
		p.met.ended(phase.Rejected, e.Stage) // a stranger fills no disk
		e.RequestID = s.publicID()
		return e
	}
	p.o.Begin(s.id)
	if e == nil {
		e = s.admitted(c.Request().Context())
	}
	if e = s.finish(e); e != nil {
		return e
	}
	s.reuseBody()
	return nil
}

// left is what remains of the request's life.
func (s *session) left() time.Duration {
	return s.life - time.Duration(s.p.o.Steady.Now()-s.times.received)
}

// admitted waits at the door, then runs.
func (s *session) admitted(ctx context.Context) *api.Error {
	p := s.p
	t, e := p.door.enter(ctx, admit.Ask{
		Principal: s.principal, Priority: s.req.Priority, Weight: len(s.subs), Patience: max(min(p.o.QueueTime, s.left()), 0),
	})
	if e != nil {
		return e
	}
	defer p.door.leave(t)
	s.times.admitted = p.o.Steady.Now()
	p.health.request()
	return s.run(ctx)
}

// publicID is the id that the client sees: its own when it sent one.
func (s *session) publicID() string {
	if s.clientID != "" {
		return s.clientID
	}
	return s.id
}

// returnMetrics is api.HeaderReturnMetrics as a header map has it.
var returnMetrics = http.CanonicalHeaderKey(api.HeaderReturnMetrics)

// prepare reads, validates and tokenizes.
func (s *session) prepare(r *http.Request, chat bool) *api.Error {
	s.rc = *http.NewResponseController(s.w)
	if id := r.Header.Get(api.HeaderRequestID); id != "" {
		if !validID(id) {
			return api.Invalid(api.HeaderRequestID, "header %s: want 1 to %d letters, digits or any of -_.:/+=@", api.HeaderRequestID, maxClientID)
		}
		s.clientID = id
	}
	s.perf = s.p.o.Expect != nil && strings.TrimSpace(r.Header.Get(returnMetrics)) == "1"
	if t := r.Header.Get(api.HeaderTraceparent); validTraceparent(t) {
		s.trace = t
	}
	var e *api.Error
	if s.life, e = s.p.lifeOf(r); e != nil {
		return e
	}
	if e := s.authenticate(r); e != nil { // before the body: a stranger's is not read
		return e
	}
	body, e := s.readBody(r)
	if e != nil {
		return e
	}
	s.req, e = api.ParseRequest(body, chat, api.Limits{MaxBody: s.p.o.MaxBody, KnowsModel: s.knowsModel, Client: true})
	if e != nil {
		return e
	}
	if s.who != nil {
		asked := s.req.Priority
		s.req.Priority = s.who.Priority(asked)
		s.lowered = s.req.Priority != asked
		s.unpinned = s.req.Pin && !s.who.MayPin()
	}
	if e := s.plan(r.Context()); e != nil {
		return e
	}
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
	}
	s.head = api.Head{ID: prefix + s.id, Model: s.req.Model, Created: time.Now().Unix(), Chat: chat}
	s.text()
	s.seed = s.req.Sampling.Seed
	if !s.req.SeedSet {
		s.seed = mintSeed()
	}
	if s.req.Stream {
		s.out = &s.out0
		s.out.w, s.out.rc, s.out.idle = s.w, &s.rc, s.p.o.ClientIdle
		s.out.now, _ = s.w.Writer.(nowWriter)
		if s.perf {
			s.out.begin = s.setClockSync
		}
	}
	s.times.parsed = s.p.o.Steady.Now()
	return nil
}

// text makes the JSON of what all chunks have, in one piece of memory.
func (s *session) text() {
	id := jsonline.AppendString(make([]byte, 0, len(s.head.ID)+len(s.head.Model)+24), s.head.ID)
	model := jsonline.AppendString(id, s.head.Model)
	created := strconv.AppendInt(model, s.head.Created, 10)
	s.idJSON, s.model, s.created = id, model[len(id):], created[len(model):]
}

// run runs all sub-requests; the first failure ends the others.
func (s *session) run(ctx context.Context) *api.Error {
	if len(s.subs) == 1 {
		return s.subs[0].run(ctx)
	}
	return s.runAll(ctx)
}

func (s *session) runAll(ctx context.Context) *api.Error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex // guards first
	var first *api.Error
	var all sync.WaitGroup
	for _, b := range s.subs {
		all.Go(func() {
			if e := b.run(ctx); e != nil {
				mu.Lock()
				if first == nil {
					first = e
				}
				mu.Unlock()
				cancel(e)
			}
		})
	}
	all.Wait()
	return first
}

// finish hands over the record, then sends the end of the answer: what a client saw end has its record. It returns the
// error that is still to be sent as a status.
func (s *session) finish(e *api.Error) *api.Error {
	defer s.settle()
	s.times.end = s.p.o.Steady.Now()
	if e != nil {
		e = s.overdue(e)
		e.RequestID = s.publicID()
	}
	cost := s.expectCost(e)
	s.p.o.Record(s.record(e))
	s.observe(e)
	switch {
	case s.out != nil && e == nil:
		s.out.end(s)
		s.out.cost(cost())
	case s.out != nil && s.out.fail(e):
		return nil
	case e == nil:
		s.writeWhole(cost())
	}
	return e
}

// overdue is the one error of a request whose time is over, whoever saw it first.
func (s *session) overdue(e *api.Error) *api.Error {
	const rounding = 20 * time.Millisecond // a node is told the rest in whole milliseconds, and may be the first
	if e.Type != api.TypeTimeout || s.left() > rounding {
		return e
	}
	return &api.Error{
		Code: http.StatusGatewayTimeout, Type: api.TypeTimeout, Stage: e.Stage, Retryable: true,
		Message: fmt.Sprintf("the request took longer than the %v that it had", s.life),
	}
}

// settle closes what the attempts hold. The client has its last byte before a node is waited for.
func (s *session) settle() {
	for _, b := range s.subs {
		for _, a := range b.tries {
			if a.gen != nil && a.failure == nil && s.w.Committed && !a.gen.Ready() {
				_ = s.rc.Flush()
			}
			a.settle()
		}
	}
}

// last is the newest attempt; nil when there was none.
func (b *sub) last() *attempt {
	if len(b.tries) == 0 {
		return nil
	}
	return b.tries[len(b.tries)-1]
}

// usage sums the sub-requests: each prompt once, with the numbers of its prefill; each token of each choice. What is not known of
// one is not known of all.
func (s *session) usage() api.Usage {
	u := api.Usage{NoPrompt: len(s.subs) == 0}
	cached, known := 0, len(s.subs) > 0
	for _, b := range s.subs {
		one := b.usage()
		u.CompletionTokens += one.CompletionTokens
		if !b.first {
			continue
		}
		u.PromptTokens, u.NoPrompt = u.PromptTokens+one.PromptTokens, u.NoPrompt || one.NoPrompt
		if d := one.PromptTokensDetails; d != nil {
			cached += d.CachedTokens
		} else {
			known = false
		}
	}
	if u.NoPrompt {
		u.PromptTokens, known = 0, false
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	if known {
		u.PromptTokensDetails = &api.PromptTokensDetails{CachedTokens: cached}
	}
	return u
}
