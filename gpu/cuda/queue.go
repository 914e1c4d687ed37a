//go:build cuda

package cuda

import "sync"

// queue hands jobs to one goroutine in order. Push never blocks; what bounds the queue is its caller.
type queue[E any] struct {
	mu     sync.Mutex // guards the fields below
	more   *sync.Cond
	jobs   []E
	closed bool
}

func newQueue[E any]() *queue[E] {
	q := &queue[E]{}
	q.more = sync.NewCond(&q.mu)
	return q
}

// push returns false if the queue is closed.
func (q *queue[E]) push(job E) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.jobs = append(q.jobs, job)
	q.more.Signal()
	return true
}

func (q *queue[E]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.more.Signal()
}

// pop waits for a job; false when the queue is closed and empty.
func (q *queue[E]) pop() (job E, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.jobs) == 0 && !q.closed {
		q.more.Wait()
	}
	if len(q.jobs) == 0 {
		return job, false
	}
	job = q.jobs[0]
	q.jobs = q.jobs[1:]
	return job, true
}
