package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"meridian.internal/e2e/cluster"
)

const startTimeout = 2 * time.Minute

type up struct {
	layout
	Port int `help:"Port of the router; 0: a free one." default:"8080"`
}

// Run keeps the cluster until ctx ends. A daemon that dies is reported, not restarted.
func (u *up) Run(ctx context.Context, log *slog.Logger) error {
	cfg, err := u.config(log)
	if err != nil {
		return err
	}
	cfg.Port = u.Port
	c, err := start(ctx, cfg)
	if err != nil {
		return err
	}
	fmt.Printf("cluster is up; logs in %s/logs, timelines in %s\n", cfg.Dir, cfg.Traces)
	for i, p := range c.All() {
		if i == maxListed {
			fmt.Printf("  and %d more\n", len(c.All())-i)
			break
		}
		fmt.Printf("  %-10s %-28s pid %d\n", p.Name, p.URL, p.PID())
	}
	fmt.Printf("  %-10s %-28s in the first router\n", "nats", c.NATS)
	fmt.Printf("try: curl -N %s/v1/completions -d '{\"model\":\"%s\",\"prompt\":\"Once upon a time\",\"max_tokens\":48,\"stream\":true}'\n", c.URL(), modelName(ctx, c))
	watch(ctx, c)
	return c.Stop()
}

const maxListed = 24 // up prints under 4 KB

func start(ctx context.Context, cfg cluster.Config) (*cluster.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return cluster.Start(ctx, cfg)
}

// watch reports daemons that end until ctx ends.
func watch(ctx context.Context, c *cluster.Cluster) {
	died := make(chan *cluster.Process)
	for _, p := range c.All() {
		go func() {
			select {
			case <-p.Done():
				select {
				case died <- p:
				case <-ctx.Done():
				}
			case <-ctx.Done():
			}
		}()
	}
	for {
		select {
		case <-ctx.Done():
			return
		case p := <-died:
			fmt.Printf("%s ended: %v; see %s\n", p.Name, p.Wait(ctx), p.Log)
		}
	}
}
