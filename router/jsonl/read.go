package jsonl

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// MaxLine bounds one line when it is read: what is longer is reported and skipped.
const MaxLine = 64 << 20

var (
	// ErrLine is returned for a line that is too long or cut off.
	ErrLine = errors.New("jsonl: bad line")
	// ErrGzip is returned for a file that was compressed by others.
	ErrGzip = errors.New("jsonl: compressed with gzip")
)

// Read calls each with every line of a file, its number from 1 and its offset. The bytes are valid during the call. bad is
// called for lines that are too long. The torn tail of an open file is no error and is left out. each may end the reading
// with an error.
func Read(path string, each func(line []byte, number int, offset int64) error, bad func(number int, err error)) error {
	return ReadAfter(path, 0, each, bad)
}

// ReadAfter is Read from the line on that begins at offset; numbers and offsets count from there. A compressed file can only
// be read from its beginning.
func ReadAfter(path string, offset int64, each func(line []byte, number int, offset int64) error, bad func(number int, err error)) error {
	f, err := openText(path, offset)
	if err != nil {
		return fmt.Errorf("open file of lines: %w", err)
	}
	defer f.Close()
	if err := ReadFrom(f, each, bad); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// openText finds a file also when it was compressed after its name was listed.
func openText(path string, offset int64) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) && !isPacked(path) && offset == 0 {
		path += Packed
		if g, e := os.Open(path); e == nil {
			f, err = g, nil
		}
	}
	if err != nil {
		return nil, err
	}
	if !isPacked(path) {
		if _, err := f.Seek(offset, io.SeekStart); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}
	d, err := unpack(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return both{d, f}, nil
}

func isPacked(path string) bool { return strings.HasSuffix(path, Packed) }

// both closes the reader and the file below it.
type both struct {
	io.ReadCloser
	file *os.File
}

func (b both) Close() error { return errors.Join(b.ReadCloser.Close(), b.file.Close()) }

// ReadFrom is Read on a reader; offsets count from where it stands.
func ReadFrom(from io.Reader, each func(line []byte, number int, offset int64) error, bad func(number int, err error)) error {
	r := bufio.NewReaderSize(from, 1<<20)
	if start, _ := r.Peek(2); string(start) == "\x1f\x8b" {
		return fmt.Errorf("%w: gunzip it, or compress it with zstd instead, to %s", ErrGzip, Packed)
	}
	var long []byte
	offset := int64(0)
	for number := 1; ; number++ {
		line, size, err := readLine(r, &long)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, ErrLine):
			bad(number, err)
		case err != nil:
			return err
		case len(line) > 0:
			if err := each(line, number, offset); err != nil {
				return err
			}
		}
		offset += size
	}
}

// readLine returns the next line without its newline and the bytes that it took.
func readLine(r *bufio.Reader, long *[]byte) (line []byte, size int64, err error) {
	*long = (*long)[:0]
	for {
		part, err := r.ReadSlice('\n')
		size += int64(len(part))
		switch {
		case err == nil && size > MaxLine:
			return nil, size, fmt.Errorf("%w: %d bytes, at most %d", ErrLine, size, MaxLine)
		case err == nil && len(*long) == 0:
			return part[:len(part)-1], size, nil
		case err == nil:
			*long = append(*long, part[:len(part)-1]...)
			return *long, size, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, size, err // io.EOF: what was read has no newline, so it is torn
		}
		if size <= MaxLine {
			*long = append(*long, part...)
		}
	}
}

// At reads the line at a location.
func At(l Location) ([]byte, error) {
	f, err := os.Open(l.Path)
	if err != nil {
		return nil, fmt.Errorf("open file of lines: %w", err)
	}
	defer f.Close()
	b := make([]byte, l.Len)
	if _, err := f.ReadAt(b, l.Offset); err != nil {
		return nil, fmt.Errorf("read %s at %d: %w", l.Path, l.Offset, err)
	}
	return b, nil
}
