package chaos

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// TestANodeKilledInAProfileWindow: no file of the window says that it is complete.
func TestANodeKilledInAProfileWindow(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, RouterArgs: []string{"--schedule", "aggregated"}})
	dir := t.TempDir()
	node := r.Find("gen0")
	granted := r.profile(t, node, "/start_profile", map[string]any{"output_dir": dir})
	if len(granted) != 2 {
		t.Fatalf("the window will leave %v, want a trace and a CPU profile", granted)
	}
	r.ok(t, "in-window")
	if err := node.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(t, node)
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range left {
		if !strings.HasSuffix(f.Name(), ".partial") {
			t.Errorf("%s is left under the name of a complete file", f.Name())
		}
		if strings.HasSuffix(f.Name(), ".json.partial") && complete(t, filepath.Join(dir, f.Name())) {
			t.Errorf("%s says that it is complete", f.Name())
		}
	}
}

// TestAProfileOfANode: stop waits for the files, and they are whole.
func TestAProfileOfANode(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, RouterArgs: []string{"--schedule", "aggregated"}})
	node := r.Find("gen0")
	r.profile(t, node, "/start_profile", map[string]any{"output_dir": t.TempDir(), "activities": []string{"CPU", "GPU", "LAYERS"}})
	r.ok(t, "profiled")
	files := r.profile(t, node, "/stop_profile", nil)
	if len(files) != 2 || !complete(t, files[0]) {
		t.Fatalf("files %v", files)
	}
	if b, err := os.ReadFile(files[1]); err != nil || !bytes.HasPrefix(b, []byte{0x1f, 0x8b}) {
		t.Errorf("the CPU profile is no pprof file (%d bytes): %v", len(b), err)
	}
}

func complete(t *testing.T, path string) bool {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var trace struct{ Metadata struct{ Complete bool } }
	if err := json.Unmarshal(b, &trace); err != nil {
		t.Errorf("%s: %v: %q", path, err, b)
	}
	return trace.Metadata.Complete
}

// profile posts to one of a node's two addresses, and gives the files that the answer names.
func (r *rig) profile(t *testing.T, node *cluster.Process, path string, body any) []string {
	t.Helper()
	c := client.New(node.URL, 1)
	defer c.Close()
	var answer struct{ Files []string }
	if err := c.Post(r.ctx, path, body, &answer); err != nil {
		t.Fatalf("POST %s%s: %v", node.URL, path, err)
	}
	return answer.Files
}
