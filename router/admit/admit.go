// Package admit decides which requests may run, which wait and which are refused: a bounded queue in front of the cluster,
// with priorities, fairness among principals and an estimate of the wait. It is pure: the caller brings the time, guards it,
// and wakes those whom it names.
//
// Within a priority, principals take turns by the weight that each was given (start-time fair queueing), so that one who
// sends a thousand requests delays the others by one of them.
package admit

import (
	"errors"
	"math"
	"slices"
	"time"
)

var (
	// ErrFull is returned when the queue holds all that it may and nobody in it stands behind the newcomer.
	ErrFull = errors.New("admit: the queue is full")
	// ErrLate is returned when the estimated wait exceeds what the request may wait.
	ErrLate = errors.New("admit: the wait would be too long")
)

// Ask is a request at the door.
type Ask struct {
	Principal string        // whose it is; "" where no keys are known: all are one
	Priority  int           // higher goes first
	Weight    int           // sub-requests that it will run at a time
	Patience  time.Duration // longest useful wait
}

// Ticket is an accepted request: it runs, or it waits.
type Ticket struct {
	Ask
	Running bool
	Evicted bool // it waited, and was pushed out by one that comes first

	flow *flow // nil: it never waited
}

// flow is what a principal has waiting at one priority.
type flow struct {
	principal string
	priority  int
	waiting   []*Ticket
	virtual   float64 // start tag of its next request
}

// Queue is the door. Limit and Room may be changed at any time.
type Queue struct {
	Limit int // weight that may run at a time
	Room  int // weight that may wait

	running int
	waiting int
	flows   []*flow // with something waiting
	virtual map[int]float64
	served  map[turn]float64 // start tags of those that have nothing waiting, where they are ahead of virtual
	drain   drain
}

// turn names a flow.
type turn struct {
	principal string
	priority  int
}

// Arrive takes a request: it runs at once, waits, or is refused with ErrFull or ErrLate. evicted had to leave for it.
func (q *Queue) Arrive(nowNS int64, a Ask) (t *Ticket, evicted *Ticket, err error) {
	a.Weight = max(a.Weight, 1)
	t = &Ticket{Ask: a}
	if q.waiting == 0 && q.fits(a.Weight) {
		q.start(t)
		return t, nil, nil
	}
	if wait, known := q.wait(nowNS, a); known && wait > a.Patience {
		return nil, nil, ErrLate
	}
	if q.waiting+a.Weight > q.Room {
		if evicted = q.victim(a); evicted == nil {
			return nil, nil, ErrFull
		}
		q.drop(evicted)
		evicted.Evicted = true
	}
	q.enqueue(t)
	return t, evicted, nil
}

// fits: a request heavier than the limit runs alone.
func (q *Queue) fits(weight int) bool { return q.running == 0 || q.running+weight <= q.Limit }

func (q *Queue) start(t *Ticket) {
	t.Running = true
	q.running += t.Weight
}

func (q *Queue) enqueue(t *Ticket) {
	if t.flow = q.of(t.Ask); t.flow == nil {
		t.flow = &flow{principal: t.Principal, priority: t.Priority, virtual: max(q.virtual[t.Priority], q.served[turn{t.Principal, t.Priority}])}
		q.flows = append(q.flows, t.flow)
	}
	t.flow.waiting = append(t.flow.waiting, t)
	q.waiting += t.Weight
}

// victim is who leaves a full queue for a newcomer: the last of a lower priority, or of the principal that has the most
// waiting at the same one, if that is more than the newcomer's has. nil: nobody.
func (q *Queue) victim(a Ask) *Ticket {
	var worst *flow
	for _, f := range q.flows {
		if f.priority > a.Priority {
			continue
		}
		if worst == nil || f.priority < worst.priority || f.priority == worst.priority && f.weight() > worst.weight() {
			worst = f
		}
	}
	if worst == nil || worst.priority == a.Priority && worst.weight() <= q.of(a).weight()+a.Weight {
		return nil
	}
	last := worst.waiting[len(worst.waiting)-1]
	if last.Weight < a.Weight {
		return nil
	}
	return last
}

