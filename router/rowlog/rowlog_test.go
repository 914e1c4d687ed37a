package rowlog

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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

func TestAProcessThatIsGoneKeepsNoFileOpen(t *testing.T) {
	dir := t.TempDir()
	l := New(dir, slog.New(slog.DiscardHandler))
	defer l.Close()
	now := time.Now()
	l.now = func() time.Time { return now }
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := open()
	l.Add(row("stays", 1))
	for i := range 100 {
		l.Add(row(fmt.Sprintf("n%d", i), 1))
		now = now.Add(idle / 10)
		l.Add(row("stays", int64(i)+2))
	}
	if n := open() - before; n > 20 || len(l.files) > 20 {
		t.Errorf("%d files are open, %d known", n, len(l.files))
	}
	l.Add(row("n0", 2)) // it was only quiet
	if f := check(t, dir); len(f) != 0 {
		t.Errorf("%v", f)
	}
	if b, err := os.ReadFile(filepath.Join(dir, Name("n0", "c.1"))); err != nil || strings.Count(string(b), "\n") != 2 {
		t.Errorf("%v: %s", err, b)
	}
}

func TestOneProcessWritesAFile(t *testing.T) {
	dir := t.TempDir()
	first, second := New(dir, slog.New(slog.DiscardHandler)), New(dir, slog.New(slog.DiscardHandler))
	first.Add(row("n", 1))
	second.Add(row("n", 1))
	second.Add(row("n", 3))
	first.Add(row("n", 2))
	path := filepath.Join(dir, Name("n", "c.1"))
	if _, err := Create(path); !errors.Is(err, ErrUsed) {
		t.Errorf("a file that is written is made anew: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || strings.Count(string(b), "\n") != 2 {
		t.Errorf("%v: %s", err, b)
	}
	first.Close()
	second.now = func() time.Time { return time.Now().Add(idle) }
	second.Add(row("n", 4)) // it goes on with what is there
	second.Close()
	if b, err := os.ReadFile(path); err != nil || strings.Count(string(b), "\n") != 4 || !strings.Contains(string(b), `"lost":1`) {
		t.Errorf("%v: %s", err, b)
	}
	if f := check(t, dir); len(f) != 0 {
		t.Errorf("%v", f)
	}
	f, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("%v: %v", err, info)
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

func TestAFullFileSaysThatRowsAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, Name("gen0", "c.1"))
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	const left = 4 << 10 // the rest is a hole
	if _, err := f.WriteAt([]byte("\n"), maxBytes-left-1); err != nil {
		t.Fatal(err)
	}
	l := New(dir, slog.New(slog.DiscardHandler))
	now := time.Now()
	l.now = func() time.Time { return now }
	for seq := range int64(9) {
		l.Add(row("gen0", seq+1))
		now = now.Add(2 * idle) // it is opened again
	}
	l.Close()
	tail := make([]byte, left)
	n, _ := f.ReadAt(tail, maxBytes-left)
	text := string(tail[:n])
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if strings.Count(text, rowcheck.LostSchema) != 1 || !strings.Contains(text, `"seq":1,`) || !strings.HasSuffix(text, "}\n") {
		t.Errorf("the file ends with %q", text)
	}
	c := rowcheck.New()
	for line := range strings.Lines(text) {
		c.Line([]byte(strings.TrimSuffix(line, "\n")), path)
	}
	if faults := c.Finish(); len(faults) > 0 {
		t.Errorf("%v", faults)
	}
}
