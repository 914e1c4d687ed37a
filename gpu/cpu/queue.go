package cpu

import "sync"

// queue hands jobs to one goroutine in order. Push never blocks; what bounds the queue is its caller, an executor that
// has a few steps in flight.
type queue[T any] struct {
	ready  chan struct{} // holds one message when the goroutine should look again
	mu     sync.Mutex    // guards the fields below
	jobs   []T
	closed bool
}

func newQueue[T any]() *queue[T] { return &queue[T]{ready: make(chan struct{}, 1)} }

// push returns false if the queue is closed.
func (q *queue[T]) push(job T) bool {
	q.mu.Lock()
	ok := !q.closed
	if ok {
		q.jobs = append(q.jobs, job)
	}
	q.mu.Unlock()
	q.signal()
	return ok
}

func (q *queue[T]) signal() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func (q *queue[T]) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
}

// drain calls do for each job until the queue is closed and empty.
func (q *queue[T]) drain(do func(T)) {
	for range q.ready {
		for {
			job, ok, closed := q.pop()
			if closed {
				return
			}
			if !ok {
				break
			}
			do(job)
		}
	}
}

func (q *queue[T]) pop() (job T, ok, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.jobs) == 0 {
		return job, false, q.closed
	}
	job = q.jobs[0]
	q.jobs = q.jobs[1:]
	return job, true, false
}
