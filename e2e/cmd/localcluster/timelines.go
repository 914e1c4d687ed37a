package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// runTimeline runs the timeline command over the files of a traces folder, its output to ours.
func runTimeline(ctx context.Context, traces string, args ...string) error {
	bin, err := cluster.Binaries()
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(traces, "timeline-*.jsonl"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no timeline files in %s", traces)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "timeline"), append(args, files...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("timeline %s: %w", args[0], err)
	}
	return nil
}

// newID makes a request's id that no earlier run has had: where the folder is the same, the router would give that one's timeline.
func newID(name string) string { return name + "-" + strconv.FormatInt(time.Now().UnixNano(), 36) }

// modelName is the first model that the router lists.
func modelName(ctx context.Context, c *cluster.Cluster) string {
	cl := client.New(c.URL(), 1)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var models struct{ Data []struct{ ID string } }
	if err := cl.Get(ctx, "/v1/models", &models); err != nil || len(models.Data) == 0 {
		return "meridian-tiny"
	}
	return models.Data[0].ID
}

// median of values; null for none.
func median(values []int64) *int64 {
	if len(values) == 0 {
		return nil
	}
	slices.Sort(values)
	return &values[(len(values)-1)/2]
}
