//go:build cuda

package cuda

import (
	"fmt"
	"unsafe"
)

// address is a place in the card's memory.
type address uint64

// alloc gives n bytes of the card's memory; what they hold is undefined.
func (c *context) alloc(n int) (address, error) {
	var a address
	if err := c.do("cuMemAlloc_v2", uintptr(unsafe.Pointer(&a)), uintptr(max(n, 256))); err != nil {
		return 0, fmt.Errorf("allocate %d bytes of the card's memory: %w", n, err)
	}
	return a, nil
}

func (c *context) free(a address) error {
	if a == 0 {
		return nil
	}
	return c.do("cuMemFree_v2", uintptr(a))
}

// buffer is memory of the card that grows; what it held is lost then.
type buffer struct {
	at   address
	size int
}

// grow makes room for n bytes and tells whether the buffer has moved. The stream that uses it must be idle.
func (c *context) grow(b *buffer, n int) (moved bool, err error) {
	if n <= b.size {
		return false, nil
	}
	if err := c.free(b.at); err != nil {
		return false, err
	}
	b.size = 0
	if b.at, err = c.alloc(n); err != nil {
		return false, err
	}
	b.size = n
	return true, nil
}

// pinned is memory of the host that the card copies from and to while the host goes on.
type pinned struct {
	at   uintptr
	size int
}

func (c *context) growPinned(p *pinned, n int) error {
	if n <= p.size {
		return nil
	}
	if err := c.freePinned(p); err != nil {
		return err
	}
	if err := c.do("cuMemHostAlloc", uintptr(unsafe.Pointer(&p.at)), uintptr(n), 0); err != nil {
		return fmt.Errorf("allocate %d bytes of pinned memory: %w", n, err)
	}
	p.size = n
	return nil
}

func (c *context) freePinned(p *pinned) error {
	if p.size == 0 {
		return nil
	}
	p.size = 0
	return c.do("cuMemFreeHost", p.at)
}

// bytes is the memory as a slice. It lies outside Go's heap, so its address never changes.
func (p *pinned) bytes() []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p.at)), p.size)
}

// register pins memory of the process, for all cards, until unregister.
func (c *context) register(b []byte) error {
	const portable = 1
	return c.do("cuMemHostRegister_v2", uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), portable)
}

func (c *context) unregister(b []byte) error {
	return c.do("cuMemHostUnregister", uintptr(unsafe.Pointer(&b[0])))
}

// view is s as bytes.
func view[E int32 | float32 | uint32 | uint64](s []E) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*new(E))))
}

// words is b as elements; b must be aligned and is not copied.
func words[E int32 | float32 | uint32 | uint64](b []byte) []E {
	return unsafe.Slice((*E)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(*new(E))))
}

// stream is an order of work on the card.
type stream struct {
	*context
	handle    uintptr
	capturing bool // what is queued goes into a graph
}

func (c *context) newStream() (*stream, error) {
	s := &stream{context: c}
	const nonBlocking = 1
	return s, c.do("cuStreamCreate", uintptr(unsafe.Pointer(&s.handle)), nonBlocking)
}

// upload queues a copy; pinned memory must stay as it is until it has run.
func (s *stream) upload(to address, from uintptr, n int) error {
	if n == 0 {
		return nil
	}
	return s.do("cuMemcpyHtoDAsync_v2", uintptr(to), from, uintptr(n), s.handle)
}

func (s *stream) download(to uintptr, from address, n int) error {
	if n == 0 {
		return nil
	}
	return s.do("cuMemcpyDtoHAsync_v2", to, uintptr(from), uintptr(n), s.handle)
}

func (s *stream) zero(at address, n int) error {
	return s.do("cuMemsetD8Async", uintptr(at), 0, uintptr(n), s.handle)
}

func (s *stream) wait() error { return s.do("cuStreamSynchronize", s.handle) }

// event is a point in a stream.
type event uintptr

func (c *context) newEvent() (event, error) {
	var e uintptr
	const noTiming = 2
	err := c.do("cuEventCreate", uintptr(unsafe.Pointer(&e)), noTiming)
	return event(e), err
}

// newTimer makes an event that knows its time.
func (c *context) newTimer() (event, error) {
	var e uintptr
	err := c.do("cuEventCreate", uintptr(unsafe.Pointer(&e)), 0)
	return event(e), err
}

// between is the time from one event to another in ms; both must have come to pass.
func (c *context) between(from, to event) (float32, error) {
	var ms float32
	err := c.do("cuEventElapsedTime", uintptr(unsafe.Pointer(&ms)), uintptr(from), uintptr(to))
	return ms, err
}

// recordOutside records an event that others look at, also while the stream's work is captured into a graph.
func (s *stream) recordOutside(e event) error {
	const external = 1
	if s.capturing {
		return s.do("cuEventRecordWithFlags", uintptr(e), s.handle, external)
	}
	return s.record(e)
}

func (s *stream) record(e event) error { return s.do("cuEventRecord", uintptr(e), s.handle) }

// follow lets what is queued from now on wait for an event of another stream.
func (s *stream) follow(e event) error { return s.do("cuStreamWaitEvent", s.handle, uintptr(e), 0) }

func (c *context) waitEvent(e event) error { return c.do("cuEventSynchronize", uintptr(e)) }
