package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/load"
)

// profile has all streams decode at the same time, takes a window of the generation node's steps, and says what lay between them.
func (v *serving) profile(ctx context.Context, c *cluster.Cluster, p load.Plan) error {
	dir, err := v.profileDir()
	if err != nil {
		return fmt.Errorf("folder of the profile: %w", err)
	}
	// Short prompts, and enough tokens that the streams are still there when the window ends.
	p.Requests, p.Duration, p.Prompt, p.Output, p.Seed = v.Streams, 0, load.Constant(32), load.Constant(3*v.Profile+v.Streams), 99
	ctx, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	sent := make(chan error, 1)
	go func() {
		_, err := load.Run(ctx, p, nil)
		sent <- err
	}()
	files, err := v.window(ctx, c, dir)
	if err = errors.Join(err, <-sent); err != nil {
		return fmt.Errorf("profile of %d steps: %w", v.Profile, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		return fmt.Errorf("read the profile: %w", err)
	}
	g, err := gapsOf(b, v.Streams)
	if err != nil {
		return fmt.Errorf("profile %s: %w", files[0], err)
	}
	fmt.Printf("%v; %s\n", g, files[0])
	return nil
}

// window opens a window once all streams run on the generation node, and waits for its files.
func (v *serving) window(ctx context.Context, c *cluster.Cluster, dir string) (files []string, err error) {
	gen := c.Find("gen0")
	cl := client.New(c.URL(), 1)
	defer cl.Close()
	if err := await(ctx, func() (bool, error) { return runs(ctx, cl, gen.Name, v.Streams) }); err != nil {
		return nil, fmt.Errorf("wait for %d streams on %s: %w", v.Streams, gen.Name, err)
	}
	node := client.New(gen.URL, 1)
	defer node.Close()
	if err := node.Post(ctx, "/start_profile", map[string]any{"output_dir": dir, "num_steps": v.Profile, "activities": []string{"GPU"}}, &struct{}{}); err != nil {
		return nil, fmt.Errorf("start a profile of %s: %w", gen.Name, err)
	}
	err = await(ctx, func() (bool, error) { // it ends by itself
		files, err = filepath.Glob(filepath.Join(dir, "*.json"))
		return len(files) > 0, err
	})
	if err != nil {
		return nil, fmt.Errorf("wait for the window of %s: %w", gen.Name, err)
	}
	return files, nil
}

// runs tells whether so many sequences run on a node.
func runs(ctx context.Context, cl *client.Client, node string, n int) (bool, error) {
	var seen struct {
		Nodes []struct {
			Name string
			Load struct{ Running int }
		}
	}
	if err := cl.Get(ctx, "/cluster", &seen); err != nil {
		return false, err
	}
	for _, s := range seen.Nodes {
		if s.Name == node {
			return s.Load.Running >= n, nil
		}
	}
	return false, nil
}

// await asks until there is a yes or an error, or ctx ends.
func await(ctx context.Context, ask func() (bool, error)) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := ask(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
