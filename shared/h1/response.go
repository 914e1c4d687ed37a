package h1

import (
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// body is what a handler reads.
type body struct {
	c    *conn // nil: the handler has returned
	left int64
}

// Read is io.Reader's.
func (b *body) Read(p []byte) (int, error) {
	switch {
	case b.c == nil:
		return 0, http.ErrBodyReadAfterClose
	case b.left == 0:
		return 0, io.EOF
	case int64(len(p)) > b.left:
		p = p[:b.left]
	}
	n, err := b.c.Read(p)
	if b.left -= int64(n); n > 0 && b.left == 0 {
		b.c.Release()    // the answer may be a long stream
		return n, io.EOF // a reader that takes it saves a call
	}
	if err == io.EOF { //nolint:errorlint // readers return it bare
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// skip takes the rest of the body, if it is here; false: it is not.
func (b *body) skip() bool {
	if b.left > 0 && int64(len(b.c.Buffered())) >= b.left {
		b.c.Discard(int(b.left))
		b.left = 0
	}
	return b.left == 0
}

// Close is io.Closer's; what was not read is dealt with at the end of the request.
func (b *body) Close() error { return nil }

const (
	flushBytes = 32 << 10 // a body of no said length is sent in pieces of about this size
	keepBytes  = 64 << 10 // larger buffers are left to the collector
)

// piece is a buffer of what goes out: what was not composed yet, and what was and is not written; of a pool, held as long as there is any.
type piece struct{ body, out []byte }

var pieces = sync.Pool{New: func() any { return new(piece) }}

// response is a connection's answer; it is used again for the next.
type response struct {
	c       *conn
	header  http.Header
	values  []string // memory of the request's header values
	fields  http.Header
	status  int   // 0: not said
	sent    bool  // the head is composed
	chunked bool  // the body has no said length
	length  int64 // said; -1: not
	wrote   int64 // bytes of the body
	keep    bool
	failed  error
	piece   *piece // nil: nothing waits
	bounded bool   // the handler has set a deadline for writes
}

// begin makes the request of the head that was read.
func (w *response) begin(c *conn) *http.Request {
	if w.header == nil {
		w.header, w.fields = http.Header{}, http.Header{}
	}
	clear(w.header)
	clear(w.fields)
	*w = response{c: c, header: w.header, fields: w.fields, values: w.values[:0], length: -1, keep: !c.head.close}
	h := &c.head
	for _, f := range h.fields {
		w.values = append(w.values, f.value)
	}
	for i, f := range h.fields {
		if old := w.fields[f.name]; old != nil {
			w.fields[f.name] = append(old, f.value)
		} else {
			w.fields[f.name] = w.values[i : i+1 : i+1]
		}
	}
	r := &c.req
	c.url, *r = url.URL{Path: h.path}, *c.blank
	r.URL, r.Header, r.Body, r.ContentLength, r.Host, r.RequestURI, r.Close = &c.url, w.fields, &c.body, h.length, h.host, h.path, h.close
	return r
}

// Header is http.ResponseWriter's.
func (w *response) Header() http.Header { return w.header }

// WriteHeader is http.ResponseWriter's.
func (w *response) WriteHeader(status int) {
	if w.status != 0 || status < 200 { // informational answers are not sent
		return
	}
	w.status = status
	if v := w.header.Get("Content-Length"); v != "" {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil && n >= 0 {
			w.length = n
		} else {
			w.header.Del("Content-Length")
		}
	}
}

// Write is io.Writer's. What it takes waits for a flush, the end, or more of it.
func (w *response) Write(p []byte) (int, error) {
	if err := w.take(p); err != nil {
		return 0, err
	}
	if len(w.piece.body) >= flushBytes {
		return len(p), w.FlushError()
	}
	return len(p), nil
}

// WriteNow is Write and a flush, but never waits: all is false when the connection had no room for all of it. The rest goes out
// with the next flush.
func (w *response) WriteNow(p []byte) (all bool, err error) {
	if err := w.take(p); err != nil {
		return false, err
	}
	err = w.send(w.c.WriteNow)
	return w.piece == nil, err
}

func (w *response) take(p []byte) error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	switch {
	case w.failed != nil:
		return w.failed
	case bodiless(w.status):
		return http.ErrBodyNotAllowed
	case w.length >= 0 && w.wrote+int64(len(p)) > w.length:
		return http.ErrContentLength
	}
	w.wrote += int64(len(p))
	if w.piece == nil {
		w.piece = pieces.Get().(*piece)
	}
	w.piece.body = append(w.piece.body, p...)
	return nil
}

// Flush is http.Flusher's.
func (w *response) Flush() { _ = w.FlushError() }

// FlushError is what http.ResponseController calls.
func (w *response) FlushError() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return w.send(w.c.Write)
}

// SetReadDeadline is what http.ResponseController calls.
func (w *response) SetReadDeadline(t time.Time) error { w.c.ReadBy(t); return nil }

// SetWriteDeadline is what http.ResponseController calls.
func (w *response) SetWriteDeadline(t time.Time) error {
	w.bounded = !t.IsZero()
	w.c.WriteBy(t)
	return nil
}

// end composes what is left; false: the connection cannot go on after that.
func (w *response) end() bool {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if w.failed != nil {
		return false
	}
	w.compose(true)
	return w.keep && (w.chunked || bodiless(w.status) || w.wrote == w.length)
}

// send writes what waits. What write leaves waits on.
func (w *response) send(write func([]byte) (int, error)) error {
	if w.failed == nil {
		w.compose(false)
	}
	return w.flush(write)
}

// compose makes bytes to be written of what waits; last: nothing follows.
func (w *response) compose(last bool) {
	p := w.piece
	if p == nil {
		p = pieces.Get().(*piece)
	}
	if !w.sent {
		p.out = w.appendHead(p.out, p.body, last)
	}
	switch {
	case !w.chunked:
		p.out = append(p.out, p.body...)
	case len(p.body) > 0:
		p.out = strconv.AppendInt(p.out, int64(len(p.body)), 16)
		p.out = append(append(append(p.out, "\r\n"...), p.body...), "\r\n"...)
	}
	if w.chunked && last {
		p.out = append(p.out, "0\r\n\r\n"...)
	}
	p.body = p.body[:0]
	w.piece = p
}

// flush writes what is composed. write may drop what goes out once it is written.
func (w *response) flush(write func([]byte) (int, error)) error {
	p := w.piece
	if w.failed != nil || p == nil {
		return w.failed
	}
	if len(p.out) > 0 {
		if !w.bounded { // a client that reads nothing holds the connection no longer than one that says nothing
			w.c.WriteBy(time.Now().Add(w.c.s.o.IdleTime))
		}
		n := 0
		if n, w.failed = write(p.out); w.piece == nil {
			return w.failed
		}
		p.out = p.out[:copy(p.out, p.out[n:])]
	}
	if len(p.out) == 0 || w.failed != nil {
		w.drop()
	}
	return w.failed
}

// drop gives back the memory of what goes out, if there is any.
func (w *response) drop() {
	p := w.piece
	if p == nil {
		return
	}
	if w.piece = nil; cap(p.body)+cap(p.out) <= keepBytes {
		p.body, p.out = p.body[:0], p.out[:0]
		pieces.Put(p)
	}
}

func bodiless(status int) bool {
	return status == http.StatusNoContent || status == http.StatusNotModified
}

// appendHead composes the head; body is the first of the body, and all of it if last.
func (w *response) appendHead(b, body []byte, last bool) []byte {
	w.sent = true
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(w.status), 10)
	b = append(append(append(b, ' '), http.StatusText(w.status)...), "\r\nDate: "...)
	b = append(append(b, date()...), '\r', '\n')
	switch {
	case bodiless(w.status):
		w.header.Del("Content-Length")
	case w.length >= 0:
	case last:
		w.length = int64(len(body))
		b = append(b, "Content-Length: "...)
		b = append(strconv.AppendInt(b, w.length, 10), '\r', '\n')
	default:
		w.chunked = true
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	if len(body) > 0 && w.header["Content-Type"] == nil {
		b = append(append(append(b, "Content-Type: "...), http.DetectContentType(body)...), '\r', '\n')
	}
	if !w.c.body.skip() || w.c.state.Load() == stopping || strings.EqualFold(w.header.Get("Connection"), "close") {
		w.keep = false // a body that nobody reads is not waited for
	}
	if !w.keep {
		w.header.Del("Connection")
		b = append(b, "Connection: close\r\n"...)
	}
	for name, values := range w.header {
		if name == "Transfer-Encoding" || name == "Date" {
			continue
		}
		for _, v := range values {
			b = append(appendField(append(b, name...), v), '\r', '\n')
		}
	}
	return append(b, '\r', '\n')
}

// appendField appends a value, in which nothing can end the line.
func appendField(b []byte, v string) []byte {
	b = append(b, ": "...)
	start := len(b)
	b = append(b, v...)
	for i, c := range b[start:] {
		if c == '\r' || c == '\n' {
			b[start+i] = ' '
		}
	}
	return b
}

// today is the date of answers, made once a second.
var today atomic.Pointer[dated]

type dated struct {
	second int64
	text   string
}

func date() string {
	now := time.Now()
	d := today.Load()
	if d == nil || d.second != now.Unix() {
		d = &dated{now.Unix(), now.UTC().Format(http.TimeFormat)}
		today.Store(d)
	}
	return d.text
}
