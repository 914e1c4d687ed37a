package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// line is what the commands read of a timeline line (schema meridian.timeline/1).
type line struct {
	RequestID     string   `json:"request_id"`
	Outcome       string   `json:"outcome"`
	Complete      bool     `json:"complete"`
	Missing       []string `json:"missing"`
	TTFTNS        *int64   `json:"ttft_ns"`
	E2ENS         *int64   `json:"e2e_ns"`
	NegativeSpans int      `json:"negative_spans"`
	MaxBoundNS    *int64   `json:"max_bound_ns"`
	Violations    []struct {
		Cause, Event string
	} `json:"violations"`
	Handover *struct {
		Bytes int64 `json:"bytes"`
	} `json:"handover"`
	Attempts []struct {
		Role string `json:"role"`
		Node string `json:"node"`
	} `json:"attempts"`
}

// node is the name of the node that ran the last attempt of a role.
func (l line) node(role string) string {
	for _, a := range slices.Backward(l.Attempts) {
		if a.Role == role {
			return a.Node
		}
	}
	return ""
}

const (
	timelinePoll = 50 * time.Millisecond
	timelineWait = 10 * time.Second // grace of the merge, flush and slack
)

// timeline waits until the router has the line of a request.
func timeline(ctx context.Context, c *client.Client, id string) (line, error) {
	ctx, cancel := context.WithTimeout(ctx, timelineWait)
	defer cancel()
	tick := time.NewTicker(timelinePoll)
	defer tick.Stop()
	for {
		var l line
		err := c.Get(ctx, "/timelines/"+url.PathEscape(id), &l)
		if err == nil {
			return l, nil
		}
		var status *client.StatusError
		if !errors.As(err, &status) || status.Status != 404 {
			return line{}, fmt.Errorf("timeline of %s: %w", id, err)
		}
		select {
		case <-ctx.Done():
			return line{}, fmt.Errorf("timeline of %s: none after %v", id, timelineWait)
		case <-tick.C:
		}
	}
}

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
