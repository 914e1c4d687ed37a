//go:build cuda

package cuda

import (
	"fmt"
	"sync"
	"unsafe"
)

// onCard are hidden states that lie on the card of the stage that made them. It implements backend.Hidden.
type onCard struct {
	pool *hiddenPool
	in   buffer
	n    int // values
}

// Len implements backend.Hidden.
func (h *onCard) Len() int { return h.n }

// Release implements backend.Hidden.
func (h *onCard) Release() { h.pool.give(h.in) }

// hiddenPool is memory for hidden states on their way to the next stage. The launcher takes of it; who has used a piece gives
// it back, from any goroutine and without asking the driver.
type hiddenPool struct {
	*context
	least int // bytes of a piece

	mu   sync.Mutex // guards free and out
	free []buffer
	out  int // pieces that are on their way
}

// hiddenAhead is how many steps of a stage the stage behind is late by at most, about: for so many a memory fraction has room.
const hiddenAhead = 3

// take gives a piece of at least n bytes. Only a step that is larger than every step before costs an allocation.
func (p *hiddenPool) take(n int) (buffer, error) {
	var b buffer
	p.mu.Lock()
	if last := len(p.free) - 1; last >= 0 {
		b, p.free = p.free[last], p.free[:last]
	}
	p.out++
	p.mu.Unlock()
	_, err := p.grow(&b, max(n, p.least))
	return b, err
}

func (p *hiddenPool) give(b buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, b)
	p.out--
}

// close frees the pieces; the stage behind must have given all back.
func (p *hiddenPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var err error
	for _, b := range p.free {
		err = firstOf(err, p.context.free(b.at))
	}
	if p.out > 0 {
		err = firstOf(err, fmt.Errorf("cuda: %d hidden states were not given back", p.out))
	}
	return err
}

// reach lets this card read the memory of another one directly, where the machine can; else the driver copies through the host.
func (d *device) reach(other *context) error {
	if other.handle == d.context.handle || d.reached[other.handle] {
		return nil
	}
	var can int32
	if err := d.do("cuDeviceCanAccessPeer", uintptr(unsafe.Pointer(&can)), uintptr(d.context.device), uintptr(other.device)); err != nil {
		return err
	}
	if can != 0 {
		const already = 704 // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: by another stage of this process
		if s := d.call("cuCtxEnablePeerAccess", other.handle, 0); s != 0 && s != already {
			return d.failed("cuCtxEnablePeerAccess", s)
		}
	}
	d.reached[other.handle] = true
	return nil
}

// receive queues the copy of what the stage before has left on its card.
func (d *device) receive(h *onCard) error {
	if h.n == 0 {
		return nil
	}
	if err := d.reach(h.pool.context); err != nil {
		return fmt.Errorf("reach the card of the stage before: %w", err)
	}
	return d.do("cuMemcpyPeerAsync", uintptr(d.hidden.at), d.context.handle, uintptr(h.in.at), h.pool.handle, uintptr(4*h.n), d.stream.handle)
}

// leave queues a copy of the step's hidden states out of the residual stream, which the next step changes.
func (d *device) leave(rows int) (*onCard, error) {
	h := &onCard{pool: d.onward, n: rows * d.info.Hidden}
	var err error
	if h.in, err = d.onward.take(4 * h.n); err != nil {
		return h, fmt.Errorf("hidden states for the next stage: %w", err)
	}
	if h.n == 0 {
		return h, nil
	}
	return h, d.do("cuMemcpyDtoDAsync_v2", uintptr(h.in.at), uintptr(d.hidden.at), uintptr(4*h.n), d.stream.handle)
}
