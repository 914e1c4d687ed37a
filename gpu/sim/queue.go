package sim

import (
	"errors"
	"sync"
)

var errClosed = errors.New("sim: the device is closed")

// queue is first in, first out, without a bound: put never waits.
type queue[T any] struct {
	mu     sync.Mutex // guards the fields below
	cond   *sync.Cond
	list   []T
	closed bool
}

func (q *queue[T]) init() { q.cond = sync.NewCond(&q.mu) }

// put returns false after close.
func (q *queue[T]) put(v T) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.list = append(q.list, v)
	q.cond.Signal()
	return true
}

// take waits for a value; false when the queue is closed and empty.
func (q *queue[T]) take() (T, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.list) == 0 && !q.closed {
		q.cond.Wait()
	}
	var v T
	if len(q.list) == 0 {
		return v, false
	}
	v = q.list[0]
	q.list = q.list[1:]
	return v, true
}

func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cond.Broadcast()
}
