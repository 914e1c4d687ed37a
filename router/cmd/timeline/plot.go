package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"meridian.internal/router/chart"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
)

type plotCmd struct {
	Kind   string `help:"bars: the time to first token of single requests; cdf: distributions; heat: parts of requests over time." enum:"bars,cdf,heat" default:"bars"`
	Output string `short:"o" help:"Picture to write; its ending chooses svg, png or pdf." default:"timeline.svg" placeholder:"FILE"`
	files
}

// Run draws.
func (c *plotCmd) Run(ctx context.Context) error {
	format := strings.TrimPrefix(strings.ToLower(filepath.Ext(c.Output)), ".")
	if format != "svg" && format != "png" && format != "pdf" {
		return exit{2, fmt.Errorf("--output %s: want a name that ends in .svg, .png or .pdf", c.Output)}
	}
	s, err := c.open(os.Stderr)
	if err != nil {
		return err
	}
	var d chart.Data
	done := progress(s, os.Stderr)
	err = s.Each(ctx, false, func(l *timeline.Line, _ traces.Position) error {
		d.Add(l)
		return nil
	})
	done()
	if err != nil {
		return unreadable(err)
	}
	f, err := os.Create(c.Output)
	if err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	if err := d.Draw(f, c.Kind, format); err != nil {
		f.Close()
		os.Remove(c.Output)
		return err
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("write %s: %w", c.Output, err)
	}
	fmt.Println(c.Output)
	return nil
}
