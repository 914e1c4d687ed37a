package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestARunDoesNotKeepTheTimelinesOfAnEarlierOne(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out", "streams-2-aggregated-1")
	for range 2 {
		if err := makeAnew(dir); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%v, %v, want an empty folder", left, err)
		}
		traces := filepath.Join(dir, "traces")
		if err := os.Mkdir(traces, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(traces, "timeline-h-1-x-00000.jsonl"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
