package main

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"

	"meridian.internal/router/rowlog"
	"meridian.internal/shared/bus"
)

// rowsInFlight is how many rows may wait to be written; what is over is lost, and said to be.
const rowsInFlight = 4096

// runRows writes the rows that nodes publish beside the timelines, until ctx ends.
func (d *daemon) runRows(ctx context.Context) error {
	if d.conn == nil {
		return nil
	}
	in := make(chan *nats.Msg, rowsInFlight)
	sub, err := d.conn.NATS().ChanSubscribe(bus.IterSubjects, in)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", bus.IterSubjects, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // the connection ends too
	log := rowlog.New(d.o.Traces, d.log)
	defer log.Close()
	for {
		select {
		case m := <-in:
			log.Add(m.Data)
		case <-ctx.Done():
			return nil
		}
	}
}
