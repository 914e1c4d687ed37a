package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// binaries makes a folder of files that have the daemons' names.
func binaries(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"router", "ctxnode", "gennode", "clocksync", "timeline"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("MERIDIAN_TEST_BIN", dir)
}

func TestOptionsThatCannotBeUsedLeaveNoRunFolder(t *testing.T) {
	binaries(t)
	for name, l := range map[string]layout{
		"no node": {Gen: 1}, "flag of no node": {Ctx: 1, Gen: 1, NodeFlag: []string{"gen0"}}, "no path": {Ctx: 1, Gen: 1, Shuttle: map[string]string{"gen0": "1ms"}},
		"no binaries for a card": {Ctx: 1, Gen: 1, Device: "cuda"},
	} {
		temp := t.TempDir()
		t.Setenv("TMPDIR", temp)
		if _, err := l.config(slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%s: no error", name)
		}
		if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
			t.Errorf("%s: %v is left, %v", name, left, err)
		}
	}
}
