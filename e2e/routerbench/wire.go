package routerbench

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// errWire is returned when a peer's bytes are no HTTP/1.1 that this package reads.
var errWire = errors.New("routerbench: unexpected HTTP")

const readBuffer = 16 << 10

// head is the start of an HTTP/1.1 message.
type head struct {
	status  int    // of an answer
	post    bool   // of a request
	path    string // of a request that is no POST
	length  int64  // of the body; -1: not said
	chunked bool
}

// readHead reads up to the empty line.
func readHead(r *bufio.Reader, h *head) error {
	*h = head{length: -1}
	line, err := r.ReadSlice('\n')
	if err != nil {
		return err
	}
	if err := h.start(line); err != nil {
		return err
	}
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if line = bytes.TrimRight(line, "\r\n"); len(line) == 0 {
			return nil
		}
		if err := h.field(line); err != nil {
			return err
		}
	}
}

func (h *head) start(line []byte) (err error) {
	switch {
	case bytes.HasPrefix(line, []byte("HTTP/1.1 ")) && len(line) > 12:
		h.status, err = strconv.Atoi(string(line[9:12]))
	case bytes.HasPrefix(line, []byte("POST ")):
		h.post = true
	case bytes.HasPrefix(line, []byte("GET ")):
		path, _, _ := bytes.Cut(line[4:], []byte(" "))
		h.path = string(path)
	default:
		err = fmt.Errorf("%w: start line %.60q", errWire, line)
	}
	return err
}

func (h *head) field(line []byte) (err error) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimSpace(value)
	switch {
	case bytes.EqualFold(name, []byte("content-length")):
		h.length, err = strconv.ParseInt(string(value), 10, 64)
	case bytes.EqualFold(name, []byte("transfer-encoding")):
		h.chunked = bytes.EqualFold(value, []byte("chunked"))
	}
	return err
}

// eachPiece hands over the body in the pieces in which it arrives; a piece is valid during the call.
func (h *head) eachPiece(r *bufio.Reader, f func([]byte)) error {
	if !h.chunked {
		if h.length < 0 {
			return fmt.Errorf("%w: a body of unknown length", errWire)
		}
		return eachOf(r, h.length, f)
	}
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return unexpected(err)
		}
		n, err := strconv.ParseInt(string(bytes.TrimRight(line, "\r\n")), 16, 64)
		if err != nil {
			return fmt.Errorf("%w: chunk size %.20q", errWire, line)
		}
		if err := eachOf(r, n, f); err != nil {
			return err
		}
		if end, err := r.ReadSlice('\n'); err != nil || len(end) > 2 {
			return fmt.Errorf("%w: chunk end %.20q: %w", errWire, end, unexpected(err))
		}
		if n == 0 {
			return nil
		}
	}
}

func eachOf(r *bufio.Reader, n int64, f func([]byte)) error {
	for n > 0 {
		if _, err := r.Peek(1); err != nil {
			return unexpected(err)
		}
		piece, err := r.Peek(int(min(n, int64(r.Buffered()))))
		if err != nil {
			return unexpected(err)
		}
		f(piece)
		n -= int64(len(piece))
		if _, err := r.Discard(len(piece)); err != nil {
			return err
		}
	}
	return nil
}

// unexpected makes an end within a message an error.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
