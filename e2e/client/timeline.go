package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"
)

// Line is what this module reads of a timeline line (schema meridian.timeline/1).
type Line struct {
	RequestID     string   `json:"request_id"`
	Outcome       string   `json:"outcome"`
	Complete      bool     `json:"complete"`
	Missing       []string `json:"missing"`
	TTFTNS        *int64   `json:"ttft_ns"`
	E2ENS         *int64   `json:"e2e_ns"`
	NegativeSpans int      `json:"negative_spans"`
	MaxBoundNS    *int64   `json:"max_bound_ns"`
	Error         *struct {
		Stage   string `json:"stage"`
		Message string `json:"message"`
	} `json:"error"`
	Violations []struct {
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

// Node is the name of the node that ran the last attempt of a role (ctx or gen); empty when there was none.
func (l Line) Node(role string) string {
	for _, a := range slices.Backward(l.Attempts) {
		if a.Role == role {
			return a.Node
		}
	}
	return ""
}

const (
	timelinePoll = 50 * time.Millisecond
	timelineWait = 30 * time.Second // grace of the merge, flush and slack
)

// Timeline waits until the router has the line of a request.
func (c *Client) Timeline(ctx context.Context, id string) (Line, error) {
	return c.awaitLine(ctx, id, func(Line) bool { return true })
}

// Whole waits until the line of a request has the records of all that took part: one that comes after the merge's grace amends
// it. A line that lacks some for too long is given as it is.
func (c *Client) Whole(ctx context.Context, id string) (Line, error) {
	return c.awaitLine(ctx, id, func(l Line) bool { return l.Complete })
}

func (c *Client) awaitLine(ctx context.Context, id string, enough func(Line) bool) (Line, error) {
	ctx, cancel := context.WithTimeout(ctx, timelineWait)
	defer cancel()
	tick := time.NewTicker(timelinePoll)
	defer tick.Stop()
	var last *Line
	for {
		var l Line
		err := c.Get(ctx, "/timelines/"+url.PathEscape(id), &l)
		var status *StatusError
		switch {
		case err == nil && enough(l):
			return l, nil
		case err == nil:
			last = &l
		case ctx.Err() != nil && last != nil:
			return *last, nil
		case !errors.As(err, &status) || status.Status != http.StatusNotFound:
			return Line{}, fmt.Errorf("timeline of %s: %w", id, err)
		}
		select {
		case <-ctx.Done():
			if last != nil {
				return *last, nil
			}
			return Line{}, fmt.Errorf("timeline of %s: none after %v", id, timelineWait)
		case <-tick.C:
		}
	}
}
