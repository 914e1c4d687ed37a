package bus

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
)

// mapped is a segment that is in memory.
func mapped(t *testing.T) *segmentFile {
	t.Helper()
	g, err := createSegment(filepath.Join(t.TempDir(), "segment"), 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.close)
	if g.mem == nil {
		t.Skip("files cannot be mapped here")
	}
	return g
}

func TestASegmentWhoseMemoryIsGoneIsWritten(t *testing.T) {
	g := mapped(t)
	if err := os.Truncate(g.f.Name(), 0); err != nil { // as a disk that fails: the memory has nothing behind it
		t.Fatal(err)
	}
	for at, b := range []string{"a", "b"} {
		if _, err := g.write([]byte(b), int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	if got, _ := os.ReadFile(g.f.Name()); string(got) != "ab" || g.mem != nil {
		t.Errorf("the file holds %q, mapped %v", got, g.mem != nil)
	}
}

func TestWhatIsLargerThanASegmentIsWritten(t *testing.T) {
	g := mapped(t)
	large := bytes.Repeat([]byte("x"), len(g.mem)+1)
	if _, err := g.write(large, 0); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(g.f.Name()); !bytes.Equal(got, large) {
		t.Errorf("%d bytes came back of %d", len(got), len(large))
	}
}

// TestWhatWasAppendedSurvivesAKill has a process of its own append and kill itself.
func TestWhatWasAppendedSurvivesAKill(t *testing.T) {
	const folder = "MERIDIAN_TEST_SPOOL"
	if dir := os.Getenv(folder); dir != "" {
		s, _, _ := mustOpen(t, dir, 1<<20, 1<<16)
		for i := range 3 {
			if _, _, err := s.append(record(i)); err != nil {
				t.Fatal(err)
			}
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), folder+"="+dir)
	if out, err := cmd.CombinedOutput(); err == nil || cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%v: %s", err, out)
	}
	s, start, found := mustOpen(t, dir, 1<<20, 1<<16)
	defer s.close(position{})
	if got := ids(t, newSpoolReader(s, start)); found != 3 || !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("found %d, %v came back", found, got)
	}
}

// Segments are written again and again; nothing of what they held before comes back, not after a death either.
func TestASegmentIsWrittenAgain(t *testing.T) {
	mapped(t)
	dir := t.TempDir()
	var got, want []string
	again := 0
	for life := range 3 {
		s, start, found := mustOpen(t, dir, 1<<20, 300)
		if found != int64(len(want)-len(got)) {
			t.Errorf("life %d: found %d, want %d", life, found, len(want)-len(got))
		}
		r := newSpoolReader(s, start)
		for i := range 62 { // the last segment is not full
			e := record(3) // all of one size, so that an old one could be whole behind a new one
			e.id = fmt.Sprintf("%d-%02d", life, i)
			spares := len(s.kept.spare)
			if _, _, err := s.append(e); err != nil {
				t.Fatal(err)
			}
			if len(s.kept.spare) < spares {
				again++
			}
			want = append(want, e.id)
			if i%7 == 0 {
				got = append(got, ids(t, r)...)
				if err := s.commit(r.at); err != nil {
					t.Fatal(err)
				}
			}
		}
		r.close()
		s.w.close() // the process dies: nothing is tidied up
		s.release()
	}
	s, start, _ := mustOpen(t, dir, 1<<20, 300)
	r := newSpoolReader(s, start)
	if got = append(got, ids(t, r)...); !slices.Equal(got, want) {
		t.Errorf("%v came back, want %v", got, want)
	}
	r.close()
	s.close(r.at)
	if again == 0 {
		t.Error("no segment was written again")
	}
}
