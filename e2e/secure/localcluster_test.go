package secure

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/clustertest"
)

// TestLocalclusterWithASecret runs the demo with --cluster-token: every daemon gets the secret, and the demo's own calls show it.
func TestLocalclusterWithASecret(t *testing.T) {
	bin, dir := clustertest.Binaries(t), t.TempDir()
	token := filepath.Join(dir, "token")
	if err := os.WriteFile(token, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	run := filepath.Join(dir, "run")
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "localcluster"), "demo", "--device", "sim", "--cluster-token", token, "--requests", "2", "--max-tokens", "4", "--json", "--dir", run)
	cmd.Env = append(os.Environ(), "MERIDIAN_TEST_BIN="+bin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	var rep struct{ Complete, Incomplete int }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &rep); err != nil || rep.Complete != 2 || rep.Incomplete != 0 {
		t.Errorf("%+v, %v\n%s", rep, err, out)
	}
	logs, err := filepath.Glob(filepath.Join(run, "logs", "*.log"))
	if err != nil || len(logs) < 4 {
		t.Fatalf("logs %v, %v", logs, err)
	}
	for _, name := range logs {
		text, err := os.ReadFile(name)
		if err != nil || strings.Contains(string(text), "no --cluster-token") || strings.Contains(string(text), secret) {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
}
