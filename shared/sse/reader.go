// Package sse reads and writes server-sent events (text/event-stream) as OpenAI's API uses them. It owns the framing
// only: what is inside data is JSON to others. It starts no goroutine and keeps no connection.
package sse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
)

// ErrTooLong is returned when one event exceeds the reader's limit.
var ErrTooLong = errors.New("sse: event too long")

const (
	startBuffer  = 1 << 10 // an open stream keeps it; larger events make it grow
	defaultLimit = 1 << 20
)

// Event is one event. Both slices are valid until the next call of the reader.
type Event struct {
	Name []byte // empty: "message"
	Data []byte // data lines joined by \n
}

// Done tells whether the event is OpenAI's end mark.
func (e Event) Done() bool { return string(e.Data) == "[DONE]" }

// Reader splits a stream into events. Line ends may be \n, \r\n or \r, and a read may end anywhere. The zero value is not
// usable; see NewReader.
type Reader struct {
	r      io.Reader
	limit  int
	buf    []byte
	from   int // unread bytes are buf[from:to]
	to     int
	seen   int // buf[from:seen] was searched and has no line end
	skipLF bool
	bom    bool // the first bytes were looked at

	name  []byte
	data  []byte
	lines int  // data lines of the event so far
	ready bool // an event is complete and was not returned yet
	taken bool // the event in name and data was returned
}

// NewReader reads events of at most limit bytes from r; limit 0 is 1 MiB.
func NewReader(r io.Reader, limit int) *Reader {
	if limit <= 0 {
		limit = defaultLimit
	}
	return &Reader{r: r, limit: limit}
}

// Next returns the next event that has data. At the end of the stream it returns io.EOF, or io.ErrUnexpectedEOF when the
// stream ends inside an event; an error of the underlying reader is passed on.
func (r *Reader) Next() (Event, error) {
	for {
		ok, err := r.Ready()
		if err != nil {
			return Event{}, err
		}
		if ok {
			r.ready, r.taken = false, true
			return Event{Name: r.name, Data: r.data}, nil
		}
		if err := r.fill(); err != nil {
			if errors.Is(err, io.EOF) && (r.lines > 0 || r.from < r.to) {
				err = io.ErrUnexpectedEOF
			}
			return Event{}, err
		}
	}
}

// Ready tells whether Next would return an event without reading. It ends the validity of the last event.
func (r *Reader) Ready() (bool, error) {
	if r.ready {
		return true, nil
	}
	if r.taken {
		r.taken = false
		r.name, r.data = r.name[:0], r.data[:0]
	}
	for {
		line, ok := r.line()
		if !ok {
			return false, nil
		}
		if len(line) == 0 {
			if r.lines > 0 {
				r.lines = 0
				r.ready = true
				return true, nil
			}
			r.name = r.name[:0]
			continue
		}
		r.field(line)
		if len(r.data)+len(r.name) > r.limit {
			return false, fmt.Errorf("%w: over %d bytes", ErrTooLong, r.limit)
		}
	}
}

// line cuts the next complete line off the buffer.
func (r *Reader) line() ([]byte, bool) {
	if !r.skipBOM() {
		return nil, false
	}
	if r.skipLF && r.from < r.to {
		if r.buf[r.from] == '\n' {
			r.from++
		}
		r.skipLF = false
	}
	r.seen = max(r.seen, r.from)
	i := bytes.IndexByte(r.buf[r.seen:r.to], '\n')
	end := r.to
	if i >= 0 {
		end = r.seen + i
	}
	if j := bytes.IndexByte(r.buf[r.seen:end], '\r'); j >= 0 {
		end = r.seen + j
		r.skipLF = true
	} else if i < 0 {
		r.seen = r.to
		return nil, false
	}
	line := r.buf[r.from:end]
	r.from = end + 1
	return line, true
}

// skipBOM drops a byte order mark at the start; false: more bytes are needed to know.
func (r *Reader) skipBOM() bool {
	if r.bom || r.from == r.to {
		return true
	}
	const mark = "\xef\xbb\xbf"
	head := r.buf[r.from:r.to]
	if len(head) < len(mark) && bytes.HasPrefix([]byte(mark), head) {
		return false
	}
	r.bom = true
	if bytes.HasPrefix(head, []byte(mark)) {
		r.from += len(mark)
	}
	return true
}

func (r *Reader) field(line []byte) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "data":
		if r.lines > 0 {
			r.data = append(r.data, '\n')
		}
		r.data = append(r.data, value...)
		r.lines++
	case "event":
		r.name = append(r.name[:0], value...)
	}
}

func (r *Reader) fill() error {
	if r.from == r.to {
		r.from, r.to, r.seen = 0, 0, 0
	}
	if r.to == len(r.buf) {
		if err := r.grow(); err != nil {
			return err
		}
	}
	for range 100 {
		n, err := r.r.Read(r.buf[r.to:])
		r.to += n
		if n > 0 {
			return nil // an error comes again with the next read
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

// grow makes room: first by moving the unread bytes to the front, then by doubling up to the limit.
func (r *Reader) grow() error {
	if r.from > 0 {
		n := copy(r.buf, r.buf[r.from:r.to])
		r.seen = max(r.seen-r.from, 0)
		r.from, r.to = 0, n
		return nil
	}
	size := max(2*len(r.buf), startBuffer)
	if len(r.buf) > r.limit {
		return fmt.Errorf("%w: a line over %d bytes", ErrTooLong, r.limit)
	}
	bigger := make([]byte, size)
	r.to = copy(bigger, r.buf[:r.to])
	r.buf = bigger
	return nil
}
