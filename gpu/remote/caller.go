package remote

import (
	"context"
	"net"
	"sync"
	"time"
)

// caller sends orders over a link and hands the answers back. Its run reads.
type caller struct {
	l *link[order, packet]

	mu    sync.Mutex // guards the fields below
	calls map[int64]*call
	last  int64 // number of the newest call
	err   error // the link has ended
}

// call waits for its answer.
type call struct {
	dst    []byte // where the bytes after the answer go
	answer chan *item
	err    error // there is none; set before answer is closed
}

func newCaller(c net.Conn, limit time.Duration) *caller {
	return &caller{l: newLink[order, packet](c, limit), calls: map[int64]*call{}}
}

// call gives an order and waits for its answer. The bytes after it go to dst, so that end of ctx is not the end of a call that has one.
func (c *caller) call(ctx context.Context, o order, payload, dst []byte) (*item, error) {
	w := &call{dst: dst, answer: make(chan *item, 1)}
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, c.err
	}
	c.last++
	o.Call = c.last
	c.calls[o.Call] = w
	c.mu.Unlock()
	o.Payload = len(payload)
	if err := c.l.send(&o, payload); err != nil {
		_ = c.l.conn.Close() // half a message may be out: nothing can follow it. run says why
	}
	ended := ctx.Done()
	if dst != nil {
		ended = nil
	}
	select {
	case it, ok := <-w.answer:
		if !ok {
			return nil, w.err
		}
		return it, it.Fault.error()
	case <-ended:
		c.forget(o.Call)
		return nil, ctx.Err()
	}
}

// tell gives an order that has no answer.
func (c *caller) tell(o order) {
	if c.l.send(&o, nil) != nil {
		_ = c.l.conn.Close()
	}
}

func (c *caller) forget(number int64) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.calls[number]
	delete(c.calls, number)
	return w
}

// run reads until the link ends, and gives what is no answer to hear. The calls that are left end with the error of why.
func (c *caller) run(hear func(*packet), why func(error) error) {
	err := c.read(hear)
	_ = c.l.conn.Close()
	err = why(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	for _, w := range c.calls {
		w.err = err
		close(w.answer)
	}
	clear(c.calls)
}

func (c *caller) read(hear func(*packet)) error {
	for {
		p, err := c.l.receive()
		if err != nil {
			return err
		}
		hear(p)
		for i := range p.Items {
			it := &p.Items[i]
			if it.Call == 0 {
				continue
			}
			w := c.forget(it.Call)
			if p.Payload > 0 {
				var dst []byte // of an answer that nobody waits for any more: to nowhere
				if w != nil {
					dst = w.dst
				}
				if _, err := c.l.payload(p.Payload, dst); err != nil {
					if w != nil {
						w.err = err
						close(w.answer)
					}
					return err
				}
			}
			if w != nil {
				w.answer <- it
			}
		}
	}
}
