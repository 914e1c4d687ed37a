// Package rowlog writes the rows of iteration statistics that nodes publish beside the timelines: a file for each process of
// a node, TRACES/NODE-CLOCK.rows.ndjson, which timeline check holds against the requests. It owns these files and says
// in them how many rows it missed; it asks nobody for them. Who writes a file holds its lock: of several routers with one
// folder, one does.
//
// One goroutine uses a Log.
package rowlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"meridian.internal/router/rowcheck"
	"meridian.internal/shared/jsonline"
)

// Suffix ends the name of a file of rows.
const Suffix = ".rows.ndjson"

// maxBytes bounds the file of one process: rows that come after are left out, and said to be.
const maxBytes = 1 << 30

// Name is the file of a node's process.
func Name(node, clock string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(`/\: `, r) {
			return '_'
		}
		return r
	}, node+"-"+clock) + Suffix
}

// Log writes the rows of all nodes.
type Log struct {
	dir   string
	log   *slog.Logger
	files map[string]*file
	now   func() time.Time
}

// endBytes of a file are for the line that says that it is full.
const endBytes = 1 << 10

type file struct {
	f     *os.File // nil: it cannot be written, is full, or another process writes it
	last  int64    // number of the newest row in it
	size  int64
	ended bool      // it says that rows are left out from here on
	used  time.Time // when the newest row came, or it was tried to open it
}

// idle is for how long a file stays open to which no row comes: its process may be gone.
const idle = time.Minute

// New makes a log in a folder that exists.
func New(dir string, log *slog.Logger) *Log {
	return &Log{dir: dir, log: log, files: map[string]*file{}, now: time.Now}
}

// Add writes a row as its node sent it.
func (l *Log) Add(row []byte) {
	h, err := headOf(row)
	if err != nil {
		l.log.Warn("row not written", "error", err)
		return
	}
	name := Name(h.node, h.clock)
	f, now := l.files[name], l.now()
	if f == nil || f.f == nil && now.Sub(f.used) >= idle { // do not try for every row
		l.forget(now)
		switch f, err = open(filepath.Join(l.dir, name)); {
		case errors.Is(err, ErrUsed):
			f = &file{}
		case err != nil:
			l.log.Warn("rows of a node are not written", "node", h.node, "error", err)
			f = &file{}
		}
		f.used, l.files[name] = now, f
	}
	if f.f == nil {
		return
	}
	f.used = now
	if err := f.add(h, row); err != nil {
		l.log.Warn("rows of a node are no longer written", "node", h.node, "error", err)
		f.close()
	}
}

// forget closes the files to which no row comes.
func (l *Log) forget(now time.Time) {
	for name, f := range l.files {
		if now.Sub(f.used) >= idle {
			f.close()
			delete(l.files, name)
		}
	}
}

var errFull = errors.New("rowlog: the file is full")

func (f *file) add(h head, row []byte) error {
	var out []byte
	missed := h.seq - f.last - 1
	switch {
	case missed < 0:
		return nil // it is there already
	case missed > 0 && f.last > 0:
		out = rowcheck.AppendLost(out, h.node, h.clock, missed)
	}
	out = append(append(out, row...), '\n')
	if f.size+int64(len(out)) > maxBytes-endBytes {
		return f.end(h, missed+1)
	}
	if err := f.write(out); err != nil {
		return err
	}
	f.last = h.seq
	return nil
}

// end says once that rows are left out: this one and those before it that are missing, and all that come after.
func (f *file) end(h head, lost int64) error {
	if !f.ended {
		if err := f.write(rowcheck.AppendLost(nil, h.node, h.clock, lost)); err != nil {
			return err
		}
		f.ended = true
	}
	return fmt.Errorf("%w: %d bytes", errFull, f.size)
}

func (f *file) write(b []byte) error {
	n, err := f.f.Write(b)
	f.size += int64(n)
	if err != nil {
		return fmt.Errorf("write rows: %w", err)
	}
	return nil
}

// Close closes all files.
func (l *Log) Close() {
	for _, f := range l.files {
		f.close()
	}
}

func (f *file) close() {
	if f.f != nil {
		_ = f.f.Close() // every row was written by itself
		f.f = nil
	}
}

// ErrUsed is returned for a file that another process writes.
var ErrUsed = errors.New("rowlog: another process writes the file")

// Create makes an empty file of rows for whoever has them all.
func Create(path string) (*os.File, error) {
	f, err := locked(path)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("empty %s: %w", path, err), f.Close())
	}
	return f, nil
}

// locked opens a file for this process alone.
func locked(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open rows: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s", ErrUsed, path), f.Close())
	}
	return f, nil
}

// open goes on with a file that a process before has begun: after its last whole row.
func open(path string) (*file, error) {
	f, err := locked(path)
	if err != nil {
		return nil, err
	}
	out := &file{f: f}
	if err := out.resume(); err != nil {
		return nil, errors.Join(fmt.Errorf("go on with rows in %s: %w", path, err), f.Close())
	}
	return out, nil
}

// tailBytes holds a row, also one with the states of many requests.
const tailBytes = 4 << 20

func (f *file) resume() error {
	info, err := f.f.Stat()
	if err != nil {
		return err
	}
	from := max(info.Size()-tailBytes, 0)
	tail := make([]byte, info.Size()-from)
	if _, err := f.f.ReadAt(tail, from); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	whole := bytes.LastIndexByte(tail, '\n') + 1
	f.size = from + int64(whole)
	if err := f.f.Truncate(f.size); err != nil {
		return err
	}
	if _, err := f.f.Seek(f.size, io.SeekStart); err != nil {
		return err
	}
	for line := range bytes.Lines(tail[:whole]) {
		if h, err := headOf(line); err == nil {
			f.last = h.seq
		}
		f.ended = bytes.HasPrefix(line, []byte(`{"schema":"`+rowcheck.LostSchema))
	}
	return nil
}

// head is what a row says of itself first.
type head struct {
	node, clock string
	seq         int64
}

var errNoRow = errors.New("rowlog: no row")

// headOf reads the first keys of a row.
func headOf(row []byte) (h head, err error) {
	r := jsonline.NewReader(string(row[:min(len(row), 1<<10)]))
	if r.Object() {
		for key, ok := r.Key(); ok && (h.node == "" || h.clock == "" || h.seq == 0); key, ok = r.Key() {
			switch key {
			case "node":
				h.node = r.String()
			case "clock_id":
				h.clock = r.String()
			case "seq":
				h.seq = r.Int()
			default:
				r.Skip()
			}
		}
	}
	if h.node == "" || h.clock == "" || h.seq < 1 || !fs.ValidPath(Name(h.node, h.clock)) {
		return h, fmt.Errorf("%w: node %q, clock %q, seq %d", errNoRow, h.node, h.clock, h.seq)
	}
	return h, nil
}
