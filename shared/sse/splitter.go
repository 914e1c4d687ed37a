package sse

import (
	"bytes"
	"fmt"
)

// Splitter splits bytes that arrive in pieces into events. Line ends may be \n, \r\n or \r, and a piece may end anywhere. An
// event of one data line that lies in a piece is not copied; of one that does not, a part is kept. The zero value is ready.
type Splitter struct {
	Limit int // of an event, in bytes; 0: 1 MiB

	skipLF  bool
	begun   bool   // the first bytes were looked at
	part    []byte // of a line whose end has not come
	name    []byte
	data    []byte
	lines   int  // data lines of the event so far
	emptied bool // the event in name and data was returned
}

const (
	defaultLimit = 1 << 20
	keepPart     = 1 << 10 // a larger part is left to the collector once its line is complete
	mark         = "\xef\xbb\xbf"
)

var dataField = []byte("data: ")

// Next takes the next event that has data off the front of in. When ok is false, all of in was taken and the event goes on in the
// next piece. The event is valid until the next call, and as long as in is.
func (s *Splitter) Next(in []byte) (ev Event, rest []byte, ok bool, err error) {
	if s.emptied {
		s.emptied = false
		s.name, s.data = s.name[:0], s.data[:0]
	}
	if !s.skipLF && s.lines == 0 && len(s.part) == 0 && len(s.name) == 0 {
		if data, rest, ok := plain(in); ok && len(data) <= s.limit() {
			s.begun = true
			return Event{Data: data}, rest, true, nil
		}
	}
	for len(in) > 0 {
		line, rest, whole := s.line(in)
		if in = rest; !whole {
			if len(s.part) > s.limit() {
				return Event{}, nil, false, fmt.Errorf("%w: a line over %d bytes", ErrTooLong, s.limit())
			}
			return Event{}, nil, false, nil
		}
		done, err := s.take(line)
		if s.part = s.part[:0]; cap(s.part) > keepPart {
			s.part = nil
		}
		if done || err != nil {
			return Event{Name: s.name, Data: s.data}, in, done, err
		}
	}
	return Event{}, nil, false, nil
}

// plain is an event of one data line and nothing else, at the start of in.
func plain(in []byte) (data, rest []byte, ok bool) {
	if !bytes.HasPrefix(in, dataField) {
		return nil, nil, false
	}
	data = in[len(dataField):]
	i := bytes.IndexByte(data, '\n')
	if i < 0 || i+1 >= len(data) || data[i+1] != '\n' || bytes.IndexByte(data[:i], '\r') >= 0 {
		return nil, nil, false
	}
	return data[:i], data[i+2:], true
}

// Within tells whether the bytes so far end inside an event.
func (s *Splitter) Within() bool { return s.lines > 0 || len(s.part) > 0 }

func (s *Splitter) limit() int {
	if s.Limit <= 0 {
		return defaultLimit
	}
	return s.Limit
}

// line cuts a line off the front of in; whole is false when its end has not come: what is here is kept.
func (s *Splitter) line(in []byte) (line, rest []byte, whole bool) {
	if s.skipLF {
		s.skipLF = false
		if in[0] == '\n' {
			in = in[1:]
		}
	}
	end := bytes.IndexByte(in, '\n')
	if end < 0 {
		end = len(in)
	}
	if i := bytes.IndexByte(in[:end], '\r'); i >= 0 {
		end, s.skipLF = i, true
	}
	if end == len(in) {
		s.part = append(s.part, in...)
		return nil, nil, false
	}
	line, rest = in[:end], in[end+1:]
	if len(s.part) > 0 {
		s.part = append(s.part, line...)
		line = s.part
	}
	if !s.begun {
		s.begun = true
		line = bytes.TrimPrefix(line, []byte(mark))
	}
	return line, rest, true
}

// take takes a line without its end; done: an event is complete.
func (s *Splitter) take(line []byte) (done bool, err error) {
	if len(line) == 0 {
		if s.lines > 0 {
			s.lines, s.emptied = 0, true
			return true, nil
		}
		s.name = s.name[:0]
		return false, nil
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "data":
		if s.lines > 0 {
			s.data = append(s.data, '\n')
		}
		s.data = append(s.data, value...)
		s.lines++
	case "event":
		s.name = append(s.name[:0], value...)
	}
	if len(s.data)+len(s.name) > s.limit() {
		return false, fmt.Errorf("%w: over %d bytes", ErrTooLong, s.limit())
	}
	return false, nil
}
