// Package sse reads and writes server-sent events (text/event-stream) as OpenAI's API uses them. It owns the framing
// only: what is inside data is JSON to others. It starts no goroutine and keeps no connection.
package sse

import (
	"errors"
	"io"
)

// ErrTooLong is returned when one event exceeds the reader's limit.
var ErrTooLong = errors.New("sse: event too long")

// Event is one event. Both slices are valid until the next call of who gave it.
type Event struct {
	Name []byte // empty: "message"
	Data []byte // data lines joined by \n
}

// Done tells whether the event is OpenAI's end mark.
func (e Event) Done() bool { return string(e.Data) == "[DONE]" }

const readBytes = 4 << 10

// Reader reads events from a stream. The zero value is not usable; see NewReader.
type Reader struct {
	r     io.Reader
	split Splitter
	buf   []byte
	rest  []byte // of buf: what was read and not split
}

// NewReader reads events of at most limit bytes from r; limit 0 is 1 MiB.
func NewReader(r io.Reader, limit int) *Reader {
	return &Reader{r: r, split: Splitter{Limit: limit}, buf: make([]byte, readBytes)}
}

// Next returns the next event that has data. At the end of the stream it returns io.EOF, or io.ErrUnexpectedEOF when the
// stream ends inside an event; an error of the underlying reader is passed on.
func (r *Reader) Next() (Event, error) {
	for {
		ev, rest, ok, err := r.split.Next(r.rest)
		r.rest = rest
		if ok || err != nil {
			return ev, err
		}
		if err := r.fill(); err != nil {
			if errors.Is(err, io.EOF) && r.split.Within() {
				err = io.ErrUnexpectedEOF
			}
			return Event{}, err
		}
	}
}

func (r *Reader) fill() error {
	for range 100 {
		n, err := r.r.Read(r.buf)
		if r.rest = r.buf[:n]; n > 0 {
			return nil // an error comes again with the next read
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}
