package bus

import (
	"bytes"
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
