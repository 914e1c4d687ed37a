package proxy

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"meridian.internal/router/admit"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/node"
)

// door is where requests wait until the cluster has room for them.
type door struct {
	now  func() int64
	room func() int // weight that may run; asked again after refreshEvery

	mu      sync.Mutex // held for short reads and writes; guards the rest
	queue   admit.Queue
	askedNS int64 // when room was asked
	waiters map[*admit.Ticket]chan struct{}
}

const (
	defaultQueue     = 1024
	defaultQueueTime = 10 * time.Second
	refreshEvery     = 200 * time.Millisecond
	// headroom: while a slot decodes, the request that comes next into it is prefilled and handed over.
	headroom = 2
	// foreignSlots is for workers that do not say how many sequences they run at a time.
	foreignSlots = 256
	unlimited    = 1 << 30
)

func newDoor(o *Options) *door {
	d := &door{now: o.Steady.Now, waiters: map[*admit.Ticket]chan struct{}{}}
	d.queue.Room = o.Queue
	d.room = func() int {
		if o.MaxRunning > 0 {
			return o.MaxRunning
		}
		return slots(o.Pool.Snapshot())
	}
	return d
}

// slots is how many sequences the cluster takes at a time. Without a node that is ready it is no limit: placing says at
// once that there is none.
func slots(nodes []pool.Status) int {
	sum := map[node.Role]int{}
	for _, s := range nodes {
		switch {
		case !s.Healthy || s.Info.State != node.Ready:
		case s.Info.Model != nil && s.Info.Model.MaxBatchSize > 0:
			sum[s.Info.Role] += headroom * s.Info.Model.MaxBatchSize
		default:
			sum[s.Info.Role] += foreignSlots
		}
	}
	for _, role := range []node.Role{node.RoleGen, node.RoleCtx} {
		if sum[role] > 0 {
			return sum[role]
		}
	}
	return unlimited
}

// enter waits for room. The ticket is to be given back with leave.
func (d *door) enter(ctx context.Context, a admit.Ask) (*admit.Ticket, *api.Error) {
	began := d.now()
	d.mu.Lock()
	d.refresh(began)
	t, evicted, err := d.queue.Arrive(began, a)
	if err != nil {
		e := d.refusal(err)
		d.mu.Unlock()
		return nil, e
	}
	if evicted != nil {
		d.wake([]*admit.Ticket{evicted})
	}
	if t.Running {
		d.mu.Unlock()
		return t, nil
	}
	turn := make(chan struct{})
	d.waiters[t] = turn
	d.mu.Unlock()
	d.wait(ctx, turn, a.Patience)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.waiters, t)
	switch {
	case t.Running && ctx.Err() == nil:
		return t, nil
	case t.Evicted:
		return nil, d.refusal(admit.ErrFull)
	}
	d.wake(d.queue.Leave(d.now(), t))
	if ctx.Err() != nil {
		e := stopCause(ctx)
		e.Stage = "queue"
		return nil, e
	}
	return nil, d.refusal(admit.ErrLate)
}

// wait waits for a turn, as long as a request's patience lasts. Room may come though none ends: a node has joined.
func (d *door) wait(ctx context.Context, turn <-chan struct{}, patience time.Duration) {
	timer, look := time.NewTimer(patience), time.NewTicker(refreshEvery)
	defer timer.Stop()
	defer look.Stop()
	for {
		select {
		case <-turn:
			return
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		case <-look.C:
			d.mu.Lock()
			d.refresh(d.now())
			d.mu.Unlock()
		}
	}
}

// refresh asks for the room if that was long ago, and lets in whom there is more of it for. The mutex is held.
func (d *door) refresh(now int64) {
	if d.askedNS == 0 || now-d.askedNS >= refreshEvery.Nanoseconds() {
		d.askedNS = now
		d.queue.Limit = d.room()
		d.wake(d.queue.Next())
	}
}

// leave gives the ticket's room to those who wait.
func (d *door) leave(t *admit.Ticket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wake(d.queue.Leave(d.now(), t))
}

// wake tells waiters that their state has changed. The mutex is held.
func (d *door) wake(tickets []*admit.Ticket) {
	for _, t := range tickets {
		if turn := d.waiters[t]; turn != nil {
			close(turn)
			delete(d.waiters, t)
		}
	}
}

// refusal is what a client is told. The mutex is held.
func (d *door) refusal(err error) *api.Error {
	running, waiting := d.queue.Load()
	after := d.queue.RetryAfter(d.now())
	if errors.Is(err, admit.ErrLate) {
		return api.Unavailable("queue", after, "%d requests run and %d wait: this one would wait longer than it may", running, waiting)
	}
	e := api.Unavailable("queue", after, "%d requests run and %d wait, as many as may", running, waiting)
	e.Code, e.Type = http.StatusTooManyRequests, api.TypeOverloaded
	return e
}

// load is for metrics.
func (d *door) load() (running, waiting, limit int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	running, waiting = d.queue.Load()
	return running, waiting, d.queue.Limit
}

// lifeOf is how long a request may take: what its client says, in the same header that legs carry, within the router's limit.
func (p *Proxy) lifeOf(r *http.Request) (time.Duration, *api.Error) {
	v := r.Header.Get(api.HeaderDeadline)
	if v == "" {
		return p.o.Timeout, nil
	}
	ms, err := strconv.ParseInt(v, 10, 64)
	if err != nil || ms < 1 {
		return 0, api.Invalid(api.HeaderDeadline, "header %s: %.40q is not a whole number of milliseconds, 1 or more", api.HeaderDeadline, v)
	}
	return min(time.Duration(min(ms, p.o.Timeout.Milliseconds()))*time.Millisecond, p.o.Timeout), nil
}
