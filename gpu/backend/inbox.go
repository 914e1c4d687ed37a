package backend

import (
	"errors"
	"sync"
)

// ErrClosed is the error of steps and copies that were submitted after Close.
var ErrClosed = errors.New("backend: closed")

// Queue hands jobs to one goroutine in order. Push never waits; what bounds the queue is its caller, an executor that has
// a few steps in flight.
type Queue[T any] struct {
	mu     sync.Mutex // guards the fields below
	more   *sync.Cond
	jobs   []T
	closed bool
}

// NewQueue makes an empty queue.
func NewQueue[T any]() *Queue[T] {
	q := &Queue[T]{}
	q.more = sync.NewCond(&q.mu)
	return q
}

// Push adds a job; false if the queue is closed.
func (q *Queue[T]) Push(job T) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.jobs = append(q.jobs, job)
	q.more.Signal()
	return true
}

// Pop waits for a job; false when the queue is closed and empty.
func (q *Queue[T]) Pop() (job T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.jobs) == 0 && !q.closed {
		q.more.Wait()
	}
	if len(q.jobs) == 0 {
		return job, false
	}
	var none T
	job, q.jobs[0] = q.jobs[0], none // so that what the job holds can be freed
	q.jobs = q.jobs[1:]
	return job, true
}

// Close lets nothing more in. It may be called more than once.
func (q *Queue[T]) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.more.Signal()
}

// Inbox is the side of a back end that the executor sees: it takes steps and copies, and hands them to the goroutines of
// the device, one for each queue. A back end embeds it.
type Inbox struct {
	Steps   *Queue[Submission]
	Out, In *Queue[CopyJob]
}

// Submission is a step to run. The device fills it in and calls Step.Finish.
type Submission struct {
	Batch *Batch
	Step  *Step
	AtNS  int64 // when it was submitted, if SubmitAt said so
}

// CopyJob is a copy to make. The device calls Run.
type CopyJob struct {
	Regions []Region
	Buf     []byte
	Copy    *Copy
}

// NewInbox makes an empty inbox.
func NewInbox() Inbox {
	return Inbox{NewQueue[Submission](), NewQueue[CopyJob](), NewQueue[CopyJob]()}
}

// Submit implements Backend.
func (i *Inbox) Submit(b *Batch) *Step { return i.SubmitAt(b, 0) }

// SubmitAt is Submit for a device that must know when a step was submitted.
func (i *Inbox) SubmitAt(b *Batch, at int64) *Step {
	s := NewStep(b.Iter)
	if !i.Steps.Push(Submission{b, s, at}) {
		s.Err = ErrClosed
		s.Finish()
	}
	return s
}

// CopyOut implements Backend.
func (i *Inbox) CopyOut(regions []Region, dst []byte) *Copy { return submitCopy(i.Out, regions, dst) }

// CopyIn implements Backend.
func (i *Inbox) CopyIn(regions []Region, src []byte) *Copy { return submitCopy(i.In, regions, src) }

func submitCopy(q *Queue[CopyJob], regions []Region, buf []byte) *Copy {
	c := NewCopy()
	if !q.Push(CopyJob{regions, buf, c}) {
		c.Err = ErrClosed
		c.Finish()
	}
	return c
}

// End lets nothing more in; what is queued still runs.
func (i *Inbox) End() {
	i.Steps.Close()
	i.Out.Close()
	i.In.Close()
}

// Run makes the copy with move, and says when on the clock now and how it came out.
func (j CopyJob) Run(now func() int64, move func(regions []Region, buf []byte) error) {
	j.Copy.StartNS = now()
	j.Copy.Err = move(j.Regions, j.Buf)
	j.Copy.EndNS = now()
	j.Copy.Finish()
}
