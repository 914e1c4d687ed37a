package main

import (
	"context"
	"errors"
	"time"

	"meridian.internal/router/collect"
	"meridian.internal/router/proxy"
	"meridian.internal/router/timeline"
	"meridian.internal/router/web"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/phase"
)

// lines is where records become timelines: the router's own go through its publisher, so that they survive it, and to the
// collector at once.
type lines struct {
	collector *collect.Collector
	publisher *bus.Publisher // nil without NATS
	d         *daemon
}

// flushTime bounds how long a closing router waits for NATS to take its last records; what is left stays in the spool.
const flushTime = 2 * time.Second

// holdTime is several times what a line needs to get to the disk; the records of lines that wait longer for their nodes'
// go to NATS meanwhile.
const holdTime = 500 * time.Millisecond

func (d *daemon) openLines(context.Context) (err error) {
	l := &lines{d: d}
	if d.conn != nil {
		l.publisher, err = bus.NewPublisher(d.conn, bus.PublisherOptions{SpoolDir: d.o.spool(), Hold: holdTime, Logger: d.log})
		if err != nil {
			return err
		}
		if err := l.publisher.Register(d.metrics); err != nil {
			return errors.Join(err, l.close())
		}
	}
	if err := d.openLive(); err != nil {
		return errors.Join(err, l.close())
	}
	d.feed = web.NewFeed(time.Now, d.clocksNow)
	l.collector, err = collect.New(collect.Options{
		Router: d.o.Name, Dir: d.o.Traces, MaxTotal: int64(d.o.TracesMax), Compress: d.o.TracesCompress, Sync: d.o.TracesSync, Conn: d.conn, Publisher: l.publisher, Registry: d.metrics, Logger: d.log, Strangers: d.strangers,
		OnLine: d.ended,
		Clocks: timeline.Clocks{Reference: d.steady.ID(), Estimate: d.clocks.Estimate, Wall: d.wall},
	})
	if err != nil {
		return errors.Join(err, l.close())
	}
	d.lines = l
	d.feed.Restore(l.collector.Recent(restoredLines))
	return nil
}

const restoredLines = 1000

// clocksNow is what the page's history of clocks is made of.
func (d *daemon) clocksNow() []web.ClockOf {
	nodes := d.proxy.Cluster().Nodes
	out := make([]web.ClockOf, len(nodes))
	for i, n := range nodes {
		out[i] = web.ClockOf{Node: n.Name, OffsetNS: n.Clock.OffsetNS, BoundNS: n.Clock.BoundNS}
	}
	return out
}

// nodeURLs are those of our own nodes, which tell what they keep of KV.
func (d *daemon) nodeURLs() map[string]string {
	urls := map[string]string{}
	for _, n := range d.proxy.Cluster().Nodes {
		if !n.Foreign {
			urls[n.Name] = n.URL
		}
	}
	return urls
}

// wall is UTC, as this machine knows it, when the steady clock showed ns.
func (d *daemon) wall(ns int64) int64 {
	return time.Now().UnixNano() - (d.steady.Now() - ns)
}

// add keeps one of the router's own records. Monitoring never fails a request: what is lost is counted.
func (l *lines) add(rec *phase.Record) {
	if err := l.collector.Add(rec); err != nil && !errors.Is(err, collect.ErrBusy) {
		l.d.log.Warn("record lost", "request_id", rec.RequestID, "error", err)
	}
}

func (l *lines) reader() proxy.Timelines { return l.collector }

// run merges until ctx ends; then it waits for the records of the last requests, and lets go of the spool.
func (l *lines) run(ctx context.Context) error {
	return errors.Join(l.d.runLive(ctx, func() error { return l.collector.Run(ctx) }), l.close())
}

func (l *lines) close() error {
	if l.publisher == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	if err := l.publisher.Close(ctx); err != nil {
		l.d.log.Warn("records stay in the spool for the next start", "error", err)
	}
	return nil
}
