package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	maxHead     = 64 << 10
	maxHeadLine = 4 << 10
	maxInterim  = 8        // 1xx answers before the real one
	maxDrain    = 64 << 10 // bytes read from a body that nobody wants
)

// Response is an answer whose head was read. Reading to io.EOF gives the connection back for the next request; Close
// before that closes the connection, which tells the node that nobody listens.
type Response struct {
	Status      int
	ContentType string
	RetryAfter  string // as sent
	Clock       string // stamps of the node's clock, as sent (clock.InbandHeader); "": none

	client *Client
	conn   *conn
	ctx    context.Context // of the exchange: an error is explained by why it ended
	stop   func() bool

	chunked  bool
	length   int64 // rest of the body or of the chunk; -1: until the connection closes
	started  bool  // a chunk was read, but not the line end behind it
	keep     bool
	finished bool
	failed   error // of an earlier read; it stays
	once     sync.Once
}

func (r *Response) readHead() error {
	for range maxInterim {
		if err := r.readOneHead(); err != nil {
			return err
		}
		if r.Status >= 200 {
			return nil
		}
	}
	return fmt.Errorf("%w: too many interim answers", ErrProtocol)
}

func (r *Response) readOneHead() error {
	line, err := r.line()
	if err != nil {
		return err
	}
	// HTTP/1.1 200 OK
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.")) || line[8] != ' ' {
		return fmt.Errorf("%w: status line %.40q", ErrProtocol, line)
	}
	r.keep = line[7] == '1'
	if r.Status, err = strconv.Atoi(string(line[9:12])); err != nil || r.Status < 100 || r.Status > 599 {
		return fmt.Errorf("%w: status line %.40q", ErrProtocol, line)
	}
	r.length, r.chunked = -1, false
	for total := 0; ; {
		if line, err = r.line(); err != nil {
			return err
		}
		if len(line) == 0 {
			break
		}
		if total += len(line); total > maxHead {
			return fmt.Errorf("%w: head over %d bytes", ErrProtocol, maxHead)
		}
		if err := r.header(line); err != nil {
			return err
		}
	}
	if r.chunked {
		r.keep = r.keep && r.length < 0 // which of two lengths holds is not to be left to the next answer
		r.length = 0
	}
	if r.Status == 204 || r.Status == 304 {
		r.chunked, r.length = false, 0
	}
	if r.length < 0 {
		r.keep = false
	}
	return nil
}

func (r *Response) header(line []byte) error {
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok {
		return fmt.Errorf("%w: header %.40q", ErrProtocol, line)
	}
	value = bytes.TrimSpace(value)
	switch {
	case equalFold(name, "content-length"):
		n, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil || n < 0 || value[0] == '+' || r.length >= 0 && r.length != n {
			return fmt.Errorf("%w: content-length %.40q", ErrProtocol, value)
		}
		r.length = n
	case equalFold(name, "transfer-encoding"):
		if !equalFold(value, "chunked") {
			return fmt.Errorf("%w: transfer-encoding %.40q", ErrProtocol, value)
		}
		r.chunked = true
	case equalFold(name, "connection"):
		if equalFold(value, "close") {
			r.keep = false
		}
	case equalFold(name, "content-type"):
		r.ContentType = known(value)
	case equalFold(name, "retry-after"):
		r.RetryAfter = string(value)
	case equalFold(name, "x-meridian-clock"):
		r.Clock = string(value)
	}
	return nil
}

// known is string(v), without memory for what nodes answer most.
func known(v []byte) string {
	switch string(v) {
	case "text/event-stream":
		return "text/event-stream"
	case "text/event-stream; charset=utf-8":
		return "text/event-stream; charset=utf-8"
	case "application/json":
		return "application/json"
	}
	return string(v)
}

func equalFold(b []byte, lower string) bool {
	return len(b) == len(lower) && bytes.EqualFold(b, []byte(lower))
}

// line reads one line without its end; it is valid until the next read.
func (r *Response) line() ([]byte, error) {
	for {
		b := r.conn.Buffered()
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			r.conn.Discard(i + 1)
			return bytes.TrimSuffix(b[:i], []byte("\r")), nil
		}
		if len(b) >= maxHeadLine {
			return nil, fmt.Errorf("%w: a line over %d bytes", ErrProtocol, maxHeadLine)
		}
		if err := r.conn.Fill(); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
}

