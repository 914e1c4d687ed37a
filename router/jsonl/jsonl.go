// Package jsonl owns the files of lines: one JSON object a line, appended by one writer, rotated by size and age, with the
// torn tail of a killed process cut off at the next start. It knows nothing of what a line means.
//
// A Writer belongs to one goroutine. Lines are on disk when Flush returned nil: written (write(2): the process may die), and with
// Options.Sync synced too (the machine may).
package jsonl

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ErrFull is returned when the disk refuses lines and the memory for waiting ones is used up.
var ErrFull = errors.New("jsonl: too many lines wait for the disk")

// Options of a writer.
type Options struct {
	Dir       string
	Prefix    string            // file names: PREFIX-host-pid-start-part SUFFIX
	Suffix    string            // ".jsonl"
	MaxBytes  int64             // a file is not grown beyond; 0: 256 MiB
	MaxLines  int               // nor has more lines; 0: no limit
	MaxAge    time.Duration     // nor older than; 0: 24 h
	MaxTotal  int64             // bytes of all files of this kind in the folder; the oldest are removed. 0: no limit
	Beside    []string          // endings of files that belong to one of lines and go with it
	Sync      bool              // each flush is synced to the disk
	Closed    func(path string) // called with each file that is not written any more; nil: nobody asks
	MaxMemory int               // bytes that may wait for the disk; 0: 64 MiB
	Now       func() time.Time  // nil: time.Now
	Logger    *slog.Logger      // nil: slog.Default()
}

// Location is where a line is.
type Location struct {
	Path   string
	Offset int64
	Len    int
}

// Writer appends lines.
type Writer struct {
	o     Options
	stem  string
	part  int
	f     *os.File
	path  string
	since time.Time
	size  int64 // bytes of the file on disk
	lines int   // of the file, with those that wait
	buf   []byte
	sync  func(*os.File) error
}

// Open makes the folder, repairs what a killed process left in it, and returns a writer. The file itself is made with the
// first line.
func Open(o Options) (*Writer, error) {
	if o.MaxBytes == 0 {
		o.MaxBytes = 256 << 20
	}
	if o.MaxAge == 0 {
		o.MaxAge = 24 * time.Hour
	}
	if o.MaxMemory == 0 {
		o.MaxMemory = 64 << 20
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder for %s files: %w", o.Prefix, err)
	}
	if err := Repair(o.Dir, o.Prefix, o.Suffix, o.Logger); err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	host = strings.Map(func(r rune) rune {
		if r == '/' || r == '-' || r <= ' ' {
			return '_'
		}
		return r
	}, host)
	sync := func(*os.File) error { return nil }
	if o.Sync {
		sync = (*os.File).Sync
	}
	return &Writer{o: o, sync: sync, stem: fmt.Sprintf("%s-%s-%d-%s", o.Prefix, host, os.Getpid(), o.Now().UTC().Format("20060102T150405Z"))}, nil
}

// Append takes a line (without newline) and says where it will be. The bytes are copied.
func (w *Writer) Append(line []byte) (Location, error) {
	if len(w.buf)+len(line)+1 > w.o.MaxMemory {
		return Location{}, fmt.Errorf("%w: %d bytes", ErrFull, len(w.buf))
	}
	if err := w.rotate(len(line) + 1); err != nil {
		return Location{}, err
	}
	at := Location{Path: w.path, Offset: w.size + int64(len(w.buf)), Len: len(line)}
	w.buf = append(append(w.buf, line...), '\n')
	w.lines++
	return at, nil
}

