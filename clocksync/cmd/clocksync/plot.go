package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"meridian.internal/clocksync/chart"
	"meridian.internal/clocksync/service"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

// plotCmd draws a clock from the log.
type plotCmd struct {
	Node   string        `help:"Node, or router, whose clock is drawn." required:"" placeholder:"NAME"`
	Router string        `help:"Router whose clock is the reference. Default: the clock-sync daemon that measured." placeholder:"NAME"`
	Nats   string        `help:"NATS server." name:"nats" default:"nats://127.0.0.1:4222" placeholder:"URL"`
	Since  time.Duration `help:"How far back; the log holds an hour." default:"15m"`
	Out    string        `help:"File to write, .svg or .png. Default: clock-NODE.svg." type:"path" placeholder:"FILE"`
	Wait   time.Duration `help:"How long NATS is waited for." default:"5s"`
}

// Run draws.
func (c *plotCmd) Run(ctx context.Context, log *slog.Logger) error {
	if c.Out == "" {
		c.Out = "clock-" + bus.Token(c.Node) + ".svg"
	}
	format := strings.TrimPrefix(filepath.Ext(c.Out), ".")
	if format != "svg" && format != "png" {
		return fmt.Errorf("--out %s: want a name that ends in .svg or .png", c.Out)
	}
	if c.Since <= 0 {
		return fmt.Errorf("--since %v: want a positive duration", c.Since)
	}
	es, err := c.read(ctx, log)
	if err != nil {
		return err
	}
	s, err := chart.Of(es)
	if err != nil {
		return fmt.Errorf("--node %s, --router %q, in the last %v: %w", c.Node, c.Router, c.Since, err)
	}
	var b bytes.Buffer
	if err := s.Write(&b, format); err != nil {
		return err
	}
	if err := os.WriteFile(c.Out, b.Bytes(), 0o644); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	fmt.Printf("%s: %d estimates of %s over %.0f s\n", c.Out, len(s.T), c.Node, -s.T[0])
	return nil
}

func (c *plotCmd) read(ctx context.Context, log *slog.Logger) ([]clock.Published, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	conn, err := bus.Connect(ctx, bus.Options{URL: c.Nats, Name: "clocksync plot", Logger: log})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.Ready(ctx); err != nil {
		return nil, fmt.Errorf("--nats %s: nothing answers there: %w", c.Nats, err)
	}
	return service.ReadLog(ctx, conn, c.Node, c.Router, c.Since)
}
