package compose

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/shared/serve/servetest"
)

const project = "meridian-e2e"

// tool is docker-compose 1.29 or the plugin of v2.
func tool(t *testing.T) []string {
	t.Helper()
	if err := exec.Command("docker", "compose", "version").Run(); err == nil {
		return []string{"docker", "compose"}
	}
	if _, err := exec.LookPath("docker-compose"); err == nil {
		return []string{"docker-compose"}
	}
	t.Skip("docker-compose is not installed")
	return nil
}

type stack struct {
	tool []string
	env  []string
}

func (s stack) run(ctx context.Context, args ...string) (string, error) {
	all := append(append(append([]string{}, s.tool[1:]...), "-p", project, "-f", "../../docker-compose.yml"), args...)
	cmd := exec.CommandContext(ctx, s.tool[0], all...)
	cmd.Env = append(os.Environ(), s.env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func TestComposeServesAndAlignsItsClocks(t *testing.T) {
	if os.Getenv("MERIDIAN_TEST_COMPOSE") == "" {
		t.Skip("needs images: make e2e")
	}
	if err := exec.Command("docker", "info").Run(); err != nil {
		t.Skip("no Docker engine runs")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	_, port, err := net.SplitHostPort(servetest.Addr(t))
	if err != nil {
		t.Fatal(err)
	}
	s := stack{tool: tool(t), env: []string{"MERIDIAN_PORT=" + port}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if t.Failed() {
			logs, _ := s.run(ctx, "logs", "--tail", "30")
			t.Log(logs)
		}
		if _, err := s.run(ctx, "down", "-v"); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.run(ctx, "up", "-d"); err != nil {
		t.Fatal(err)
	}
	c := client.New("http://127.0.0.1:"+port, 2)
	defer c.Close()
	waitReady(ctx, t, c)
	nodes := map[string]bool{}
	for i := range 8 {
		l := ask(ctx, t, c, fmt.Sprintf("compose-%d", i))
		nodes[l.Node("ctx")], nodes[l.Node("gen")] = true, true
	}
	if len(nodes) < 3 {
		t.Errorf("8 requests ran on nodes %v, want more than one pair", nodes)
	}
	s.survives(ctx, t, c)
}

// survives kills a generation node's container; the other one serves what comes next.
func (s stack) survives(ctx context.Context, t *testing.T, c *client.Client) {
	t.Helper()
	if _, err := s.run(ctx, "kill", "-s", "SIGKILL", "gennode-1"); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		if l := ask(ctx, t, c, fmt.Sprintf("after-%d", i)); l.Node("gen") != "gen0" {
			t.Errorf("after-%d ran on gen node %q, want gen0: gen1 was killed", i, l.Node("gen"))
		}
	}
}

func waitReady(ctx context.Context, t *testing.T, c *client.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		var v any
		err := c.Get(ctx, "/readyz", &v)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("the router is not ready: %v", err)
		case <-tick.C:
		}
	}
}

func ask(ctx context.Context, t *testing.T, c *client.Client, id string) client.Line {
	t.Helper()
	res, err := c.Do(ctx, client.Request{ID: id, Fields: map[string]any{
		"model": "meridian-tiny", "prompt": "Once upon a time in " + id, "max_tokens": 8, "temperature": 0, "stream": true,
	}})
	if err != nil || res.Text == "" {
		t.Fatalf("request %s: %q, %v", id, res.Text, err)
	}
	l, err := c.Whole(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	if !l.Complete || l.NegativeSpans > 0 || len(l.Violations) > 0 || l.MaxBoundNS == nil || *l.MaxBoundNS > 1_000_000 {
		t.Errorf("timeline of %s: %+v, want it complete, without violations, in one clock within 1 ms", id, l)
	}
	return l
}