// drop takes a waiting ticket out.
func (q *Queue) drop(t *Ticket) {
	f := t.flow
	i := slices.Index(f.waiting, t)
	f.waiting = slices.Delete(f.waiting, i, i+1)
	q.waiting -= t.Weight
	if len(f.waiting) == 0 {
		q.flows = slices.DeleteFunc(q.flows, func(x *flow) bool { return x == f })
		if len(q.flows) == 0 {
			q.virtual, q.served = nil, nil // nobody competes any more
			return
		}
		q.remember(f)
	}
}

// remember keeps the tag of a flow that has nothing waiting: one that comes back at once has no more turns for it.
func (q *Queue) remember(f *flow) {
	for k, v := range q.served {
		if v <= q.virtual[k.priority] {
			delete(q.served, k)
		}
	}
	if f.virtual > q.virtual[f.priority] {
		if q.served == nil {
			q.served = map[turn]float64{}
		}
		q.served[turn{f.principal, f.priority}] = f.virtual
	}
}

// of is the flow that a request belongs to; nil: nothing of it waits.
func (q *Queue) of(a Ask) *flow {
	for _, f := range q.flows {
		if f.priority == a.Priority && f.principal == a.Principal {
			return f
		}
	}
	return nil
}

// weight is what of a flow waits.
func (f *flow) weight() (sum int) {
	if f == nil {
		return 0
	}
	for _, t := range f.waiting {
		sum += t.Weight
	}
	return sum
}

// Leave takes a request away, whether it ran to its end or gave up, and returns those that may run now. Only one that ran
// tells of the rate at which the cluster drains.
func (q *Queue) Leave(nowNS int64, t *Ticket) []*Ticket {
	switch {
	case t.Running:
		q.running -= t.Weight
		q.drain.add(nowNS, t.Weight)
	case !t.Evicted:
		q.drop(t)
	}
	return q.Next()
}

// Next starts those that fit now, and returns them.
func (q *Queue) Next() (started []*Ticket) {
	for len(q.flows) > 0 {
		f := q.first()
		t := f.waiting[0]
		if !q.fits(t.Weight) {
			return started
		}
		if q.virtual == nil {
			q.virtual = map[int]float64{}
		}
		q.virtual[f.priority] = f.virtual
		f.virtual += float64(t.Weight)
		q.drop(t)
		q.start(t)
		started = append(started, t)
	}
	return started
}

// first is the flow whose turn it is: of the highest priority the one that was served least.
func (q *Queue) first() *flow {
	best := q.flows[0]
	for _, f := range q.flows[1:] {
		if f.priority > best.priority || f.priority == best.priority && f.virtual < best.virtual {
			best = f
		}
	}
	return best
}

// wait estimates how long a newcomer waits; not known while nothing has ended yet.
func (q *Queue) wait(nowNS int64, a Ask) (time.Duration, bool) {
	ahead, own := 0, q.of(a).weight()
	for _, f := range q.flows {
		switch {
		case f.priority > a.Priority:
			ahead += f.weight()
		case f.priority == a.Priority: // by turns it gets no more than the newcomer's principal until then, and what it began
			ahead += min(f.weight(), own+a.Weight)
		}
	}
	return q.after(nowNS, ahead+a.Weight)
}

// after is when so much weight will have drained.
func (q *Queue) after(nowNS int64, weight int) (time.Duration, bool) {
	rate := q.drain.perSecond(nowNS)
	if rate == 0 {
		return 0, false
	}
	return time.Duration(math.Min(float64(weight)/rate, maxWait.Seconds()) * float64(time.Second)), true
}

const maxWait = time.Hour

const (
	leastRetryAfter = time.Second
	mostRetryAfter  = time.Minute
)

// RetryAfter is when a refused request may come back with hope: when what waits now has drained.
func (q *Queue) RetryAfter(nowNS int64) time.Duration {
	d, known := q.after(nowNS, q.waiting+1)
	if !known {
		return leastRetryAfter
	}
	return min(max(d, leastRetryAfter), mostRetryAfter)
}

// Load is what runs and what waits, in weight.
func (q *Queue) Load() (running, waiting int) { return q.running, q.waiting }
