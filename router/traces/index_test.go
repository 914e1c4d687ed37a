package traces

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"meridian.internal/router/jsonl"
)

// many writes a file of n lines: ids r0, r1, …, the client's c0, c1, ….
func many(t testing.TB, dir, name string, n int) string {
	t.Helper()
	var b []byte
	for i := range n {
		b = append(append(b, line(fmt.Sprintf("r%d", i), fmt.Sprintf("c%d", i), true, false)...), '\n')
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestASealedFileGivesEveryRequestByEitherID(t *testing.T) {
	for _, compress := range []bool{false, true} {
		dir := t.TempDir()
		path := many(t, dir, "timeline-h-1-x-00000.jsonl", 5000)
		if err := Seal(path, compress); err != nil {
			t.Fatal(err)
		}
		if compress {
			path += jsonl.Packed
		}
		for i := 0; i < 5000; i += 37 {
			for _, id := range []string{fmt.Sprintf("r%d", i), fmt.Sprintf("c%d", i)} {
				if b, err := Lookup(dir, id); err != nil || !bytes.Contains(b, []byte(`"request_id":"r`+id[1:]+`"`)) {
					t.Fatalf("compressed %v: %s gives %s, %v", compress, id, b, err)
				}
			}
		}
		if b, err := Lookup(dir, "nobody"); b != nil || err != nil {
			t.Errorf("an unknown id gives %s, %v", b, err)
		}
		if got, bad := read(t, dir); len(got) != 5000 || len(bad) != 0 {
			t.Errorf("compressed %v: %d lines, %v bad, want 5000", compress, len(got), bad)
		}
		if err := Seal(path, compress); err != nil { // again: nothing to do
			t.Error(err)
		}
		if names, _ := filepath.Glob(filepath.Join(dir, "*")); len(names) != 2 {
			t.Errorf("files %v, want the lines and their index", names)
		}
	}
}

func TestAnAmendmentInAnIndexedFileWins(t *testing.T) {
	dir := t.TempDir()
	Seal(write(t, dir, "timeline-h-1-x-00000.jsonl", line("a", "mine", false, false), line("b", "mine", true, false)), true)
	Seal(write(t, dir, "timeline-h-1-x-00000.amend.ndjson", line("a", "mine", true, true)), false)
	for id, want := range map[string]string{"a": `"request_id":"a","client_request_id":"mine","amends":true`, "mine": `"request_id":"b"`} {
		if b, err := Lookup(dir, id); err != nil || !bytes.Contains(b, []byte(want)) {
			t.Errorf("%s gives %s, %v, want %s", id, b, err, want)
		}
		s, err := Open([]string{dir})
		if err != nil {
			t.Fatal(err)
		}
		if l, err := s.Find(t.Context(), id); err != nil || l == nil || l.RequestID == "" || (id == "a") != l.Amends {
			t.Errorf("Find(%s) gives %+v, %v", id, l, err)
		}
	}
}

func TestADamagedIndexIsBuiltAnewAndNeverBelieved(t *testing.T) {
	dir := t.TempDir()
	path := many(t, dir, "timeline-h-1-x-00000.jsonl", 200)
	if err := Seal(path, false); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path + IndexSuffix)
	if err != nil {
		t.Fatal(err)
	}
	damage := map[string][]byte{
		"cut off":     good[:len(good)-7],
		"empty":       {},
		"foreign":     []byte(strings.Repeat("x", len(good))),
		"bit in head": slices.Concat(good[:10], []byte{good[10] ^ 1}, good[11:]),
		"bit in list": slices.Concat(good[:100], []byte{good[100] ^ 1}, good[101:]),
	}
	for name, b := range damage {
		if err := os.WriteFile(path+IndexSuffix, b, 0o644); err != nil {
			t.Fatal(err)
		}
		s, err := Open([]string{dir})
		if err != nil {
			t.Fatal(err)
		}
		if l, err := s.Find(t.Context(), "r7"); err != nil || l == nil {
			t.Errorf("%s: %v, %v", name, l, err)
		}
		if err := SealRest(dir, false); err != nil {
			t.Fatal(err)
		}
		if b, _ := os.ReadFile(path + IndexSuffix); !bytes.Equal(b, good) {
			t.Errorf("%s: the index was not built anew", name)
		}
	}
}

func TestWhatAKilledSealLeftIsCleared(t *testing.T) {
	dir := t.TempDir()
	path := many(t, dir, "timeline-h-1-x-00000.jsonl", 50)
	write(t, dir, "timeline-h-1-x-00000.jsonl.zst.tmp", "half")
	write(t, dir, "timeline-h-1-x-00000.jsonl.zst", "whole, but the text was not removed")
	if got, _ := read(t, dir); len(got) != 50 {
		t.Errorf("%d lines before, want 50", len(got))
	}
	if err := SealRest(dir, true); err != nil {
		t.Fatal(err)
	}
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	if want := []string{path + jsonl.Packed, path + jsonl.Packed + IndexSuffix}; !slices.Equal(names, want) {
		t.Errorf("files %v, want %v", names, want)
	}
	if got, _ := read(t, dir); len(got) != 50 {
		t.Errorf("%d lines after, want 50", len(got))
	}
}

func TestAFileThatGrowsIsFoundBehindItsIndex(t *testing.T) {
	dir := t.TempDir()
	path := many(t, dir, "timeline-h-1-x-00000.jsonl", 10)
	Seal(path, false)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(f, line("new", "", true, false))
	f.Close()
	s, _ := Open([]string{path})
	if l, err := s.Find(t.Context(), "new"); err != nil || l == nil {
		t.Errorf("%v, %v", l, err)
	}
}

// FuzzIndex reads hostile indexes: errors are ErrIndex, and no offset leaves what the index covers.
func FuzzIndex(f *testing.F) {
	f.Add(appendIndex(nil, 100, []jsonl.Frame{{}, {Plain: 50, Packed: 20}}, []entry{{hashID("a"), 0}, {hashID("b"), 60}}), "a")
	f.Add(appendIndex(nil, 0, nil, nil), "")
	f.Add([]byte(indexMagic), "x")
	f.Fuzz(func(t *testing.T, b []byte, id string) {
		x, err := readIndex(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			if !errors.Is(err, ErrIndex) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		offsets, err := x.find(id)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range offsets {
			if at < 0 || at >= x.covers {
				t.Errorf("offset %d is outside of the %d bytes that are covered", at, x.covers)
			}
		}
	})
}

// FuzzIDs reads the ids of hostile lines: the reader must not crash, whatever it finds.
func FuzzIDs(f *testing.F) {
	f.Add(`{"schema":"meridian.timeline/1","request_id":"a","client_request_id":"b"}`)
	f.Add(`{"request_id":["a"],"client_request_id":`)
	f.Add(strings.Repeat(`{"a":`, 100))
	f.Fuzz(func(t *testing.T, s string) {
		idsOf([]byte(s))
	})
}

// BenchmarkLookup finds one request in a compressed and indexed file of 100,000.
func BenchmarkLookup(b *testing.B) {
	dir := b.TempDir()
	if err := Seal(many(b, dir, "timeline-h-1-x-00000.jsonl", 100_000), true); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		i = (i + 7919) % 100_000
		if line, err := Lookup(dir, fmt.Sprintf("c%d", i)); line == nil || err != nil {
			b.Fatal(line, err)
		}
	}
}

func TestAFileThatItsWriterHasJustMadeIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "timeline-h-1-x-00000.jsonl")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Seal(path, true); err != nil {
		t.Fatal(err)
	}
	if found, _ := filepath.Glob(path + "*"); len(found) != 1 || found[0] != path {
		t.Errorf("%v: its writer goes on in a file that is gone", found)
	}
}
