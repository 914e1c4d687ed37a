// Package clustertest finds for tests the binaries that they start.
package clustertest

import (
	"os"
	"path/filepath"
	"testing"

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
