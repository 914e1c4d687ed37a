package kv

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

const prompts = 12

// ask sends the same prompts each time, four at once, and gives the texts. A router that does not know yet that a node is back
// refuses for a moment.
func ask(ctx context.Context, t *testing.T, c *client.Client) (texts [prompts]string) {
	t.Helper()
	room := make(chan struct{}, 4)
	var wg sync.WaitGroup
	for i := range prompts {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			ids := make([]int, 200+40*i)
			for k := range ids {
				ids[k] = 10 + (k*7+i*131)%1900
			}
			f := map[string]any{"model": "meridian-tiny", "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": true}
			for {
				res, err := c.Do(ctx, client.Request{Fields: f})
				if err == nil {
					texts[i] = res.Text
					return
				}
				if ctx.Err() != nil {
					t.Errorf("prompt %d: %v", i, err)
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	return texts
}

// loaded is how many blocks a node has taken from its disk.
func loaded(t *testing.T, p *cluster.Process) int {
	t.Helper()
	res, err := http.Get(p.URL + "/kv_stats")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var s struct {
		Ranks []struct {
			Moved struct {
				Loaded int `json:"disk_loaded_blocks"`
			}
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil || len(s.Ranks) != 1 {
		t.Fatalf("%s: %+v, %v", p.Name, s, err)
	}
	return s.Ranks[0].Moved.Loaded
}

// TestNodesThatAreKilledWhileTheyWriteGoOnFromTheirDisks kills both nodes as soon as they have answered, while what they cached
// is on its way to disk, and starts them again on the same folders.
func TestNodesThatAreKilledWhileTheyWriteGoOnFromTheirDisks(t *testing.T) {
	bin, disk := clustertest.Binaries(t), t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	places := map[string]cluster.Place{}
	for _, node := range []string{"ctx0", "gen0"} {
		places[node] = cluster.Place{Args: []string{fmt.Sprintf("--kv-disk=%s 1GiB", filepath.Join(disk, node))}}
	}
	c, err := cluster.Start(ctx, cluster.Config{
		Bin: bin, Dir: t.TempDir(), Ctx: 1, Gen: 1, Device: "cpu", Places: places, NodeArgs: []string{"--kv-blocks=100"}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	}()
	cl := client.New(c.URL(), 4)
	defer cl.Close()
	want := ask(ctx, t, cl)
	fromDisk := 0
	for round := range 4 {
		for _, p := range c.Nodes {
			if err := p.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			_ = p.Wait(ctx) // its end by a signal is what was asked for
		}
		for _, p := range c.Nodes {
			if err := c.Restart(ctx, p); err != nil {
				t.Fatalf("round %d: %v\n%s", round, err, p.LogTail(10))
			}
		}
		if got := ask(ctx, t, cl); got != want {
			t.Errorf("round %d: texts %q, want %q", round, got, want)
		}
		for _, p := range c.Nodes {
			fromDisk += loaded(t, p)
		}
	}
	t.Logf("%d blocks came from disk", fromDisk)
	if fromDisk == 0 {
		t.Error("no block came from disk: the test proves less than it should")
	}
}
