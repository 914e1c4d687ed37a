package worker

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/sse"
)

// serve answers one completions or chat request.
func (n *Node) serve(c echo.Context, chat bool) error {
	o, bad := readOrigin(c.Request().Header, n.o.Steady.Now(), mintName)
	if bad != nil {
		return n.reject(o, bad)
	}
	ctx := c.Request().Context()
	k, bad := n.readCall(ctx, c.Request(), o, chat)
	if bad != nil {
		return n.reject(o, bad)
	}
	var cancel context.CancelFunc
	if o.limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, o.limit)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	defer cancel()
	if o.clientID != "" {
		c.Response().Header().Set(api.HeaderRequestID, o.clientID)
	}
	c.Response().Before(func() { n.stampClock(c.Response().Header(), o) })
	if k.stream {
		return k.serveStream(ctx, c.Response())
	}
	return k.serveWhole(ctx, c.Response())
}

// stampClock makes the answer the second half of a clock exchange. It runs right before the head is written.
func (n *Node) stampClock(h http.Header, o origin) {
	sent := n.o.Steady.Now()
	if o.router != noRouter {
		h[clock.InbandHeader] = []string{string(clock.AppendInband(nil, n.o.Steady.ID(), o.receivedNS, sent))}
	}
	if o.metrics {
		received := o.receivedNS
		if off, ok := n.o.Adjusted.Offset(received); ok {
			received, sent = received+off, sent+off
		}
		h.Set(api.HeaderClockSync, string(clock.AppendClockSync(nil, received, sent)))
	}
}

// wallSeconds is the wall clock of "created"; nothing is measured with it.
func wallSeconds() int64 { return time.Now().Unix() }

// each runs f for every leg at the same time, and ends the others when one fails.
func (k *call) each(ctx context.Context, f func(ctx context.Context, a *attempt) *api.Error) *api.Error {
	if len(k.tries) == 1 {
		return f(ctx, k.tries[0])
	}
	sub, cancel := context.WithCancel(ctx)
	defer cancel()
	var first *api.Error
	var once sync.Once
	var all sync.WaitGroup
	for _, a := range k.tries {
		all.Go(func() {
			if e := f(sub, a); e != nil {
				once.Do(func() { first = e; cancel() })
			}
		})
	}
	all.Wait()
	return first
}

// settle publishes the records of all legs.
func (k *call) settle() {
	for _, a := range k.tries {
		a.settle()
	}
}

// serveWhole answers with one body.
func (k *call) serveWhole(ctx context.Context, w *echo.Response) error {
	choices := make([]api.Choice, len(k.tries))
	k.parsed()
	bad := k.each(ctx, func(ctx context.Context, a *attempt) *api.Error {
		if e := a.start(ctx); e != nil {
			return e
		}
		c := &choices[a.leg.index]
		c.Index = a.leg.index
		for {
			p, last, e := a.next(ctx)
			if e != nil {
				return e
			}
			c.Text += p.text
			c.TokenIDs = append(c.TokenIDs, p.ids...)
			c.Logprobs = append(c.Logprobs, p.logprobs...)
			if last {
				c.Finish, c.StopReason, c.Disagg = a.finish, a.stop, a.leg.Answer
				return nil
			}
		}
	})
	if bad != nil {
		k.settle()
		return bad
	}
	var promptIDs []int32
	if k.r.Disagg != nil {
		promptIDs = k.prompts[0]
	} else {
		for i := range choices {
			choices[i].TokenIDs = nil // only legs name them
		}
	}
	k.fill()
	body := k.head.AppendResponse(nil, choices, k.usage(), promptIDs)
	k.settle()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(body)
	return err
}

func (k *call) fill() {
	for _, a := range k.tries {
		a.fill()
	}
}

// streamer is the writer that the legs of a streamed request share.
type streamer struct {
	w    *echo.Response
	mu   sync.Mutex // held for one event; guards what follows
	open bool       // the 200 is out
	buf  []byte
	data []byte
}

// begin sends the 200.
func (s *streamer) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beginLocked()
	s.w.Flush()
}

func (s *streamer) beginLocked() {
	if s.open {
		return
	}
	s.open = true
	h := s.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // nginx would hold tokens back
	s.w.WriteHeader(http.StatusOK)
}

// send writes one event and flushes it. An error means that the client is gone; its context tells everybody.
func (s *streamer) send(f func(dst []byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beginLocked()
	s.data = f(s.data[:0])
	s.buf = sse.AppendEvent(s.buf[:0], s.data)
	if _, err := s.w.Write(s.buf); err == nil {
		s.w.Flush()
	}
}

// serveStream answers with events. An error before the first byte is a status, one after it an event.
func (k *call) serveStream(ctx context.Context, w *echo.Response) error {
	s := &streamer{w: w}
	for _, a := range k.tries {
		a.leg.flush = s.begin
	}
	k.parsed()
	bad := k.each(ctx, func(ctx context.Context, a *attempt) *api.Error {
		if e := a.start(ctx); e != nil {
			return e
		}
		return k.relay(ctx, s, a)
	})
	k.fill()
	if bad != nil {
		k.settle()
		if !s.open {
			return bad
		}
		s.send(bad.Append)
		return nil
	}
	if k.r.IncludeUsage {
		s.send(func(dst []byte) []byte { return k.head.AppendUsageChunk(dst, k.usage()) })
	}
	k.settle() // before the last bytes: a record exists for everything that a client saw end
	_, err := w.Write(sse.AppendDone(nil))
	if err == nil {
		w.Flush()
	}
	return err
}

// relay sends the pieces of one leg.
func (k *call) relay(ctx context.Context, s *streamer, a *attempt) *api.Error {
	first := len(a.leg.Request.Output) == 0 // a resumed choice has its role already
	for {
		p, last, e := a.next(ctx)
		if e != nil {
			return e
		}
		c := api.Choice{Index: a.leg.index, Text: p.text, Role: first, Logprobs: p.logprobs}
		if k.r.Disagg != nil || k.o.router != noRouter {
			c.TokenIDs = p.ids
		}
		if last {
			c.Finish, c.StopReason, c.Disagg = a.finish, a.stop, a.leg.Answer
		}
		if a.sentNS == 0 && len(p.ids) > 0 { // before the write: the router must not read it earlier than this
			a.sentNS = k.n.o.Steady.Now()
		}
		s.send(func(dst []byte) []byte { return k.head.AppendChunk(dst, c) })
		first = false
		if last {
			return nil
		}
	}
}