// Read reads the body: all that is there already, across chunks, and waits only while there is nothing.
func (r *Response) Read(p []byte) (int, error) {
	if r.finished {
		return 0, io.EOF
	}
	if r.failed != nil {
		return 0, withCause(r.ctx, r.failed)
	}
	n, err := r.read(p)
	for err == nil && n < len(p) && r.Ready() {
		var m int
		m, err = r.read(p[n:])
		n += m
	}
	if err != nil {
		if err = r.ended(err); n == 0 {
			return 0, err
		}
	}
	return n, nil
}

// Next takes the next piece of the body that is here already: none when there is nothing, io.EOF after the last. It never waits,
// and what it gives is valid until the next call.
func (r *Response) Next() ([]byte, error) {
	switch {
	case r.finished:
		return nil, io.EOF
	case r.failed != nil:
		return nil, withCause(r.ctx, r.failed)
	}
	if r.chunked && r.length == 0 {
		if there, err := r.enterChunk(); err != nil {
			return nil, r.ended(err)
		} else if !there {
			return nil, nil
		}
	}
	if r.length == 0 {
		return nil, r.ended(io.EOF)
	}
	b := r.conn.Buffered()
	if r.length > 0 {
		b = b[:min(int64(len(b)), r.length)]
		r.length -= int64(len(b))
	}
	r.conn.Discard(len(b))
	if rest := r.conn.Buffered(); r.chunked && r.length == 0 && len(rest) >= 2 && rest[0] == '\r' && rest[1] == '\n' {
		r.conn.Discard(2) // a stream that waits holds no buffer for it
		r.started = false
	}
	return b, nil
}

// chunkHead reads what stands between two chunks: the line end of the one that was begun, and the size of the next; behind the
// last, whose size is 0, its trailers. used is 0 while not all of it is here.
func chunkHead(b []byte, begun bool) (size int64, used int, err error) {
	if size, used = usualHead(b, begun); used > 0 {
		return size, used, nil
	}
	rest := b
	if begun {
		line, ok := cutLine(&rest)
		if ok && len(line) > 0 {
			return 0, 0, fmt.Errorf("%w: no line end after a chunk", ErrProtocol)
		}
	}
	if line, ok := cutLine(&rest); ok {
		digits, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(digits)), 16, 62)
		if err != nil {
			return 0, 0, fmt.Errorf("%w: chunk size %.40q", ErrProtocol, line)
		}
		if n > 0 {
			return int64(n), len(b) - len(rest), nil
		}
		for ok {
			if line, ok = cutLine(&rest); ok && len(line) == 0 {
				return 0, len(b) - len(rest), nil
			}
		}
	}
	if len(b) > maxHead {
		return 0, 0, fmt.Errorf("%w: over %d bytes between two chunks", ErrProtocol, maxHead)
	}
	return 0, 0, nil
}

// cutLine takes a line and its end off the front of b.
func cutLine(b *[]byte) (line []byte, ok bool) {
	i := bytes.IndexByte(*b, '\n')
	if i < 0 {
		*b = nil
		return nil, false
	}
	line = bytes.TrimSuffix((*b)[:i], []byte("\r"))
	*b = (*b)[i+1:]
	return line, true
}

// usualHead is chunkHead for what almost every chunk has: digits between two line ends. used is 0 where it is of another form,
// of the last chunk, or not all here.
func usualHead(b []byte, begun bool) (size int64, used int) {
	if begun {
		if len(b) < 2 || b[0] != '\r' || b[1] != '\n' {
			return 0, 0
		}
		used = 2
	}
	for ; used < len(b) && size < 1<<32; used++ {
		switch c := b[used]; {
		case c >= '0' && c <= '9':
			size = size<<4 + int64(c-'0')
		case c >= 'a' && c <= 'f':
			size = size<<4 + int64(c-'a'+10)
		case c == '\r' && size > 0 && used+1 < len(b) && b[used+1] == '\n':
			return size, used + 2
		default:
			return 0, 0
		}
	}
	return 0, 0
}

// Fill waits until there is more of the body, or its end, for Next.
func (r *Response) Fill() error { return r.filled(r.conn.Fill) }

