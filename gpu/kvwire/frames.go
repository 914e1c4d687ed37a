package kvwire

import "context"

// Buffers lends memory that a device copies from and to without a detour. Both methods may be called by any goroutine.
type Buffers interface {
	Take(n int) []byte // n bytes
	Give(b []byte)     // that Take gave; nobody uses it any more
}

// frames is the memory of the KV frames of one transfer that are on their way, so many at a time. Who takes one gives it back.
type frames struct {
	from Buffers // nil: Go's memory
	free chan []byte
}

// inFlight is how many frames may be between a device and the socket: one that is copied, one that is sent or read, and two more, so that
// neither waits when the other is late.
const inFlight = 4

func newFrames(from Buffers) *frames {
	f := &frames{from: from, free: make(chan []byte, inFlight)}
	for range inFlight {
		f.free <- nil
	}
	return f
}

// take waits for one; it may be of any size.
func (f *frames) take(ctx context.Context) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	select {
	case b := <-f.free:
		return b, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// fit gives one of n bytes for b.
func (f *frames) fit(b []byte, n int) []byte {
	switch {
	case cap(b) >= n:
		return b[:n]
	case f.from == nil:
		return make([]byte, n)
	}
	f.drop(b)
	return f.from.Take(n)
}

func (f *frames) give(b []byte) { f.free <- b }

func (f *frames) drop(b []byte) {
	if f.from != nil && b != nil {
		f.from.Give(b)
	}
}

// close gives the memory back once every frame is.
func (f *frames) close() {
	for range inFlight {
		f.drop(<-f.free)
	}
}
