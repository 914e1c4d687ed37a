package main

import (
	"path/filepath"
	"strings"
	"testing"

	"meridian.internal/gpu/model"
)

func TestItWritesWhatTheNodesLoad(t *testing.T) {
	dir := t.TempDir()
	if err := run([]string{"--shape", "small", "--out", dir}); err != nil {
		t.Fatal(err)
	}
	m, err := model.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if m.Config.ContextLen != 32768 {
		t.Errorf("a context of %d, want that of the shape", m.Config.ContextLen)
	}
}

func TestItSaysWhatIsWrong(t *testing.T) {
	for want, args := range map[string][]string{
		"--out":              {"--shape", "small"},
		"none of llama-1b":   {"--shape", "huge", "--out", t.TempDir()},
		"no argument":        {"--out", t.TempDir(), "more"},
		"flag provided but ": {"--shapes", "small"},
	} {
		if err := run(args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want it to say %q", args, err, want)
		}
	}
	if err := run([]string{"--shape", filepath.Join(t.TempDir(), "config.json"), "--out", t.TempDir()}); err == nil {
		t.Error("a file that is not there was taken")
	}
}