// rotate makes sure that there is a file with room for n more bytes.
func (w *Writer) rotate(n int) error {
	w.leaveRemoved()
	if w.f != nil && w.size+int64(len(w.buf)+n) <= w.o.MaxBytes && w.o.Now().Sub(w.since) < w.o.MaxAge &&
		(w.o.MaxLines == 0 || w.lines < w.o.MaxLines) {
		return nil
	}
	if w.f != nil {
		if w.size == 0 && len(w.buf) == 0 {
			return nil // one line alone is larger than the limit
		}
		if err := w.Flush(); err != nil {
			return nil // the disk is in trouble: the lines stay together and wait
		}
		w.closeFile()
	}
	w.retain()
	if err := os.MkdirAll(w.o.Dir, 0o755); err != nil {
		return fmt.Errorf("make folder for %s files: %w", w.o.Prefix, err)
	}
	for {
		path := filepath.Join(w.o.Dir, fmt.Sprintf("%s-%05d%s", w.stem, w.part, w.o.Suffix))
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		w.part++
		switch {
		case errors.Is(err, os.ErrExist):
			continue
		case err != nil:
			return fmt.Errorf("open file of lines: %w", err)
		}
		// The lock tells others that this file is being written. Who holds it now has found the file empty, and lets go of it.
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			w.o.Logger.Warn("file of lines cannot be locked", "file", path, "error", err)
		}
		w.f, w.path, w.size, w.lines, w.since = f, path, 0, 0, w.o.Now()
		return w.syncFolder()
	}
}

// leaveRemoved lets go of a file that somebody has removed: what was written there would be found nowhere.
func (w *Writer) leaveRemoved() {
	if w.f == nil || len(w.buf) > 0 { // the lines that wait have their places
		return
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(int(w.f.Fd()), &st); err != nil || st.Nlink > 0 {
		return
	}
	w.o.Logger.Warn("a file of lines was removed while it was written; a new one begins", "file", w.path)
	_ = w.f.Close()
	w.f = nil
}

// syncFolder makes the name of a new file safe.
func (w *Writer) syncFolder() error {
	if !w.o.Sync {
		return nil
	}
	d, err := os.Open(w.o.Dir)
	if err != nil {
		return fmt.Errorf("open folder of lines: %w", err)
	}
	defer d.Close()
	if err := w.sync(d); err != nil {
		return fmt.Errorf("sync folder %s: %w", w.o.Dir, err)
	}
	return nil
}

// Flush writes the waiting lines. After an error they still wait, and the file holds whole lines only.
func (w *Writer) Flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	n, err := w.f.WriteAt(w.buf, w.size)
	if err != nil {
		if n > 0 {
			_ = w.f.Truncate(w.size) // the next write begins there all the same
		}
		return fmt.Errorf("write lines: %w", err)
	}
	if err := w.sync(w.f); err != nil { // they are written again: the system may have dropped what it could not sync
		return fmt.Errorf("make lines safe: %w", err)
	}
	w.size += int64(n)
	if w.buf = w.buf[:0]; cap(w.buf) > 4<<20 {
		w.buf = nil
	}
	return nil
}

// Waiting is how many bytes wait for Flush.
func (w *Writer) Waiting() int { return len(w.buf) }

// Close flushes and closes the file.
func (w *Writer) Close() error {
	err := w.Flush()
	if w.f != nil {
		w.closeFile()
	}
	return err
}

// closeFile lets go of the file, and of its lock.
func (w *Writer) closeFile() {
	w.f.Close()
	w.f = nil
	if w.o.Closed != nil {
		w.o.Closed(w.path)
	}
}

// Repair cuts the torn last line off every file of PREFIX*SUFFIX in dir that no living process writes.
func Repair(dir, prefix, suffix string, log *slog.Logger) error {
	names, err := Glob(dir, prefix+"-*"+suffix)
	if err != nil {
		return fmt.Errorf("list %s files: %w", prefix, err)
	}
	for _, name := range names {
		if err := repair(name, log); err != nil {
			log.Warn("file of lines could not be checked", "file", name, "error", err)
		}
	}
	return nil
}

func repair(name string, log *slog.Logger) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return nil
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	keep, err := wholeLines(f, info.Size())
	if err != nil || keep == info.Size() {
		return err
	}
	log.Warn("cut off the torn last line of a file", "file", name, "bytes", info.Size()-keep)
	return f.Truncate(keep)
}

// wholeLines is the offset after the last newline.
func wholeLines(f io.ReaderAt, size int64) (int64, error) {
	buf := make([]byte, 64<<10)
	for end := size; end > 0; {
		from := max(0, end-int64(len(buf)))
		b := buf[:end-from]
		if _, err := f.ReadAt(b, from); err != nil && err != io.EOF {
			return 0, err
		}
		if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
			return from + int64(i) + 1, nil
		}
		end = from
	}
	return 0, nil
}
