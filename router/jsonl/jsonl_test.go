package jsonl

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

var quiet = slog.New(slog.DiscardHandler)

func open(t *testing.T, o Options) *Writer {
	t.Helper()
	o.Prefix, o.Suffix, o.Logger = "timeline", ".jsonl", quiet
	w, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func lines(t *testing.T, names ...string) (out []string) {
	t.Helper()
	for _, n := range names {
		err := Read(n, func(b []byte, number int, _ int64) error {
			out = append(out, string(b))
			return nil
		}, func(n int, err error) { out = append(out, fmt.Sprintf("bad %d", n)) })
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestLinesAreFoundWhereTheWriterSaid(t *testing.T) {
	dir := t.TempDir()
	w := open(t, Options{Dir: dir, MaxBytes: 40})
	var at []Location
	for i := range 10 {
		l, err := w.Append([]byte(fmt.Sprintf(`{"line":%d}`, i)))
		if err != nil {
			t.Fatal(err)
		}
		at = append(at, l)
		if i%2 == 0 {
			w.Flush()
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for i, l := range at {
		if b, err := At(l); err != nil || string(b) != fmt.Sprintf(`{"line":%d}`, i) {
			t.Errorf("line %d: %q, %v", i, b, err)
		}
	}
	names := files(t, dir)
	if got := lines(t, names...); len(got) != 10 || len(names) != 4 {
		t.Errorf("%d lines in %d files, want 10 in 4: %v", len(got), len(names), got)
	}
	if n := filepath.Base(names[0]); !strings.HasPrefix(n, "timeline-") || !strings.HasSuffix(n, "-00000.jsonl") {
		t.Errorf("file name %q", n)
	}
}

func TestAFileIsRotatedByAge(t *testing.T) {
	now := time.Unix(1e9, 0)
	dir := t.TempDir()
	w := open(t, Options{Dir: dir, MaxAge: time.Hour, Now: func() time.Time { return now }})
	w.Append([]byte("a"))
	now = now.Add(2 * time.Hour)
	w.Append([]byte("b"))
	w.Flush()
	if n := files(t, dir); len(n) != 2 {
		t.Errorf("files %v, want two", n)
	}
}

// TestAFileThatIsRemovedIsFollowedByANewOne: lines in a file without a name would be acknowledged and found nowhere.
func TestAFileThatIsRemovedIsFollowedByANewOne(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "traces")
	closed := []string{}
	w := open(t, Options{Dir: dir, Closed: func(path string) { closed = append(closed, path) }})
	write := func(line string) Location {
		at, err := w.Append([]byte(line))
		if err == nil {
			err = w.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	first := write("1")
	if write("2").Path != first.Path {
		t.Error("each batch has a file of its own")
	}
	if err := os.Remove(first.Path); err != nil {
		t.Fatal(err)
	}
	write("3")
	if got := lines(t, files(t, dir)...); !slices.Equal(got, []string{"3"}) {
		t.Errorf("after the file was removed: %q", got)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	at := write("4")
	if b, err := At(at); err != nil || string(b) != "4" {
		t.Errorf("after the folder was removed: %q, %v", b, err)
	}
	if len(closed) != 0 {
		t.Errorf("files that are gone are given to who makes their index: %q", closed)
	}
}

func TestTheOldestFilesGoWhenTheFolderIsFull(t *testing.T) {
	dir := t.TempDir()
	w := open(t, Options{Dir: dir, MaxBytes: 20, MaxTotal: 70})
	for i := range 30 {
		w.Append([]byte(fmt.Sprintf("line %02d", i)))
		w.Flush()
	}
	w.Close()
	got, total := lines(t, files(t, dir)...), int64(0)
	for _, n := range files(t, dir) {
		info, _ := os.Stat(n)
		total += info.Size()
	}
	if total > 70 || got[len(got)-1] != "line 29" || len(got) < 4 {
		t.Errorf("%d bytes: %q", total, got)
	}
	for i := 1; i < len(got); i++ {
		if got[i] <= got[i-1] {
			t.Errorf("%q after %q: not the oldest went", got[i], got[i-1])
		}
	}
}

func TestTheTornTailOfADeadProcessIsCutOffAndALivingOnesIsNot(t *testing.T) {
	dir := t.TempDir()
	dead, living, whole := filepath.Join(dir, "timeline-a-1-x-00000.jsonl"), filepath.Join(dir, "timeline-b-2-x-00000.jsonl"), filepath.Join(dir, "timeline-c-3-x-00000.jsonl")
	for _, n := range []string{dead, living} {
		os.WriteFile(n, []byte("one\ntwo\n{\"torn"), 0o644)
	}
	os.WriteFile(whole, []byte("one\n"), 0o644)
	f, err := os.Open(living)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	open(t, Options{Dir: dir})
	for n, want := range map[string]string{dead: "one\ntwo\n", living: "one\ntwo\n{\"torn", whole: "one\n"} {
		if b, _ := os.ReadFile(n); string(b) != want {
			t.Errorf("%s: %q, want %q", filepath.Base(n), b, want)
		}
	}
	if got := lines(t, living); len(got) != 2 {
		t.Errorf("a torn tail is read: %q", got)
	}
}

func TestLinesWaitWhileTheDiskRefusesAndArriveInOrder(t *testing.T) {
	dir := t.TempDir()
	w := open(t, Options{Dir: dir, MaxMemory: 20})
	w.Append([]byte("first"))
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	good := w.f
	bad, err := os.Open(w.path) // cannot be written
	if err != nil {
		t.Fatal(err)
	}
	defer bad.Close()
	w.f = bad
	w.Append([]byte("second"))
	if err := w.Flush(); err == nil {
		t.Fatal("no error from a file that cannot be written")
	}
	if _, err := w.Append([]byte("third")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Append(bytes.Repeat([]byte("x"), 20)); !errors.Is(err, ErrFull) {
		t.Errorf("error %v, want ErrFull", err)
	}
	w.f = good
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(lines(t, files(t, dir)...), ","); got != "first,second,third" {
		t.Errorf("lines %s", got)
	}
}

func TestLinesThatAreNotSyncedWait(t *testing.T) {
	dir := t.TempDir()
	w := open(t, Options{Dir: dir, Sync: true})
	var synced []string
	refuse := errors.New("no")
	w.sync = func(f *os.File) error {
		if refuse != nil && f == w.f {
			return refuse
		}
		synced = append(synced, f.Name())
		return f.Sync()
	}
	w.Append([]byte("first"))
	if err := w.Flush(); !errors.Is(err, refuse) || w.Waiting() == 0 {
		t.Errorf("error %v, %d bytes wait", err, w.Waiting())
	}
	w.Append([]byte("second"))
	refuse = nil
	if err := w.Flush(); err != nil || w.Waiting() != 0 {
		t.Errorf("error %v, %d bytes wait", err, w.Waiting())
	}
	if got := strings.Join(lines(t, files(t, dir)...), ","); got != "first,second" {
		t.Errorf("lines %s", got)
	}
	if want := []string{dir, w.path}; !slices.Equal(synced, want) { // the name of the file, then what is in it
		t.Errorf("synced %q, want %q", synced, want)
	}
	plain := open(t, Options{Dir: t.TempDir()})
	plain.Append([]byte("x"))
	if err := plain.sync(nil); err != nil {
		t.Errorf("a writer that need not sync does: %v", err)
	}
}

func FuzzWholeLines(f *testing.F) {
	f.Add([]byte("a\nb\nc"))
	f.Add([]byte(""))
	f.Add(append(bytes.Repeat([]byte("x"), 70<<10), '\n', 'y'))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := wholeLines(bytes.NewReader(b), int64(len(b)))
		if want := int64(bytes.LastIndexByte(b, '\n') + 1); err != nil || got != want {
			t.Errorf("%d, %v; want %d", got, err, want)
		}
	})
}

func TestAFileThatOthersCompressedIsToldOf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lines.jsonl.gz")
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), os.WriteFile(path, b.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
	err := Read(path, func([]byte, int, int64) error { t.Error("it has a line"); return nil }, func(int, error) {})
	if !errors.Is(err, ErrGzip) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v", err)
	}
}
