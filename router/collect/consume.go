package collect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/phase"
)

const (
	// ackWait is how long the stream waits before it brings an unacknowledged record again, also after the death of this
	// process; keepAlive renews it while a record waits for its line.
	ackWait   = 10 * time.Second
	keepAlive = 4 * time.Second
	pullBatch = 500
	retryWait = 300 * time.Millisecond
	// maxUnacked bounds what the stream brings before anything is acknowledged: the memory of pending records.
	maxUnacked = 250_000
	// consumerPrefix and the token of a router's name are the name of its consumer.
	consumerPrefix = "router-"
)

// consume brings the records meant for this router into Run until ctx ends.
func (c *Collector) consume(ctx context.Context) {
	for {
		err := c.consumeOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		c.log.Debug("consuming phase records stopped; trying again", "error", err)
		if !pause(ctx, retryWait) {
			return
		}
	}
}

func (c *Collector) consumeOnce(ctx context.Context) error {
	router := c.o.Router
	if err := c.o.Conn.Ready(ctx); err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cons, err := c.o.Conn.JetStream().CreateOrUpdateConsumer(ask, bus.StreamPhases, jetstream.ConsumerConfig{
		Durable: consumerPrefix + bus.Token(router), Description: "merges the records of router " + router,
		FilterSubject: bus.RouterSubjects(router), AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxAckPending: maxUnacked,
		DeliverPolicy: jetstream.DeliverAllPolicy,
	})
	if err != nil {
		return fmt.Errorf("make consumer of router %s: %w", router, err)
	}
	if err := c.inherit(ctx); err != nil {
		return err
	}
	return c.pull(ctx, cons, "")
}

// pull brings the records of a consumer into Run until ctx ends. adopted is as in message. When it returns, nothing more is
// delivered.
func (c *Collector) pull(ctx context.Context, cons jetstream.Consumer, adopted string) error {
	known := words{}
	failed := make(chan error, 1) // the first error since the last attempt
	pulling, err := cons.Consume(func(msg jetstream.Msg) { c.deliver(ctx, msg, adopted, known) },
		jetstream.PullMaxMessages(pullBatch), jetstream.PullHeartbeat(2*time.Second), jetstream.PullExpiry(10*time.Second),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			if errors.Is(err, jetstream.ErrNoHeartbeat) {
				return // the server is away; the client asks again
			}
			select {
			case failed <- err:
			default:
			}
		}))
	if err != nil {
		return fmt.Errorf("pull records: %w", err)
	}
	closed := pulling.Closed()
	stop := context.AfterFunc(ctx, pulling.Stop)
	defer stop()
	<-closed
	if ctx.Err() != nil {
		return ctx.Err()
	}
	select {
	case err = <-failed:
	default:
		err = jetstream.ErrMsgIteratorClosed
	}
	return fmt.Errorf("pull records: %w", err)
}

// deliver parses a message here, off Run's goroutine. What cannot be read is never asked for again.
func (c *Collector) deliver(ctx context.Context, msg jetstream.Msg, adopted string, known words) {
	m := message{ack: newStreamAck(c.o.Conn.NATS(), msg), adopted: adopted}
	var err error
	if msg.Headers().Get(bus.HeaderKind) == bus.KindSteps {
		m.header, m.steps, err = phase.ParseSteps(msg.Data())
	} else {
		m.rec, err = phase.Parse(msg.Data())
	}
	if err == nil && m.rec != nil && m.rec.RequestID == "" {
		err = fmt.Errorf("%w: no request_id", phase.ErrBadRecord)
	}
	if err != nil {
		c.metrics.bad.Inc()
		c.o.Strangers.Warn("record cannot be read", "subject", msg.Subject(), "error", err)
		if err := msg.Term(); err != nil {
			c.metrics.ackErrors.Inc()
		}
		return
	}
	if m.rec != nil {
		known.detach(m.rec)
	}
	select {
	case c.in <- m:
	case <-ctx.Done(): // not acknowledged: it comes again
	}
}
