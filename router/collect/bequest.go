package collect

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
)

// bequest stands for the acknowledgements of a line that was written for a router that is gone. Before the records are
// acknowledged that router is told, in BucketBequests: when it comes back, whatever the pause, what it has of the request
// amends the line instead of making another.
type bequest struct {
	to   chan<- bequest
	key  string // in the bucket
	line []byte // nil: nothing is to be told
	acks []ack
	done chan<- struct{} // closed once this one, and so all before it, are told; nil: nobody waits
}

// errLater is returned by an acknowledgement that cannot be sent yet, and is to be tried again.
var errLater = errors.New("collect: later")

// Ack hands the bequest over to who tells it.
func (b bequest) Ack() error {
	select {
	case b.to <- b:
		return nil
	default:
		return errLater
	}
}

// InProgress says that the records are still wanted.
func (b bequest) InProgress() error {
	var err error
	for _, a := range b.acks {
		err = errors.Join(err, a.InProgress())
	}
	return err
}

// bequeath makes the acknowledgements of a line that is written for the router whose token is given; "": for this one. Steps
// stay in the line: a message holds no more than a megabyte.
func (c *Collector) bequeath(token string, l *timeline.Line, acks []ack) []ack {
	if token == "" {
		return acks
	}
	short := *l
	short.Phases = make([]timeline.Phase, len(l.Phases))
	for i, p := range l.Phases {
		p.Steps = nil
		short.Phases[i] = p
	}
	return []ack{bequest{to: c.bequests, key: token + "." + keyOf(l.RequestID), line: timeline.Append(nil, &short), acks: acks}}
}

// keyOf is the key of a request: NATS cuts the connection at a subject of some thousand bytes.
func keyOf(id string) string {
	if t := bus.Token(id); len(t) <= 512 {
		return t
	}
	sum := sha256.Sum256([]byte(id))
	return "sha256-" + hex.EncodeToString(sum[:])
}

const (
	tellWait = 3 * time.Second // one answer of JetStream
	lastWill = 2 * time.Second // for all bequests of a collector that ends
)

// tellBequests tells each before its records are acknowledged. It ends when the channel is closed.
func (c *Collector) tellBequests(ctx context.Context) {
	ending, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastWill, cancel) })()
	for b := range c.bequests {
		for b.line != nil && ending.Err() == nil {
			err := c.tell(ending, b)
			if errors.Is(err, nats.ErrMaxPayload) { // it never can be told; the line itself is on disk
				c.log.Warn("a line is too large to tell the router that is gone of it", "key", b.key, "bytes", len(b.line))
				err = nil
			}
			if err == nil {
				for _, a := range b.acks {
					c.acknowledge(a)
				}
				break
			}
			c.log.Debug("a router that is gone cannot be told of its line; trying again", "key", b.key, "error", err)
			pause(ending, retryWait)
		}
		if b.done != nil {
			close(b.done)
		}
	}
}

func (c *Collector) tell(ctx context.Context, b bequest) error {
	ctx, cancel := context.WithTimeout(ctx, tellWait)
	defer cancel()
	kv, err := c.o.Conn.KV(ctx, bus.BucketBequests)
	if err != nil {
		return err
	}
	_, err = kv.Put(ctx, b.key, b.line)
	return err
}

// heirWait is how long a router that is back waits until its heir has given back what it has not written.
const heirWait = 30 * time.Second

// inherit takes over the lines that were written for this router while it was gone. Its records are consumed after that.
func (c *Collector) inherit(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, heirWait)
	defer cancel()
	err := c.heirGone(waiting)
	if err != nil && ctx.Err() == nil && waiting.Err() != nil {
		c.log.Warn("lines of this router may be written twice", "error", err)
		err = nil
	}
	if err != nil {
		return err
	}
	return c.bequeathed(ctx, bus.Token(c.o.Router), "")
}

// bequeathed brings the lines into Run that were written for a router while it was gone. adopted is as in message.
func (c *Collector) bequeathed(ctx context.Context, token, adopted string) error {
	ctx, cancel := context.WithTimeout(ctx, heirWait)
	defer cancel()
	kv, err := c.o.Conn.KV(ctx, bus.BucketBequests)
	if err != nil {
		return err
	}
	left, err := kv.Watch(ctx, token+".*", jetstream.IgnoreDeletes())
	if err != nil {
		return fmt.Errorf("look for lines written by an heir: %w", err)
	}
	defer left.Stop() //nolint:errcheck // the context ends it too
	for {
		select {
		case e := <-left.Updates():
			if e == nil { // that were all
				return nil
			}
			l, err := timeline.Parse(e.Value())
			if err != nil {
				c.log.Warn("a line written by an heir cannot be read", "key", e.Key(), "error", err)
				continue
			}
			select {
			case c.in <- message{inherited: l, adopted: adopted}:
			case <-ctx.Done():
				return ctx.Err()
			}
		case <-ctx.Done():
			return fmt.Errorf("look for lines written by an heir: %w", ctx.Err())
		}
	}
}

// heirGone waits until no other router has the lease on the records of this one.
func (c *Collector) heirGone(ctx context.Context) error {
	leases, err := c.o.Conn.KV(ctx, bus.BucketAdoptions)
	if err != nil {
		return err
	}
	for {
		_, err := leases.Get(ctx, bus.Token(c.o.Router))
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look for an heir: %w", err)
		}
		if !pause(ctx, retryWait) {
			return fmt.Errorf("an heir keeps the records of this router: %w", ctx.Err())
		}
	}
}
