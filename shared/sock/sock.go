// Package sock reads and writes a connection with little: the buffer for what is read is of a pool and goes back to it while
// the connection waits, and a deadline costs nothing until something really waits. It owns no protocol.
//
// One goroutine reads and one writes; Close may come from anywhere.
package sock

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// bufferBytes is what is read at most at a time into a buffer of the pool.
const bufferBytes = 16 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferBytes); return &b }}

// Conn is a connection. Where it is no bare socket (TLS, tests), it keeps its buffer while it waits.
type Conn struct {
	net.Conn // for its addresses and Close; its Read would miss what is buffered

	raw      syscall.RawConn // nil: no socket
	under    syscall.RawConn // the socket, also where TLS is above it; nil: none
	lookFn   func(uintptr) bool
	quiet    bool // what the last look said
	readFn   func(uintptr) bool
	writeFn  func(uintptr) bool
	lastFn   func(uintptr) bool
	readNow  func(uintptr) // readFn and writeFn for those that do not wait
	writeNow func(uintptr)
	pooled   *[]byte // of buffers; nil: none is held, or one that is larger
	buf      []byte  // buf[from:to] was read and not taken
	from, to int

	into []byte // of the read that goes on; nil: into buf
	n    int
	err  error

	out      []byte      // rest of the write that goes on
	rest     func() bool // of WriteLast
	writeErr error

	reads, writes deadline
}

// deadline is one that the owner wants, and one that the connection has.
type deadline struct{ want, has time.Time }

// New wraps c, which belongs to the Conn from then on.
func New(c net.Conn) *Conn {
	s := &Conn{Conn: c}
	socket := c
	secure, ok := c.(*tls.Conn)
	if ok {
		socket = secure.NetConn()
	}
	tcp, ok := socket.(*net.TCPConn)
	if !ok {
		return s
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return s
	}
	s.under, s.lookFn = raw, s.look
	if secure == nil {
		s.raw, s.readFn, s.writeFn, s.lastFn = raw, s.waitRead, s.waitWrite, s.tryLast
		s.readNow, s.writeNow = func(fd uintptr) { s.tryRead(fd) }, func(fd uintptr) { s.tryWrite(fd) }
	}
	return s
}

// Raw is the socket; nil where there is none.
func (c *Conn) Raw() syscall.RawConn { return c.raw }

// Buffered are the bytes that were read and not taken; valid until the next read.
func (c *Conn) Buffered() []byte { return c.buf[c.from:c.to] }

// Discard takes n bytes of what is buffered. They stay valid until the next read.
func (c *Conn) Discard(n int) { c.from += n }

// Release gives an empty buffer back at once, not with the next wait.
func (c *Conn) Release() {
	if c.from < c.to {
		return
	}
	if c.pooled != nil {
		buffers.Put(c.pooled)
	}
	c.pooled, c.buf, c.from, c.to = nil, nil, 0, 0
}

// room makes room for more bytes behind those that are buffered.
func (c *Conn) room() {
	switch {
	case c.buf == nil:
		c.pooled = buffers.Get().(*[]byte)
		c.buf = *c.pooled
	case c.from == c.to:
		c.from, c.to = 0, 0
	case c.to < len(c.buf):
	case c.from > 0:
		c.to = copy(c.buf, c.buf[c.from:c.to])
		c.from = 0
	default:
		larger := make([]byte, 2*len(c.buf))
		n := copy(larger, c.buf[:c.to])
		c.from = c.to
		c.Release()
		c.buf, c.to = larger, n
	}
}

// Fill waits for at least one byte more than is buffered; the buffer grows as needed.
func (c *Conn) Fill() error { return c.filled(c.read(nil)) }

func (c *Conn) filled(n int, err error) error {
	c.to += n
	if n > 0 {
		return nil // an error comes again
	}
	c.Release()
	return err
}

// FillNow reads what is there, without waiting: it may be nothing. It needs a socket.
func (c *Conn) FillNow() error {
	c.n, c.err = 0, nil
	err := c.raw.Control(c.readNow)
	if err == nil {
		err = c.err
	}
	return c.filled(c.n, err)
}

// Read takes what is buffered, or waits.
func (c *Conn) Read(p []byte) (int, error) {
	if c.from < c.to {
		n := copy(p, c.buf[c.from:c.to])
		c.Discard(n)
		return n, nil
	}
	if len(p) >= bufferBytes {
		return c.read(p)
	}
	if err := c.Fill(); err != nil {
		return 0, err
	}
	return c.Read(p)
}

// read reads once, into p or behind what is buffered.
func (c *Conn) read(p []byte) (int, error) {
	if err := c.reads.renew(c.Conn.SetReadDeadline, c.raw == nil); err != nil {
		return 0, err
	}
	if c.raw == nil {
		if p == nil {
			c.room()
			p = c.buf[c.to:]
		}
		return c.Conn.Read(p)
	}
	c.into, c.n, c.err = p, 0, nil
	err := c.raw.Read(c.readFn)
	c.into = nil
	if err != nil {
		return 0, err
	}
	return c.n, c.err
}

// waitRead is called when there may be bytes; false waits until there are.
func (c *Conn) waitRead(fd uintptr) bool {
	if c.tryRead(fd) {
		return true
	}
	c.Release()
	c.err = c.reads.set(c.Conn.SetReadDeadline)
	return c.err != nil
}

