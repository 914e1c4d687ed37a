package jsonl

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Files lists PREFIX-*SUFFIX of a folder from the oldest on, compressed ones too. A file that is there in both forms, because it is
// being compressed, is listed once.
func Files(dir, prefix, suffix string) ([]string, error) {
	plain, err := Glob(dir, prefix+"-*"+suffix)
	if err != nil {
		return nil, fmt.Errorf("list %s files in %s: %w", prefix, dir, err)
	}
	packed, err := Glob(dir, prefix+"-*"+suffix+Packed)
	if err != nil {
		return nil, fmt.Errorf("list %s files in %s: %w", prefix, dir, err)
	}
	for _, p := range packed {
		if !slices.Contains(plain, p[:len(p)-len(Packed)]) {
			plain = append(plain, p)
		}
	}
	slices.SortFunc(plain, func(a, b string) int {
		return cmp.Or(cmp.Compare(begun(a, prefix), begun(b, prefix)), cmp.Compare(a, b))
	})
	return plain, nil
}

// Glob lists the files of a folder whose names have a pattern, sorted. The folder's own name is none; one that is not there has no
// files.
func Glob(dir, pattern string) (files []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		ok, bad := filepath.Match(pattern, e.Name())
		if bad != nil {
			return nil, bad
		}
		if ok {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files, err
}

// begun is the start and the part in the name of a file: the numbers of processes before them say nothing of age.
func begun(name, prefix string) string {
	f := strings.Split(strings.TrimPrefix(filepath.Base(name), prefix+"-"), "-")
	if len(f) < 4 {
		return ""
	}
	return f[len(f)-2] + "-" + f[len(f)-1]
}

// retain removes the oldest files of this kind until those that stay, and the one that is about to be written, fit into
// MaxTotal. Files that a living process writes stay.
func (w *Writer) retain() {
	if w.o.MaxTotal <= 0 {
		return
	}
	names, err := Files(w.o.Dir, w.o.Prefix, w.o.Suffix)
	if err != nil {
		return
	}
	var files []aged
	total := w.o.MaxBytes
	for _, n := range names {
		info, err := os.Stat(n)
		if err != nil {
			continue
		}
		f := aged{n, info.Size(), info.ModTime()}
		for _, b := range w.o.Beside {
			if info, err := os.Stat(n + b); err == nil {
				f.size += info.Size()
			}
		}
		files = append(files, f)
		total += f.size
	}
	slices.SortStableFunc(files, func(a, b aged) int { return a.mod.Compare(b.mod) })
	for _, f := range files {
		if total <= w.o.MaxTotal {
			return
		}
		if !Unused(f.name) {
			continue
		}
		if err := os.Remove(f.name); err != nil {
			w.o.Logger.Warn("old file of lines cannot be removed", "file", f.name, "error", err)
			continue
		}
		for _, b := range w.o.Beside {
			if err := os.Remove(f.name + b); err != nil && !errors.Is(err, os.ErrNotExist) {
				w.o.Logger.Warn("what lies beside an old file of lines cannot be removed", "file", f.name+b, "error", err)
			}
		}
		w.o.Logger.Info("removed the oldest file of lines", "file", f.name, "bytes", f.size)
		total -= f.size
	}
}

type aged struct {
	name string
	size int64
	mod  time.Time
}

// Unused says that no living process holds the lock of a file.
func Unused(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}
