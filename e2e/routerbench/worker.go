package routerbench

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/shared/clock"
)

// Pace is how a worker answers. Zero: at once.
type Pace struct {
	Prefill time.Duration `json:"prefill_ns"` // before the answer of a context leg
	Gap     time.Duration `json:"gap_ns"`     // between two tokens
}

// Left are the requests of a leg whose client closed the connection before the answer had ended.
type Left struct {
	Begun  int   `json:"begun"` // requests that are answered slowly, so that they can be left
	Count  int   `json:"count"`
	LastNS int64 `json:"last_ns"` // when the last was seen, clock.Steady; 0: none
}

// worker is a mock of a TensorRT-LLM worker; it serves context and generation legs alike. A token is one event, and one
// write but for the last, which the end of the stream rides with.
type worker struct {
	steady *clock.Steady
	pace   atomic.Pointer[Pace]

	mu       sync.Mutex // guards what follows
	ctx, gen Left
}

func newWorker(steady *clock.Steady) *worker {
	w := &worker{steady: steady}
	w.pace.Store(&Pace{})
	return w
}

// serve accepts until ctx ends; connections end with their clients.
func (w *worker) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept at %s: %w", l.Addr(), err)
		}
		go func() {
			defer c.Close()
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			defer stop()
			k := &workerConn{worker: w, Conn: c, r: bufio.NewReaderSize(c, readBuffer)}
			for k.one() == nil {
			}
		}()
	}
}

// workerConn is one connection; its goroutine alone uses it, but for watch.
type workerConn struct {
	*worker
	net.Conn
	r    *bufio.Reader
	head head
	body []byte
	out  []byte
}

// one serves one request; any error ends the connection.
func (k *workerConn) one() error {
	if err := readHead(k.r, &k.head); err != nil {
		return err
	}
	if !k.head.post {
		return k.answer(k.info())
	}
	k.body = append(k.body[:0], make([]byte, max(0, k.head.length))...)
	if _, err := io.ReadFull(k.r, k.body); err != nil {
		return err
	}
	pace := *k.pace.Load()
	ctxLeg := bytes.Contains(k.body, []byte(`"request_type":"context_only"`))
	gone := never
	if pace != (Pace{}) {
		var joined func()
		gone, joined = k.watch(ctxLeg)
		defer joined()
	}
	if ctxLeg {
		if !wait(gone, pace.Prefill) {
			return net.ErrClosed
		}
		return k.answer(appendCtxAnswer(nil, number(k.body, "disagg_request_id")))
	}
	if bytes.Contains(k.body, []byte(`"generation_only"`)) && !bytes.Contains(k.body, []byte(opaqueState)) {
		return k.refuse("the generation leg lacks the context worker's encoded_opaque_state")
	}
	return k.stream(gone, pace.Gap)
}

var never <-chan struct{}

// wait waits d; false: the client has gone.
func wait(gone <-chan struct{}, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-gone:
		return false
	case <-t.C:
		return true
	}
}

// watch looks at the connection while an answer is given slowly: gone is closed when the client has left. joined waits
// until nobody else reads from the connection.
func (k *workerConn) watch(ctxLeg bool) (gone <-chan struct{}, joined func()) {
	left, done := make(chan struct{}), make(chan struct{})
	var answered atomic.Bool
	k.began(ctxLeg)
	go func() {
		defer close(done)
		if _, err := k.r.Peek(1); err == nil || answered.Load() {
			return
		}
		k.sawLeaving(ctxLeg)
		close(left)
	}()
	return left, func() { answered.Store(true); <-done }
}

// leg is what is counted of one leg; mu is held.
func (w *worker) leg(ctxLeg bool) *Left {
	if ctxLeg {
		return &w.ctx
	}
	return &w.gen
}

func (w *worker) began(ctxLeg bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leg(ctxLeg).Begun++
}

func (w *worker) sawLeaving(ctxLeg bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left := w.leg(ctxLeg)
	left.Count++
	left.LastNS = w.steady.Now()
}

func (k *workerConn) answer(body []byte) error {
	k.out = append(k.out[:0], "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "...)
	k.out = strconv.AppendInt(k.out, int64(len(body)), 10)
	k.out = append(append(k.out, "\r\n\r\n"...), body...)
	_, err := k.Write(k.out)
	return err
}

func (k *workerConn) refuse(why string) error {
	_, err := fmt.Fprintf(k.Conn, "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(why)+2, strconv.Quote(why))
	return err
}

func (k *workerConn) info() []byte {
	if k.head.path == "/v1/models" {
		return []byte(`{"object":"list","data":[{"id":"` + modelName + `","object":"model","created":1,"owned_by":"tensorrt_llm"}]}`)
	}
	return []byte("{}")
}

// stream sends the tokens that max_tokens asks for.
func (k *workerConn) stream(gone <-chan struct{}, gap time.Duration) error {
	tokens := int(max(1, number(k.body, "max_tokens")))
	k.out = append(k.out[:0], "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"...)
	next := time.Now()
	for i := range tokens {
		if gap > 0 && i > 0 {
			if next = next.Add(gap); !wait(gone, time.Until(next)) {
				return net.ErrClosed
			}
		}
		k.out = appendToken(k.out, i, i == tokens-1, k.steady.Now())
		if i == tokens-1 {
			k.out = appendEnd(k.out, tokens, bytes.Contains(k.body, []byte(`"include_usage":true`)))
		}
		if _, err := k.Write(k.out); err != nil {
			return err
		}
		k.out = k.out[:0]
	}
	return nil
}
