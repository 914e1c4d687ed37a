package collect

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/node"
)

const (
	adoptAsk   = 3 * time.Second // one answer of JetStream
	giveUpWait = 5 * time.Second // less than a lease lives
	// adoptLooks is how many looks in a row must find a router gone: one that is restarted at its place takes its own
	// records.
	adoptLooks = 3
)

// adoptDead consumes the records of routers that are gone, one router after the other. A lease in BucketAdoptions makes
// sure that one router alone does so: two would share the records of each request.
func (c *Collector) adoptDead(ctx context.Context) {
	gone := map[string]int{} // looks in a row that found a router gone, by the token of its name
	for pause(ctx, c.o.AdoptLook) {
		if err := c.o.Conn.Ready(ctx); err != nil {
			return
		}
		if err := c.lookForDead(ctx, gone); err != nil && ctx.Err() == nil {
			c.log.Debug("looking for records of routers that are gone; trying again", "error", err)
		}
	}
}

func (c *Collector) lookForDead(ctx context.Context, gone map[string]int) error {
	ask, cancel := context.WithTimeout(ctx, adoptAsk)
	defer cancel()
	stream, err := c.o.Conn.JetStream().Stream(ask, bus.StreamPhases)
	if err != nil {
		return fmt.Errorf("open stream %s: %w", bus.StreamPhases, err)
	}
	list := stream.ListConsumers(ask)
	var dead []string
	for info := range list.Info() {
		token, ours := strings.CutPrefix(info.Name, consumerPrefix)
		if !ours || token == bus.Token(c.o.Router) || info.NumPending+uint64(info.NumAckPending) == 0 {
			delete(gone, token)
			continue
		}
		alive, err := c.alive(ask, token)
		if err != nil {
			return err
		}
		if alive {
			delete(gone, token)
			continue
		}
		if gone[token]++; gone[token] >= adoptLooks {
			dead = append(dead, token)
		}
	}
	if err := list.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return fmt.Errorf("list consumers of %s: %w", bus.StreamPhases, err)
	}
	for _, token := range dead {
		if err := c.adopt(ctx, stream, token); err != nil {
			return err
		}
	}
	return nil
}

// alive says whether a router is registered.
func (c *Collector) alive(ctx context.Context, token string) (bool, error) {
	kv, err := c.o.Conn.KV(ctx, bus.BucketNodes)
	if err != nil {
		return false, err
	}
	_, err = kv.Get(ctx, string(node.RoleRouter)+"."+token)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// adopt consumes the records of a router that is gone until there are none, the router is back, or the lease is lost.
func (c *Collector) adopt(ctx context.Context, stream jetstream.Stream, token string) error {
	kv, err := c.o.Conn.KV(ctx, bus.BucketAdoptions)
	if err != nil {
		return err
	}
	rev, err := kv.Create(ctx, token, []byte(c.o.Router))
	if errors.Is(err, jetstream.ErrKeyExists) {
		return nil // another router does
	}
	if err != nil {
		return fmt.Errorf("adopt the records of router %s: %w", token, err)
	}
	cons, err := stream.Consumer(ctx, consumerPrefix+token)
	if err != nil {
		return errors.Join(fmt.Errorf("adopt the records of router %s: %w", token, err), release(ctx, kv, token))
	}
	c.log.Info("adopting the records of a router that is gone", "router", token)
	c.metrics.adopted.Inc()
	pulling, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() {
		err := c.bequeathed(pulling, token, token)
		if err == nil {
			err = c.pull(pulling, cons, token)
		}
		done <- err
	}()
	for {
		select {
		case err = <-done:
		case <-time.After(c.o.AdoptLook):
			if rev, err = kv.Update(ctx, token, []byte(c.o.Router), rev); err == nil && c.wanted(ctx, cons, token) {
				continue
			}
			stop()
			<-done
		}
		c.giveUp(ctx, token)
		return errors.Join(err, release(ctx, kv, token))
	}
}

// giveUp waits until nothing of an adopted router is held here: what is not written is somebody else's now, and of what is
// written that router is told. Then it may be known that this one is its heir no more.
func (c *Collector) giveUp(ctx context.Context, token string) {
	done := make(chan struct{})
	select {
	case c.in <- message{adopted: token, back: done}:
	case <-ctx.Done():
		return
	}
	select {
	case <-done:
	case <-time.After(giveUpWait): // the disk, or the stream, refuses
	case <-ctx.Done():
	}
}

// wanted says whether an adopted router still is gone and has records.
func (c *Collector) wanted(ctx context.Context, cons jetstream.Consumer, token string) bool {
	info, err := cons.Info(ctx)
	if err != nil || info.NumPending+uint64(info.NumAckPending) == 0 {
		return false
	}
	alive, err := c.alive(ctx, token)
	return err == nil && !alive
}

// release gives the lease back, also when ctx has ended: nobody else need wait for its end.
func release(ctx context.Context, kv jetstream.KeyValue, token string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := kv.Delete(ctx, token); err != nil {
		return fmt.Errorf("give back the lease of router %s: %w", token, err)
	}
	return nil
}

// pause waits for d; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
