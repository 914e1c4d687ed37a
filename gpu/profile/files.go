package profile

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"time"
)

// partial ends the name of a file that is not complete.
const partial = ".partial"

// incomplete is what a trace says until it is written.
const incomplete = `{"metadata":{"complete":false},"traceEvents":[]}` + "\n"

// files of one window. They are made when it is claimed, so that a folder that cannot be written to is told at once.
type files struct {
	trace, cpu string   // final names; cpu "": not asked for
	profile    *os.File // of the CPU; nil: none
}

func createFiles(dir string, rank int, acts []string) (*files, error) {
	if dir == "" {
		dir = "."
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("output_dir %q: %w", dir, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("output_dir %q: %w", dir, err)
	}
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails: it crashes the program instead
	base := filepath.Join(dir, fmt.Sprintf("meridian-trace-%d-%s-rank-%d", time.Now().Unix(), hex.EncodeToString(id[:]), rank))
	f := &files{trace: base + ".json"}
	if err := os.WriteFile(f.trace+partial, []byte(incomplete), 0o644); err != nil {
		return nil, fmt.Errorf("output_dir %q: %w", dir, err)
	}
	if slices.Contains(acts, CPU) {
		f.cpu = base + ".pprof"
		if f.profile, err = os.Create(f.cpu + partial); err != nil {
			f.discard()
			return nil, fmt.Errorf("output_dir %q: %w", dir, err)
		}
	}
	return f, nil
}

// final gives the names of the files when they are complete.
func (f *files) final() []string {
	if f.cpu == "" {
		return []string{f.trace}
	}
	return []string{f.trace, f.cpu}
}

// begin starts the CPU profile.
func (f *files) begin() error {
	if f.profile == nil {
		return nil
	}
	if err := pprof.StartCPUProfile(f.profile); err != nil { // another one runs: the trace is all that there will be
		_ = f.profile.Close()
		_ = os.Remove(f.cpu + partial)
		f.cpu, f.profile = "", nil
		return fmt.Errorf("start a CPU profile: %w", err)
	}
	return nil
}

// write completes the files and gives them their names.
func (f *files) write(trace []byte) error {
	var errs []error
	if f.profile != nil {
		pprof.StopCPUProfile()
		errs = append(errs, f.profile.Close(), os.Rename(f.cpu+partial, f.cpu))
	}
	if err := os.WriteFile(f.trace+partial, trace, 0o644); err != nil {
		return errors.Join(append(errs, err)...)
	}
	return errors.Join(append(errs, os.Rename(f.trace+partial, f.trace))...)
}

// discard removes what was made for a window that never opened.
func (f *files) discard() {
	_ = os.Remove(f.trace + partial)
	if f.profile != nil {
		_ = f.profile.Close()
		_ = os.Remove(f.cpu + partial)
	}
}
