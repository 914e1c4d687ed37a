package remote

import (
	"sync"
	"sync/atomic"
)

// outbox gathers what a rank has to say. Adding never waits: what can be added is bounded by the sequences that the node gave.
type outbox struct {
	wake  chan struct{} // capacity 1
	taken atomic.Int64  // requests that the rank was given

	mu    sync.Mutex // guards items
	items []item
}

func (o *outbox) add(it item) {
	o.mu.Lock()
	o.items = append(o.items, it)
	o.mu.Unlock()
	o.touch()
}

// touch makes something be sent, with the newest load.
func (o *outbox) touch() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outbox) take() []item {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := o.items
	o.items = nil
	return list
}
