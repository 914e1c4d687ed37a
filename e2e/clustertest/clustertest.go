// Package clustertest starts clusters for tests, and finds the binaries.
package clustertest

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"meridian.internal/e2e/cluster"
)

// Binaries is the folder of the binaries: MERIDIAN_TEST_BIN, else bin at the root, two folders above the test's package. It skips
// the test where they are not built.
func Binaries(t testing.TB) string {
	t.Helper()
	if os.Getenv("MERIDIAN_TEST_BIN") == "" {
		dir, err := filepath.Abs("../../bin")
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv("MERIDIAN_TEST_BIN", dir)
	}
	bin, err := cluster.Binaries()
	if err != nil {
		t.Skip("the binaries are not built: make build")
	}
	return bin
}

// Start starts a cluster that is used no longer than limit, in a folder of the test. It ends with the test, and shows the ends of its logs
// if that failed. ctx ends at the limit.
func Start(t *testing.T, cfg cluster.Config, limit time.Duration) (c *cluster.Cluster, ctx context.Context) {
	t.Helper()
	cfg.Bin, cfg.Dir, cfg.Logger = Binaries(t), t.TempDir(), slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	c, err := cluster.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			for _, p := range c.All() {
				t.Logf("%s:\n%s", p.Name, p.LogTail(12))
			}
		}
	})
	return c, ctx
}
