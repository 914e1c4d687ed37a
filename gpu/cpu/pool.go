package cpu

import (
	"sync"
	"sync/atomic"
)

// pool is a fixed set of worker goroutines. Only the device uses it, one run at a time; the device itself is worker 0.
// Workers that have nothing to do are blocked and use no processor time.
type pool struct {
	wake []chan *errand // one per extra worker
	done chan struct{}  // one message per woken worker and run
	wait sync.WaitGroup
}

// errand is one run: tasks 0..n-1, taken in order by whoever is free.
type errand struct {
	next atomic.Int64
	n    int
	do   func(worker, task int)
}

func newPool(threads int) *pool {
	p := &pool{done: make(chan struct{}, threads)}
	for w := 1; w < threads; w++ {
		wake := make(chan *errand, 1)
		p.wake = append(p.wake, wake)
		p.wait.Go(func() {
			for e := range wake {
				e.work(w)
				p.done <- struct{}{}
			}
		})
	}
	return p
}

func (e *errand) work(worker int) {
	for {
		i := int(e.next.Add(1)) - 1
		if i >= e.n {
			return
		}
		e.do(worker, i)
	}
}

// size is the number of workers, the device included.
func (p *pool) size() int { return len(p.wake) + 1 }

// worthSharing is the number of multiply-adds from which on it pays to wake another worker: waking costs some
// microseconds, in which one core does about this much.
const worthSharing = 400_000

// run calls do for every task in 0..n-1 and returns when all are done. work is the cost of all tasks in multiply-adds.
func (p *pool) run(n, work int, do func(worker, task int)) {
	helpers := min(len(p.wake), n-1, work/worthSharing)
	if helpers <= 0 {
		for i := range n {
			do(0, i)
		}
		return
	}
	e := &errand{n: n, do: do}
	for _, wake := range p.wake[:helpers] {
		wake <- e
	}
	e.work(0)
	for range helpers {
		<-p.done
	}
}

// close ends the workers.
func (p *pool) close() {
	for _, wake := range p.wake {
		close(wake)
	}
	p.wait.Wait()
}
