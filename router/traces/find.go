package traces

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/jsonline"
)

// worthIndexing is the size from which on a file without an index gets one when it is searched.
const worthIndexing = 64 << 20

// Find returns the newest line of a request, by either id; nil if there is none. Files with an index are not read, and of
// others lines that do not hold the id's bytes are not even parsed.
func (s *Set) Find(ctx context.Context, id string) (*timeline.Line, error) {
	if id == "" || len(id) > maxID {
		return nil, fmt.Errorf("request id of %d bytes: want 1 to %d", len(id), maxID)
	}
	found, err := s.findLast(ctx, s.Files, id)
	if err != nil {
		return nil, err
	}
	if found != nil {
		id = found.RequestID // several requests may have one id of a client's
	}
	better, err := s.findLast(ctx, s.Amends, id)
	if better != nil || err != nil {
		return better, err
	}
	return found, nil
}

// findLast returns the line of a request from the last of the files that has one.
func (s *Set) findLast(ctx context.Context, files []string, id string) (*timeline.Line, error) {
	for _, name := range slices.Backward(files) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if l, err := s.findIn(ctx, name, id); l != nil || err != nil {
			return l, err
		}
	}
	return nil, nil
}

// maxID bounds the id that is looked for.
const maxID = 1024

// findIn returns the last line of a request in one file.
func (s *Set) findIn(ctx context.Context, path, id string) (found *timeline.Line, err error) {
	if info, err := os.Stat(path); err == nil && info.Size() >= worthIndexing && jsonl.Unused(path) {
		if _, f, err := openIndex(path); err == nil {
			f.Close()
		} else {
			_ = Seal(path, false) // the folder may be read-only: then the file is read
		}
	}
	covers, found, err := lookup(path, id)
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, ErrIndex) {
		return nil, err
	}
	if strings.HasSuffix(path, jsonl.Packed) && covers > 0 {
		return found, nil
	}
	quoted := jsonline.AppendString(nil, id)
	err = jsonl.ReadAfter(path, covers, func(b []byte, number int, _ int64) error {
		if number%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if !bytes.Contains(b, quoted) {
			return nil
		}
		l, err := timeline.Parse(b)
		if err != nil {
			if covers == 0 {
				s.bad(Position{path, number}, err)
			}
			return nil
		}
		if l.RequestID == id || l.ClientRequestID == id {
			found = l
		}
		return nil
	}, func(int, error) {})
	return found, err
}

// lookup searches the part of a file that its index covers.
func lookup(path, id string) (covers int64, found *timeline.Line, err error) {
	x, f, err := openIndex(path)
	if err != nil {
		return 0, nil, err
	}
	defer f.Close()
	offsets, err := x.find(id)
	if err != nil {
		return 0, nil, err
	}
	for _, at := range offsets {
		b, err := jsonl.LineAt(path, x.frames, at)
		if err != nil {
			return 0, nil, fmt.Errorf("%w: it points to %d: %w", ErrIndex, at, err)
		}
		l, err := timeline.Parse(b)
		if err != nil {
			return 0, nil, fmt.Errorf("%w: it points to %d: %w", ErrIndex, at, err)
		}
		if l.RequestID == id || l.ClientRequestID == id {
			found = l
		}
	}
	return x.covers, found, nil
}

// Lookup returns the newest line of a request, by either id, from the files of a folder that have an index; nil if there is
// none. It reads a few pages a file.
func Lookup(dir, id string) ([]byte, error) {
	var found *timeline.Line
	for _, suffix := range []string{lineSuffix, amendSuffix} {
		names, err := jsonl.Files(dir, filePrefix, suffix)
		if err != nil {
			return nil, err
		}
		for _, name := range slices.Backward(names) {
			if _, l, err := lookup(name, id); err == nil && l != nil {
				found, id = l, l.RequestID
				break
			}
		}
	}
	if found == nil {
		return nil, nil
	}
	return timeline.Append(nil, found), nil
}
