package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// view is the part of a router's /cluster that tells which nodes it sees.
type view struct {
	Nodes []struct {
		Name  string `json:"name"`
		State string `json:"state"`
		Clock *struct {
			BoundNS *int64 `json:"bound_ns"`
		} `json:"clock"`
	} `json:"nodes"`
}

// waitSeen waits until a router sees every running node as ready and knows its clock. A router is ready with its first
// node, which it would then use alone; a cluster is up when work can go to all of them.
func (c *Cluster) waitSeen(ctx context.Context, r *Process) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		missing, err := c.unseen(ctx, r)
		if err == nil && len(missing) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-r.Done():
			return fmt.Errorf("%s ended before it saw all nodes; see %s", r.Name, r.Log)
		case <-ctx.Done():
			return fmt.Errorf("wait until %s sees %s as ready with a known clock (last error: %v): %w", r.Name, strings.Join(missing, ", "), err, ctx.Err()) //nolint:errorlint // it may be nil
		}
	}
}

// unseen names the running nodes that a router does not see as ready with a known clock.
func (c *Cluster) unseen(ctx context.Context, r *Process) ([]string, error) {
	var missing []string
	for _, n := range c.Nodes {
		if n.Running() {
			missing = append(missing, n.Name)
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL+"/cluster", nil)
	if err != nil {
		return missing, fmt.Errorf("ask %s for its nodes: %w", r.Name, err)
	}
	if c.cfg.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.cfg.Key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return missing, fmt.Errorf("ask %s for its nodes: %w", r.Name, err)
	}
	defer resp.Body.Close()
	var v view
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return missing, fmt.Errorf("read the nodes of %s: %w", r.Name, err)
	}
	for _, n := range v.Nodes {
		if n.State == "ready" && n.Clock != nil && n.Clock.BoundNS != nil {
			missing = slices.DeleteFunc(missing, func(name string) bool { return name == n.Name })
		}
	}
	return missing, nil
}
