// Package poll waits for many sockets with one goroutine. The runtime's poller wakes a goroutine for each socket that has
// something, and a thread to run it; a Loop is woken once for all that came meanwhile, and calls those who watch, one after
// another. It owns no socket, and reads and writes nothing.
package poll

import (
	"errors"
	"sync/atomic"
)

var (
	// ErrUnsupported is returned where the system has no way to wait for many sockets.
	ErrUnsupported = errors.New("poll: no way to wait for sockets on this system")
	// ErrClosed is returned when the loop was closed.
	ErrClosed = errors.New("poll: closed")
)

// Event is what is watched for.
type Event int

// The events.
const (
	Readable Event = iota // there are bytes or an end that nobody has read; told again until they are
	Left                  // the other side sends no more, or is gone; told once
)

// Loops share sockets among several goroutines. The zero value has none.
type Loops struct {
	loops []Loop
	next  atomic.Uint32
}

// NewLoops makes n loops.
func NewLoops(n int) *Loops { return &Loops{loops: make([]Loop, n)} }

// Next is the loop for the next socket.
func (l *Loops) Next() *Loop { return &l.loops[l.next.Add(1)%uint32(len(l.loops))] }

// Close ends all loops.
func (l *Loops) Close() error {
	var errs []error
	for i := range l.loops {
		errs = append(errs, l.loops[i].Close())
	}
	return errors.Join(errs...)
}
