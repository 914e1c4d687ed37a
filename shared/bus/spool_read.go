package bus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
)

// readChunk holds at least one entry of the largest size.
const readChunk = frameHeader + maxEntry + 1024

// errTorn is returned when a frame is cut off or its checksum is wrong.
var errTorn = errors.New("bus: torn spool entry")

// spoolReader reads entries in order. It belongs to one goroutine.
type spoolReader struct {
	s  *spool
	at position // after the entries that were returned
	// limit ends what is returned now; nil: all there is.
	limit *position
	f     *os.File
	seg   int64
	buf   []byte
}

func newSpoolReader(s *spool, from position) *spoolReader {
	return &spoolReader{s: s, at: from, buf: make([]byte, readChunk)}
}

// next returns the entries after at, as many as fit in one read, or none when there are no more now. Their data is valid
// until the next call.
func (r *spoolReader) next() ([]entry, error) {
	for {
		if r.limit != nil && !r.at.before(*r.limit) {
			return nil, nil
		}
		size, following := r.s.end(r.at.seg)
		if r.limit != nil && r.at.seg == r.limit.seg {
			size, following = min(size, r.limit.off), 0
		}
		if r.at.off >= size {
			if following == 0 {
				return nil, nil
			}
			r.at = position{seg: following}
			continue
		}
		if err := r.open(); err != nil {
			return nil, err
		}
		entries, next, err := readFrames(r.f, r.at.off, r.buf[:min(int64(len(r.buf)), size-r.at.off)])
		if len(entries) > 0 {
			for i := range entries {
				entries[i].at.seg = r.at.seg
			}
			r.at.off = next
			return entries, nil
		}
		if err == nil {
			err = errTorn
		}
		at := r.at
		r.at.off = size // nothing after a damaged frame can be found: go on with the next segment
		return nil, fmt.Errorf("read spool %s at %d: %w", r.s.path(at.seg), at.off, err)
	}
}

// nextSegment goes on to the next segment behind the last entry of one that is complete.
func (r *spoolReader) nextSegment() {
	if size, following := r.s.end(r.at.seg); r.at.off >= size && following != 0 {
		r.at = position{seg: following}
	}
}

func (r *spoolReader) open() error {
	if r.f != nil && r.seg == r.at.seg {
		return nil
	}
	r.close()
	f, err := os.Open(r.s.path(r.at.seg))
	if err != nil {
		return fmt.Errorf("open spool segment: %w", err)
	}
	r.f, r.seg = f, r.at.seg
	return nil
}

func (r *spoolReader) close() {
	if r.f != nil {
		r.f.Close()
		r.f = nil
	}
}

// readFrames reads whole frames at off into buf. next is after the last whole one. A frame that is cut off by the end of
// buf or of the file is left for the next read; errTorn says that not even the first is whole.
func readFrames(f io.ReaderAt, off int64, buf []byte) (entries []entry, next int64, err error) {
	n, err := f.ReadAt(buf, off)
	if err != nil && err != io.EOF {
		return nil, off, err
	}
	b := buf[:n]
	for len(b) > 0 {
		e, size, ok := parseFrame(b)
		if !ok {
			break
		}
		e.at.off = off
		entries = append(entries, e)
		b = b[size:]
		off += int64(size)
	}
	if len(entries) == 0 && n > 0 {
		return nil, off, errTorn
	}
	return entries, off, nil
}

func parseFrame(b []byte) (e entry, size int, ok bool) {
	if len(b) < frameHeader {
		return e, 0, false
	}
	n := int(binary.LittleEndian.Uint32(b))
	if n > readChunk-frameHeader || n > len(b)-frameHeader {
		return e, 0, false
	}
	p := b[frameHeader : frameHeader+n]
	if crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(b[4:]) {
		return e, 0, false
	}
	var subject, id []byte
	if subject, p, ok = cutField(p); !ok {
		return e, 0, false
	}
	if id, p, ok = cutField(p); !ok || len(p) < 1 {
		return e, 0, false
	}
	return entry{subject: string(subject), id: string(id), kind: p[0], data: p[1:]}, frameHeader + n, true
}

func cutField(b []byte) (field, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	n := int(binary.LittleEndian.Uint16(b))
	if n > len(b)-2 {
		return nil, nil, false
	}
	return b[2 : 2+n], b[2+n:], true
}
