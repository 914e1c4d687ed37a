package rowlog

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"meridian.internal/router/rowcheck"
	"meridian.internal/shared/rows"
)

func row(node string, seq int64) []byte {
	return rows.NewEncoder(rows.Static{Node: node, ClockID: "c.1"}).Append(nil, &rows.Row{Seq: seq, Iter: seq, Covers: 1})
}

func check(t *testing.T, dir string) []rowcheck.Fault {
	t.Helper()
	c := rowcheck.New()
	names, err := filepath.Glob(filepath.Join(dir, "*"+Suffix))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			c.Line([]byte(strings.TrimSuffix(line, "\n")), name)
		}
	}
	return c.Finish()
}

func TestRowsOfANodeAreAFileThatAgreesWithItself(t *testing.T) {
	dir := t.TempDir()
	l := New(dir, slog.New(slog.DiscardHandler))
	for _, seq := range []int64{1, 2, 5, 5, 4, 6} { // two are lost, two come late or twice
		l.Add(row("gen/0", seq))
		l.Add(row("ctx0", seq))
	}
	l.Add([]byte("{}"))
	l.Close()
	path := filepath.Join(dir, "gen_0-c.1"+Suffix)
	b, err := os.ReadFile(path)
	if err != nil || strings.Count(string(b), "\n") != 5 || !strings.Contains(string(b), `"lost":2`) {
		t.Fatalf("%v: %s", err, b)
	}
	if f := check(t, dir); len(f) != 0 {
		t.Errorf("%v", f)
	}
	// The process dies in the middle of a row, and the next one goes on.
	if err := os.WriteFile(path, append(b, row("gen/0", 7)[:100]...), 0o644); err != nil {
		t.Fatal(err)
	}
	l = New(dir, slog.New(slog.DiscardHandler))
	l.Add(row("gen/0", 9))
	l.Close()
	if b, err = os.ReadFile(path); err != nil || strings.Count(string(b), "\n") != 7 || strings.Count(string(b), `"lost":2`) != 2 {
		t.Errorf("%v: %s", err, b)
	}
	if f := check(t, dir); len(f) != 0 {
		t.Errorf("%v", f)
	}
}

func TestAFolderThatCannotBeWrittenToIsSaidOnce(t *testing.T) {
	var log strings.Builder
	l := New(filepath.Join(t.TempDir(), "none"), slog.New(slog.NewTextHandler(&log, nil)))
	l.Add(row("n", 1))
	l.Add(row("n", 2))
	if strings.Count(log.String(), "\n") != 1 {
		t.Errorf("%s", log.String())
	}
}

func FuzzHead(f *testing.F) {
	f.Add(row("n", 3))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := headOf(b); err == nil && strings.ContainsAny(Name(h.node, h.clock), `/\`) {
			t.Fatalf("%+v leaves the folder", h)
		}
	})
}
