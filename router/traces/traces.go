// Package traces reads timeline files: folders or files, compressed or not, lines in order, amendments applied, bad lines
// reported with file and number. It keeps no more in memory than the amendments and one line. It also seals files that are
// complete: an index beside them makes one request of millions quick to find.
package traces

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
)

const (
	filePrefix  = "timeline"
	lineSuffix  = ".jsonl"
	amendSuffix = ".amend.ndjson"
)

// Position is where a line was read.
type Position struct {
	File   string
	Number int // from 1
}

// String gives "file:number".
func (p Position) String() string { return fmt.Sprintf("%s:%d", p.File, p.Number) }

// Set is a set of files to read.
type Set struct {
	Files  []string
	Amends []string // found beside Files
	// Bad is called for what cannot be read; the line is skipped. nil: silently.
	Bad func(Position, error)
	// Progress is called now and then with the bytes of Files read so far, at most Size. nil: nobody watches.
	Progress func(done int64)
	Size     int64 // of Files

	amended map[string][]byte // newest amendment of a request
}

// Open finds the files. A folder stands for its timeline-*.jsonl. An index is passed over: a shell's pattern gives it with its file.
func Open(args []string) (*Set, error) {
	s := &Set{}
	for _, a := range args {
		info, err := os.Stat(a)
		if err != nil {
			return nil, fmt.Errorf("open timelines: %w", err)
		}
		names := []string{a}
		if info.IsDir() {
			if names, err = jsonl.Files(a, filePrefix, lineSuffix); err != nil {
				return nil, err
			}
			if len(names) == 0 {
				return nil, fmt.Errorf("open timelines: no timeline-*%s in folder %s", lineSuffix, a)
			}
		}
		for _, n := range names {
			if strings.HasSuffix(n, IndexSuffix) {
				continue
			}
			if strings.HasSuffix(strings.TrimSuffix(n, jsonl.Packed), amendSuffix) {
				s.Amends = append(s.Amends, n)
				continue
			}
			s.Files = append(s.Files, n)
			if info, err := os.Stat(n); err == nil {
				s.Size += info.Size()
			}
		}
	}
	if len(args) > 0 && len(s.Files)+len(s.Amends) == 0 {
		return nil, fmt.Errorf("open timelines: nothing but indexes: %s", strings.Join(args, ", "))
	}
	s.findAmends()
	return s, nil
}

// findAmends adds the amendments that lie beside the files: one process's, or a later one's that took over its records.
func (s *Set) findAmends() {
	var dirs []string
	for _, f := range s.Files {
		if d := filepath.Dir(f); !slices.Contains(dirs, d) && strings.HasSuffix(strings.TrimSuffix(f, jsonl.Packed), lineSuffix) {
			dirs = append(dirs, d)
		}
	}
	for _, d := range dirs {
		names, err := jsonl.Files(d, filePrefix, amendSuffix)
		if err != nil {
			continue
		}
		for _, n := range names {
			if !slices.Contains(s.Amends, n) {
				s.Amends = append(s.Amends, n)
			}
		}
	}
}

func (s *Set) bad(p Position, err error) {
	if s.Bad != nil {
		s.Bad(p, err)
	}
}

// loadAmends reads every amendment; the last of a request counts.
func (s *Set) loadAmends() error {
	if s.amended != nil {
		return nil
	}
	s.amended = map[string][]byte{}
	for _, name := range s.Amends {
		err := jsonl.Read(name, func(b []byte, number int, _ int64) error {
			l, err := timeline.ParseSpans(b)
			if err != nil {
				s.bad(Position{name, number}, err)
				return nil
			}
			s.amended[strings.Clone(l.RequestID)] = bytes.Clone(b) // a key must not keep the text of its line
			return nil
		}, func(number int, err error) { s.bad(Position{name, number}, err) })
		if err != nil {
			return err
		}
	}
	return nil
}

// Each calls f with every line, amended ones in their newest form. phases says whether the phases are wanted: without
// them reading is twice as fast. f may end the reading with an error.
func (s *Set) Each(ctx context.Context, phases bool, f func(l *timeline.Line, at Position) error) error {
	parse := timeline.ParseSpans
	if phases {
		parse = timeline.Parse
	}
	return s.Raw(ctx, func(b []byte, at Position) error {
		l, err := parse(b)
		if err != nil {
			s.bad(at, err)
			return nil
		}
		if a := s.amended[l.RequestID]; a != nil {
			if better, err := parse(a); err == nil {
				l = better
			}
		}
		return f(l, at)
	})
}

// Raw calls f with the bytes of every line as it was written. They are valid during the call.
func (s *Set) Raw(ctx context.Context, f func(b []byte, at Position) error) error {
	if err := s.loadAmends(); err != nil {
		return err
	}
	before := int64(0)
	for _, name := range s.Files {
		packed := strings.HasSuffix(name, jsonl.Packed) // its offsets are those of the text, not of the file
		err := jsonl.Read(name, func(b []byte, number int, offset int64) error {
			if number%1024 == 0 {
				if err := ctx.Err(); err != nil {
					return err
				}
				if packed {
					offset = 0
				}
				if s.Progress != nil {
					s.Progress(min(before+offset, s.Size)) // a file may have grown
				}
			}
			return f(b, Position{name, number})
		}, func(number int, err error) { s.bad(Position{name, number}, err) })
		if err != nil {
			return err
		}
		if info, err := os.Stat(name); err == nil {
			before += info.Size()
		}
	}
	return nil
}