// tryRead reads what is there; false: nothing.
func (c *Conn) tryRead(fd uintptr) bool {
	p := c.into
	if p == nil {
		c.room()
		p = c.buf[c.to:]
	}
	for {
		n, err := read(fd, p)
		switch {
		case err == nil && n > 0:
			c.n = n
		case err == nil:
			c.err = io.EOF
		case errors.Is(err, syscall.EAGAIN):
			return false
		case errors.Is(err, syscall.EINTR):
			continue
		default:
			c.err = &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
		}
		return true
	}
}

// Write writes all of p.
func (c *Conn) Write(p []byte) (int, error) {
	if err := c.writes.renew(c.Conn.SetWriteDeadline, c.raw == nil); err != nil {
		return 0, err
	}
	if c.raw == nil {
		return c.Conn.Write(p)
	}
	c.out, c.writeErr = p, nil
	return c.written(len(p), c.raw.Write(c.writeFn))
}

// Ask is Write, and waits for the answer: the Fill that follows finds it there, and need not look in vain before it waits.
func (c *Conn) Ask(p []byte) error { return c.WriteLast(p, goesOn) }

func goesOn() bool { return true }

// WriteLast is Write for what is said before the other side is waited for. Once all is written it calls rest, and when that says so it
// waits for something to read, or its end, if there is none yet; where it cannot wait, the Fill that follows does.
func (c *Conn) WriteLast(p []byte, rest func() bool) error {
	if c.raw != nil && len(p) > 0 && c.from == c.to && c.reads.has == c.reads.want {
		c.Release()
		c.out, c.rest = p, rest
		_ = c.raw.Read(c.lastFn) // Write or Fill meets the error again
		if p, c.out, c.rest = c.out, nil, nil; len(p) == 0 {
			return nil
		}
	}
	_, err := c.Write(p)
	if err == nil {
		rest()
	}
	return err
}

// tryLast is called to write, and again when there is something to read.
func (c *Conn) tryLast(fd uintptr) bool {
	if len(c.out) == 0 {
		return true
	}
	n, err := write(fd, c.out)
	if err != nil {
		return true
	}
	c.out = c.out[n:]
	// To wait is to forget what has come before the write: nobody is woken for it.
	return len(c.out) > 0 || !c.rest() || !silent(fd)
}

// WriteAll writes all pieces, one after the other, together where there is room.
func (c *Conn) WriteAll(pieces [][]byte) error {
	n := 0
	if c.raw != nil {
		_ = c.raw.Write(func(fd uintptr) bool { n = gather(fd, pieces); return true }) // Write meets the error again
	}
	for _, p := range pieces {
		if n >= len(p) {
			n -= len(p)
			continue
		}
		if _, err := c.Write(p[n:]); err != nil {
			return err
		}
		n = 0
	}
	return nil
}

// WriteNow writes what there is room for, without waiting, whatever deadline an earlier wait has left. It needs a socket.
func (c *Conn) WriteNow(p []byte) (int, error) {
	c.out, c.writeErr = p, nil
	err := c.raw.Control(c.writeNow)
	return c.written(len(p), err)
}

func (c *Conn) written(want int, err error) (int, error) {
	n := want - len(c.out)
	c.out = nil
	if err == nil {
		err = c.writeErr
	}
	return n, err
}

// waitWrite is called when there may be room; false waits until there is.
func (c *Conn) waitWrite(fd uintptr) bool {
	if c.tryWrite(fd) {
		return true
	}
	c.writeErr = c.writes.set(c.Conn.SetWriteDeadline)
	return c.writeErr != nil
}

// tryWrite writes what there is room for; false: some is left.
func (c *Conn) tryWrite(fd uintptr) bool {
	for len(c.out) > 0 {
		n, err := write(fd, c.out)
		if n > 0 {
			c.out = c.out[n:]
		}
		switch {
		case err == nil, errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EAGAIN):
			return false
		default:
			c.writeErr = &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
			return true
		}
	}
	return true
}

// Quiet tells whether the other side has neither closed the connection nor sent anything that was not read. Without a socket
// nobody can tell: it says yes.
func (c *Conn) Quiet() bool {
	if c.under == nil {
		return true
	}
	if c.reads.renew(c.Conn.SetReadDeadline, false) != nil { // one that has passed would hide what there is
		return false
	}
	c.quiet = false
	return c.under.Read(c.lookFn) == nil && c.quiet
}

// look never waits.
func (c *Conn) look(fd uintptr) bool {
	c.quiet = silent(fd)
	return true
}

// ReadBy bounds the waits of later reads; zero: no bound. The reader calls it.
func (c *Conn) ReadBy(t time.Time) { c.reads.want = t }

// WriteBy bounds the waits of later writes; zero: no bound. The writer calls it.
func (c *Conn) WriteBy(t time.Time) { c.writes.want = t }

// renew lifts a deadline that may have passed since, and that nobody wants any more; eager: it sets the wanted one.
func (d *deadline) renew(set func(time.Time) error, eager bool) error {
	if d.has == d.want || d.has.IsZero() && !eager {
		return nil
	}
	return d.set(set)
}

// set makes the connection have the wanted deadline.
func (d *deadline) set(set func(time.Time) error) error {
	if d.has == d.want {
		return nil
	}
	d.has = d.want
	return set(d.want)
}
