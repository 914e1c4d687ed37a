package remote

import (
	"bufio"
	"encoding/gob"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// maxPayload bounds what a message says of the bytes after it: a span of KV is cut into less.
const maxPayload = 1 << 30

// link is one side of a connection that carries messages Out and In, each with bytes after it. One goroutine reads; any may send.
type link[Out, In any] struct {
	conn  net.Conn
	r     *bufio.Reader // gob reads no further than its message, because it can read single bytes
	in    *gob.Decoder
	limit time.Duration // for one message: a process that takes nothing for so long hangs

	mu  sync.Mutex // held for one whole message
	buf *bufio.Writer
	out *gob.Encoder
}

func newLink[Out, In any](c net.Conn, limit time.Duration) *link[Out, In] {
	l := &link[Out, In]{conn: c, r: bufio.NewReaderSize(c, 32<<10), buf: bufio.NewWriterSize(c, 32<<10), limit: limit}
	l.in, l.out = gob.NewDecoder(l.r), gob.NewEncoder(l.buf)
	return l
}

// send writes a message and the bytes that it announces.
func (l *link[Out, In]) send(m *Out, payload []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.conn.SetWriteDeadline(time.Now().Add(l.limit)); err != nil {
		return err
	}
	if err := l.out.Encode(m); err != nil {
		return err
	}
	if _, err := l.buf.Write(payload); err != nil {
		return err
	}
	return l.buf.Flush()
}

// receive reads a message; payload must be called with what it announces before the next.
func (l *link[Out, In]) receive() (*In, error) {
	m := new(In)
	return m, l.in.Decode(m)
}

// payload reads the bytes after a message into dst, which gets room for them if it is nil.
func (l *link[Out, In]) payload(n int, dst []byte) ([]byte, error) {
	switch {
	case n < 0 || n > maxPayload:
		return nil, fmt.Errorf("remote: a message of %d bytes", n)
	case n == 0:
		return dst, nil
	case dst == nil:
		dst = make([]byte, n)
	case len(dst) != n:
		return nil, fmt.Errorf("remote: %d bytes came for %d", n, len(dst))
	}
	_, err := io.ReadFull(l.r, dst)
	return dst, err
}
