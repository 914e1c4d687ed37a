package traces

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
)

func write(t *testing.T, dir, name string, lines ...string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	var b []byte
	for _, l := range lines {
		b = append(append(b, l...), '\n')
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func line(id, client string, complete, amends bool) string {
	return string(timeline.Append(nil, &timeline.Line{Schema: timeline.Schema, RequestID: id, ClientRequestID: client, Complete: complete, Amends: amends}))
}

// read gives "id complete" of every line and "file:number" of every bad one.
func read(t *testing.T, args ...string) (got, bad []string) {
	t.Helper()
	s, err := Open(args)
	if err != nil {
		t.Fatal(err)
	}
	s.Bad = func(p Position, err error) { bad = append(bad, fmt.Sprintf("%s:%d", filepath.Base(p.File), p.Number)) }
	err = s.Each(t.Context(), true, func(l *timeline.Line, _ Position) error {
		got = append(got, fmt.Sprintf("%s %v", l.RequestID, l.Complete))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got, bad
}

func TestLinesComeInOrderWithTheirAmendments(t *testing.T) {
	dir := t.TempDir()
	one := write(t, dir, "timeline-h-1-x-00000.jsonl", line("a", "", true, false), line("b", "", false, false))
	write(t, dir, "timeline-h-1-x-00001.jsonl", line("c", "", true, false))
	write(t, dir, "timeline-h-2-y-00000.amend.ndjson", line("b", "", false, true), line("b", "", true, true))
	write(t, dir, "other.jsonl", "not ours")
	if got, _ := read(t, dir); !slices.Equal(got, []string{"a true", "b true", "c true"}) {
		t.Errorf("folder: %q", got)
	}
	if got, _ := read(t, one); !slices.Equal(got, []string{"a true", "b true"}) {
		t.Errorf("file: %q", got)
	}
}

func TestWorkersTogetherSeeEveryLineOnce(t *testing.T) {
	var lines []string
	for i := range 5000 {
		lines = append(lines, line(fmt.Sprintf("r%d", i), strings.Repeat("x", 100), true, false))
	}
	dir := t.TempDir()
	write(t, dir, "timeline-h-1-x-00000.jsonl", append(lines, "bad")...)
	write(t, dir, "timeline-h-1-x-00000.amend.ndjson", line("r7", "better", true, true))
	s, err := Open([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	bad := 0
	s.Bad = func(Position, error) { bad++ }
	seen := [3]map[string]string{{}, {}, {}}
	workers := make([]func(*timeline.Line), len(seen))
	for i := range workers {
		workers[i] = func(l *timeline.Line) { seen[i][l.RequestID] = l.ClientRequestID }
	}
	if err := s.Spread(t.Context(), workers); err != nil {
		t.Fatal(err)
	}
	if n := len(seen[0]) + len(seen[1]) + len(seen[2]); n != 5000 || bad != 1 {
		t.Errorf("%d lines, %d bad", n, bad)
	}
	if seen[0]["r7"]+seen[1]["r7"]+seen[2]["r7"] != "better" {
		t.Error("the amendment is not used")
	}
}

func TestProgressNeverExceedsTheSize(t *testing.T) {
	var lines []string
	for i := range 3000 {
		lines = append(lines, line(fmt.Sprintf("r%d", i), "", true, false))
	}
	dir := t.TempDir()
	for _, name := range []string{"timeline-h-1-x-00000.jsonl", "timeline-h-1-x-00001.jsonl"} { // their text is larger than they are
		if _, err := jsonl.Compress(write(t, dir, name, lines...)); err != nil {
			t.Fatal(err)
		}
	}
	plain := write(t, dir, "timeline-h-1-x-00002.jsonl", lines...)
	s, err := Open([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Dir(plain), filepath.Base(plain), append(lines, lines...)...) // it grows
	var done []int64
	s.Progress = func(n int64) { done = append(done, n) }
	if err := s.Each(t.Context(), false, func(*timeline.Line, Position) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if len(done) == 0 || !slices.IsSorted(done) || done[0] < 0 || done[len(done)-1] > s.Size {
		t.Errorf("progress %v of %d bytes", done, s.Size)
	}
}

func TestBadLinesAreNamedAndSkipped(t *testing.T) {
	f := write(t, t.TempDir(), "f.jsonl", line("a", "", true, false), `{"torn`, `{"schema":"meridian.timeline/9"}`, "", "\xff\xfe", line("b", "", true, false))
	os.WriteFile(f, append(mustRead(t, f), `{"schema":"meridian.timeline/1","request_id":"to`...), 0o644)
	got, bad := read(t, f)
	if !slices.Equal(got, []string{"a true", "b true"}) || !slices.Equal(bad, []string{"f.jsonl:2", "f.jsonl:3", "f.jsonl:5"}) {
		t.Errorf("lines %q, bad %q", got, bad)
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestARequestIsFoundByEitherIDAndNotByAPartOfIt(t *testing.T) {
	f := write(t, t.TempDir(), "f.jsonl", line("req-1", `odd "id"`, true, false), line("req-12", "req-1x", true, false))
	s, err := Open([]string{f})
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"req-1": "req-1", `odd "id"`: "req-1", "req-12": "req-12", "req": "", "x": ""} {
		l, err := s.Find(t.Context(), id)
		if err != nil || (l == nil) != (want == "") || l != nil && l.RequestID != want {
			t.Errorf("%q: %+v, %v", id, l, err)
		}
	}
	if _, err := s.Find(t.Context(), ""); err == nil {
		t.Error("an empty id is looked for")
	}
}

func TestWhatIsNotThereIsNamed(t *testing.T) {
	for _, a := range []string{filepath.Join(t.TempDir(), "none.jsonl"), t.TempDir()} {
		if _, err := Open([]string{a}); err == nil {
			t.Errorf("%s: no error", a)
		}
	}
	if _, err := Open([]string{"/none"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestAnIndexIsNoFileOfTimelines(t *testing.T) {
	path := write(t, t.TempDir(), "timeline-h-1-x-00000.jsonl", line("a", "", true, false))
	if err := Seal(path, false); err != nil {
		t.Fatal(err)
	}
	if got, bad := read(t, path, path+IndexSuffix); fmt.Sprint(got, bad) != "[a true] []" {
		t.Errorf("read %q, bad %q", got, bad)
	}
	if _, err := Open([]string{path + IndexSuffix}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("an index alone: %v", err)
	}
}

func TestFollowSeesWhatIsAppendedAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	f := write(t, dir, "timeline-h-1-x-00000.jsonl", line("old", "", true, false))
	w := &follower{dir: dir, at: map[string]int64{}}
	var got []string
	look := func() {
		if err := w.look(func(l *timeline.Line) error { got = append(got, l.RequestID); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.look(nil); err != nil {
		t.Fatal(err)
	}
	look()
	half := line("a", "", true, false)
	os.WriteFile(f, append(mustRead(t, f), half[:20]...), 0o644)
	look() // a torn line is not read, and is read whole later
	os.WriteFile(f, append(mustRead(t, f), half[20:]+"\n"...), 0o644)
	write(t, dir, "timeline-h-1-x-00001.jsonl", line("b", "", true, false))
	look()
	look()
	if !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%q", got)
	}
}

// The age of a file is that of its start: the number of the process, which comes before it in the name, says nothing.
func TestTheNewerFileWins(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run[1]") // a folder's name is no pattern
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "timeline-h-9-20260101T000000Z-00000.jsonl", line("b", "c", false, false))
	write(t, dir, "timeline-h-9-20260101T000000Z-00000.amend.ndjson", line("b", "c", false, true))
	write(t, dir, "timeline-h-10-20260102T000000Z-00000.amend.ndjson", line("b", "c", true, true))
	write(t, dir, "timeline-h-10-20260102T000000Z-00000.jsonl", line("new", "c", true, false))
	if got, _ := read(t, dir); !slices.Equal(got, []string{"b true", "new true"}) {
		t.Errorf("read %q", got)
	}
	s, err := Open([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	if l, err := s.Find(t.Context(), "b"); err != nil || !l.Complete {
		t.Errorf("the older amendment is found: %+v, %v", l, err)
	}
	if l, err := s.Find(t.Context(), "c"); err != nil || l.RequestID != "new" {
		t.Errorf("the older request of a client's id is found: %+v, %v", l, err)
	}
}
