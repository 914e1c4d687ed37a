package main

import (
	"context"
	"sync"

	"meridian.internal/router/export"
	"meridian.internal/router/timeline"
)

// traceFlags are the options of timelines beside where they are and how much of them is kept.
type traceFlags struct {
	TracesSync     bool   `help:"Sync each batch of timelines to the disk before their records are acknowledged: they survive the loss of power, and come as late as the disk is slow." name:"traces-sync"`
	TracesCompress bool   `help:"Compress files of timelines that are complete (zstd); everything that reads them reads both." name:"traces-compress"`
	OTLP           string `help:"OpenTelemetry collector (OTLP over HTTP) that gets the spans of each request as it ends. Empty: none." name:"otlp" placeholder:"URL"`
}

// openLive opens the way to an OpenTelemetry collector, if there is one.
func (d *daemon) openLive() (err error) {
	if d.o.OTLP == "" {
		return nil
	}
	if d.live, err = export.NewLive(d.o.OTLP, d.log); err != nil {
		return err
	}
	return d.live.Register(d.metrics)
}

// ended hands a request whose line is written to everybody who learns from it. It must not block.
func (d *daemon) ended(line *timeline.Line) {
	d.feed.Add(line)
	d.pool.Learn(line)
	d.clocks.Line(line)
	if d.live != nil && !line.Amends { // a collector has its tree already
		d.live.Add(line)
	}
}

// runLive sends spans while f runs; what f queued last is tried once.
func (d *daemon) runLive(ctx context.Context, f func() error) error {
	if d.live == nil {
		return f()
	}
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.live.Run(sending) }) // it ends by its context only
	defer wg.Wait()
	defer stop()
	return f()
}