// FillNow reads what has come of the body, without waiting, for Next. It needs a socket.
func (r *Response) FillNow() error { return r.filled(r.conn.FillNow) }

func (r *Response) filled(fill func() error) error {
	if r.finished || r.failed != nil {
		return nil // Next says so
	}
	err := fill()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF) && (r.chunked || r.length >= 0):
		err = io.ErrUnexpectedEOF
	}
	return r.ended(err)
}

// ended ends the reading of the body, and says why.
func (r *Response) ended(err error) error {
	if errors.Is(err, io.EOF) {
		r.finish()
		return io.EOF
	}
	r.failed = err
	return withCause(r.ctx, err)
}

// Socket is what the body comes from; nil where that is no bare socket. A reader that has it waits for it by other means than Fill.
func (r *Response) Socket() syscall.RawConn { return r.conn.Raw() }

// Rest gives back the memory for what was read, if nothing is left of it. A reader that does not wait in Fill calls it.
func (r *Response) Rest() { r.conn.Release() }

// Ready tells whether Read would return something without waiting. It may say no while it would.
func (r *Response) Ready() bool {
	switch {
	case r.finished || r.failed != nil:
		return true
	case r.length > 0 || (r.length < 0 && !r.chunked):
		return len(r.conn.Buffered()) > 0
	case !r.chunked:
		return true // the end
	}
	_, used, err := chunkHead(r.conn.Buffered(), r.started)
	return used > 0 || err != nil
}

func (r *Response) read(p []byte) (int, error) {
	if r.chunked && r.length == 0 {
		if err := r.nextChunk(); err != nil {
			return 0, err
		}
	}
	switch {
	case r.length == 0:
		return 0, io.EOF
	case r.length > 0 && int64(len(p)) > r.length:
		p = p[:r.length]
	}
	n, err := r.conn.Read(p)
	if r.length > 0 {
		r.length -= int64(n)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// nextChunk waits for the next chunk; io.EOF after the last.
func (r *Response) nextChunk() error {
	for {
		if there, err := r.enterChunk(); there || err != nil {
			return err
		}
		if err := r.conn.Fill(); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
}

// enterChunk enters the next chunk, if what is before it is here; io.EOF: that was the last.
func (r *Response) enterChunk() (there bool, err error) {
	size, used, err := chunkHead(r.conn.Buffered(), r.started)
	if used == 0 || err != nil {
		return false, err
	}
	r.conn.Discard(used)
	r.started, r.length = true, size
	if size == 0 {
		return true, io.EOF
	}
	return true, nil
}

// ReadAll reads the rest of a body of at most limit bytes.
func (r *Response) ReadAll(limit int) ([]byte, error) {
	if r.chunked || r.length < 0 || r.length > int64(limit) {
		return io.ReadAll(io.LimitReader(r, int64(limit)))
	}
	b := make([]byte, r.length)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	_, err := r.Read(nil) // takes in the end
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b, err
}

// Drain waits a short while for the end of a body whose meaning is complete, so that the connection can be kept, and
// closes the response.
func (r *Response) Drain(limit time.Duration) {
	defer r.Close()
	if r.finished {
		return
	}
	r.conn.ReadBy(time.Now().Add(limit))
	var rest []byte // most bodies have nothing left but their end
	for total := 0; total < maxDrain; {
		n, err := r.read(rest)
		total += n
		if errors.Is(err, io.EOF) {
			r.conn.ReadBy(time.Time{})
			r.finish()
			return
		}
		if err != nil {
			return
		}
		if rest == nil {
			rest = make([]byte, 512)
		}
	}
}

// finish gives the connection back after the whole body was read.
func (r *Response) finish() {
	r.finished = true
	r.once.Do(func() {
		// When the cancel has already begun, the connection is being closed.
		if !r.stop() || !r.keep || len(r.conn.Buffered()) > 0 {
			_ = r.conn.Close()
			return
		}
		r.client.put(r.conn)
	})
}

// Close ends the exchange. A body that was read to its end left a connection for others; any other is closed.
func (r *Response) Close() error {
	r.once.Do(func() {
		r.stop()
		r.finished = true
		_ = r.conn.Close()
	})
	return nil
}
