package proxy

import (
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/router/perfheader"
	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

// stream is the client's side of a streamed request. Nothing is sent before the first chunk, so that until then an error
// is a status and a retry is not seen.
type stream struct {
	w    *echo.Response
	rc   *http.ResponseController
	now  nowWriter // nil: the server has no such thing
	idle time.Duration

	begin func() // called before the headers go out; nil: nothing

	mu     sync.Mutex // held for one event or one write; guards what follows
	open   bool       // the 200 is out
	buf    []byte     // events that were not written yet
	pooled *[]byte    // of eventBuffers, the memory of buf; nil: nothing waits
	failed error      // of the first write that failed
	until  time.Time  // write deadline that is set
}

// nowWriter is a server's answer that can be written to without waiting: all is false when some of it waits for a flush.
type nowWriter interface {
	WriteNow(p []byte) (all bool, err error)
}

// add rewrites a chunk of a node into the buffer. The mutex is held.
func (o *stream) add(a *attempt, chunk *api.Chunk, data []byte) error {
	if a.rewriter == nil {
		s := a.s
		a.rewriter = &a.rewriter0
		*a.rewriter = api.Rewriter{Chat: s.req.Chat, Rewrite: api.Rewrite{ID: s.idJSON, Model: s.model, Created: s.created, Index: a.sub.index}}
	}
	o.hold()
	before := len(o.buf)
	buf := sse.Begin(o.buf)
	from := len(buf)
	buf, err := a.rewriter.Chunk(chunk, buf, data)
	if err != nil || chunk.Choices == 0 || chunk.Error != nil {
		o.buf = buf[:before]
		return err // usage and a worker's own events are not for clients
	}
	a.sub.started = true
	o.buf = sse.End(buf, from)
	return nil
}

// flush writes what is buffered.
func (o *stream) flush() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.flushLocked()
}

func (o *stream) flushLocked() error {
	if err := o.writeLocked(); err != nil || !o.open {
		return err
	}
	o.failed = o.rc.Flush()
	return o.failed
}

// Headers of every stream; they are not changed.
var (
	eventStream = []string{sse.ContentType}
	noCache     = []string{"no-cache"}
	noBuffer    = []string{"no"}
)

// writeLocked gives what is buffered to the server, which sends it with the next flush or the end of the answer.
func (o *stream) writeLocked() error {
	if now := time.Now(); o.until.Sub(now) < o.idle/2 { // a timer a write would cost more than the write
		o.until = now.Add(o.idle)
		_ = o.rc.SetWriteDeadline(o.until) // a writer in tests has none
	}
	if o.failed != nil || len(o.buf) == 0 {
		return o.failed
	}
	if !o.open {
		o.open = true
		h := o.w.Header()
		h["Content-Type"], h["Cache-Control"] = eventStream, noCache
		h["X-Accel-Buffering"] = noBuffer // nginx would hold tokens back
		if o.begin != nil {
			o.begin()
		}
		o.w.WriteHeader(http.StatusOK)
	}
	_, o.failed = o.w.Write(o.buf)
	o.release()
	return o.failed
}

// flushNow writes what is buffered without waiting; false: it failed, or some is left for flush. The answer has begun.
func (o *stream) flushNow() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil || len(o.buf) == 0 {
		return o.failed == nil
	}
	var all bool
	all, o.failed = o.now.WriteNow(o.buf)
	o.release()
	return all
}

// release gives back the memory of events that were written.
func (o *stream) release() {
	if o.pooled != nil && cap(o.buf) <= keepEvents {
		*o.pooled = o.buf[:0]
		eventBuffers.Put(o.pooled)
	}
	o.buf, o.pooled = nil, nil
}

// eventBuffers are held while events wait for their write; a stream that waits for its node has none.
var eventBuffers = sync.Pool{New: func() any { return new([]byte) }}

// keepEvents bounds what goes back to the pool, in bytes.
const keepEvents = 32 << 10

// hold makes sure that there is memory for events.
func (o *stream) hold() {
	if o.pooled == nil && o.buf == nil {
		o.pooled = eventBuffers.Get().(*[]byte)
		o.buf = *o.pooled
	}
}

// end adds the usage, when it was asked for, and the end mark. They go out with the end of the answer, in one write.
func (o *stream) end(s *session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hold()
	if s.req.IncludeUsage {
		o.buf = sse.AppendEvent(o.buf, s.head.AppendUsageChunk(nil, s.usage()))
	}
	o.buf = sse.AppendDone(o.buf)
	if s.perf { // the cost follows, some time later
		_ = o.flushLocked()
		return
	}
	_ = o.writeLocked() // a client that left here has all its tokens
}

// fail ends a stream that has begun with one error event; false: nothing was sent, the error can be a status.
func (o *stream) fail(e *api.Error) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.open {
		return false
	}
	o.buf = sse.AppendEvent(o.buf, e.Append(nil))
	_ = o.flushLocked() // the client may be what failed
	return true
}

// answer is one choice of a request that is not streamed, assembled of chunks. Text stays escaped as it came.
type answer struct {
	text     []byte
	finish   string
	stop     []byte
	logprobs api.Merged
	message  *api.Message // tool calls, reasoning; nil: none
}

func (w *answer) add(c *api.Chunk) {
	w.text = append(w.text, c.Text...)
	if c.Finish != "" {
		w.finish = c.Finish
	}
	if c.StopReason != nil {
		w.stop = append(w.stop[:0], c.StopReason...)
	}
	if c.Logprobs != nil {
		w.logprobs.Add(c.Logprobs)
	}
	if c.Delta != nil {
		if w.message == nil {
			w.message = new(api.Message)
		}
		w.message.Add(c.Delta)
	}
}

// writeWhole sends the answer of a request that is not streamed.
func (s *session) writeWhole(cost []perfheader.Header) {
	choices := make([]api.Choice, len(s.subs))
	for i, b := range s.subs {
		w := &b.answer
		if w.text == nil {
			w.text = []byte{}
		}
		choices[i] = api.Choice{
			Index: b.index, RawText: w.text, Finish: w.finish, StopReason: w.stop, RawLogprobs: w.logprobs.Append(nil),
			Message: w.message,
		}
	}
	s.setClockSync()
	body := s.head.AppendResponse(nil, choices, s.usage(), nil)
	h := s.w.Header()
	h.Set("Content-Type", "application/json")
	for _, c := range cost {
		h[c.Name] = []string{c.Value} // as TensorRT-LLM spells them
	}
	_ = s.rc.SetWriteDeadline(time.Now().Add(s.p.o.ClientIdle)) // a writer in tests has none
	s.w.WriteHeader(http.StatusOK)
	_, _ = s.w.Write(body) // the client is gone if this fails
}
