package bus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// Errors of the spool.
var (
	// ErrSpoolFull is returned when an entry would take the spool over its limit: it is dropped and counted.
	ErrSpoolFull = errors.New("bus: spool full")
	// ErrTooLarge is returned for an entry that no stream would take: it is dropped and counted.
	ErrTooLarge = errors.New("bus: message too large")
	// ErrSpoolLocked is returned when another process uses the spool folder.
	ErrSpoolLocked = errors.New("bus: spool folder in use")
)

const (
	spoolSuffix     = ".spool"
	defaultSegment  = 512 << 10 // few pages that are touched often: one that is not cached costs more than a write
	defaultSpoolMax = 256 << 20
	maxEntry        = maxMessage
	maxData         = maxMessage - 1024 // of a message; the rest is for its headers
	maxSubject      = 2048              // NATS cuts the connection at a line of 4096
	frameHeader     = 8                 // u32 payload length, u32 CRC-32C of the payload
)

// entry is one message on its way. Payload on disk: u16 length and subject, u16 length and id, u8 kind, data.
type entry struct {
	subject string
	id      string // Nats-Msg-Id
	kind    byte   // kindRecord or kindSteps
	data    []byte

	at position // where it was read
}

const (
	kindRecord byte = iota
	kindSteps
)

// position is a place in the spool: everything before it is acknowledged.
type position struct{ seg, off int64 }

func (p position) before(q position) bool {
	return p.seg < q.seg || p.seg == q.seg && p.off < q.off
}

// spool is a queue on disk in segment files 0000000001.spool, ... An entry is there when append returns (no
// fsync; see segmentFile). Any goroutine appends; one goroutine reads and commits.
type spool struct {
	dir      string
	lock     *os.File
	cursor   *os.File
	maxBytes int64
	segment  int64

	mu    sync.Mutex      // guards what follows; held while an entry is written
	w     *segmentFile    // nil: closed
	seg   int64           // segment that w writes
	sizes map[int64]int64 // bytes of each segment on disk
	total int64           // their sum
	first int64           // oldest segment on disk
	buf   []byte
	kept  keptSegments
}

// openSpool locks the folder and finds what an earlier process left. start is where unacknowledged entries begin, found
// how many there are.
func openSpool(dir string, maxBytes, segment int64) (s *spool, start position, found int64, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, start, 0, fmt.Errorf("make spool folder: %w", err)
	}
	lock, err := lockFile(filepath.Join(dir, "lock"))
	if err != nil {
		return nil, start, 0, err
	}
	s = &spool{dir: dir, lock: lock, maxBytes: maxBytes, segment: segment, sizes: map[int64]int64{}}
	defer func() {
		if err != nil {
			s.release()
		}
	}()
	if s.cursor, err = os.OpenFile(filepath.Join(dir, "cursor"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, start, 0, fmt.Errorf("open spool cursor: %w", err)
	}
	segs, err := s.list()
	if err != nil {
		return nil, start, 0, err
	}
	start, found = s.recover(segs)
	if err = s.openSegment(s.seg + 1); err != nil {
		return nil, start, 0, err
	}
	if found == 0 {
		start = position{seg: s.seg}
	}
	return s, start, found, nil
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open spool lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %s is locked by another process; give each node a folder of its own", ErrSpoolLocked, filepath.Dir(path))
	}
	return f, nil
}

func (s *spool) list() ([]int64, error) {
	names, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("read spool folder: %w", err)
	}
	var segs []int64
	for _, n := range names {
		num, ok := strings.CutSuffix(n.Name(), spoolSuffix)
		if v, err := strconv.ParseInt(num, 10, 64); ok && err == nil && v > 0 {
			segs = append(segs, v)
		}
	}
	slices.Sort(segs)
	return segs, nil
}

// recover counts the entries after the cursor and drops the segments before it. A torn or damaged frame ends its segment:
// only the last entry of a killed process can be torn, and its Publish never returned.
func (s *spool) recover(segs []int64) (start position, found int64) {
	cur := s.loadCursor()
	s.seg = cur.seg
	for _, n := range segs {
		s.seg = max(s.seg, n)
		if n < cur.seg {
			os.Remove(s.path(n))
			continue
		}
		from := int64(0)
		if n == cur.seg {
			from = cur.off
		}
		count, size := s.scan(n, from)
		if count == 0 {
			os.Remove(s.path(n))
			continue
		}
		if found == 0 {
			start, s.first = position{n, from}, n
		}
		found += count
		s.sizes[n] = size
		s.total += size
	}
	return start, found
}

func (s *spool) scan(seg, from int64) (count, size int64) {
	f, err := os.Open(s.path(seg))
	if err != nil {
		return 0, 0
	}
	defer f.Close()
	buf := make([]byte, readChunk)
	for {
		entries, next, _ := readFrames(f, from, buf)
		if len(entries) == 0 {
			if info, err := f.Stat(); err == nil && info.Size() > from {
				_ = os.Truncate(s.path(seg), from) // for the disk's sake: nothing is written behind it
			}
			return count, from
		}
		count += int64(len(entries))
		from = next
	}
}

func (s *spool) path(seg int64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%010d%s", seg, spoolSuffix))
}

func (s *spool) openSegment(seg int64) error {
	w := s.kept.again(s.path(seg))
	if w == nil {
		var err error
		if w, err = createSegment(s.path(seg), s.segment); err != nil {
			return fmt.Errorf("open spool segment: %w", err)
		}
	}
	if s.w != nil {
		s.kept.full(s.seg, s.w)
	}
	s.w, s.seg = w, seg
	s.sizes[seg] = 0
	if len(s.sizes) == 1 {
		s.first = seg
	}
	return nil
}

// append writes all entries together: either all are there, between from and to, or none.
func (s *spool) append(entries ...entry) (from, to position, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.w == nil {
		return from, to, ErrClosed
	}
	s.buf = s.buf[:0]
	for _, e := range entries {
		if len(e.subject) > maxSubject {
			return from, to, fmt.Errorf("%w: a subject of %d bytes, at most %d", ErrTooLarge, len(e.subject), maxSubject)
		}
		if len(e.data) > maxData {
			return from, to, fmt.Errorf("%w: %d bytes for %s, of at most %d", ErrTooLarge, len(e.data), e.subject, maxData)
		}
		s.buf = appendFrame(s.buf, e)
	}
	size := s.sizes[s.seg]
	if s.total+int64(len(s.buf)) > s.maxBytes {
		return from, to, fmt.Errorf("%w: %s holds %d bytes of at most %d", ErrSpoolFull, s.dir, s.total, s.maxBytes)
	}
	if size > 0 && size+int64(len(s.buf)) > s.segment {
		if err := s.openSegment(s.seg + 1); err != nil {
			return from, to, err
		}
		size = 0
	}
	if n, err := s.w.write(s.buf, size); err != nil {
		err = fmt.Errorf("write spool segment: %w", err)
		if n > 0 {
			err = errors.Join(err, s.untear(size))
		}
		return from, to, err
	}
	s.sizes[s.seg] = size + int64(len(s.buf))
	s.total += int64(len(s.buf))
	return position{s.seg, size}, position{s.seg, s.sizes[s.seg]}, nil
}

// untear takes what follows size off the segment, or begins another: a torn entry in the middle would hide what follows.
func (s *spool) untear(size int64) error {
	if s.w.truncate(size) != nil {
		return s.openSegment(s.seg + 1)
	}
	return nil
}

func appendFrame(b []byte, e entry) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(e.subject)))
	b = append(b, e.subject...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(e.id)))
	b = append(b, e.id...)
	b = append(b, e.kind)
	b = append(b, e.data...)
	payload := b[at+frameHeader:]
	binary.LittleEndian.PutUint32(b[at:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(b[at+4:], crc32.Checksum(payload, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func (s *spool) loadCursor() position {
	b := make([]byte, 64)
	n, _ := s.cursor.ReadAt(b, 0)
	var p position
	if _, err := fmt.Sscanf(string(b[:n]), "%d %d\n", &p.seg, &p.off); err != nil || p.seg < 0 || p.off < 0 {
		return position{}
	}
	return p
}

// commit remembers that everything before p is acknowledged, and removes the segments behind it or has them written again.
func (s *spool) commit(p position) error {
	if _, err := s.cursor.WriteAt(fmt.Appendf(nil, "%020d %020d\n", p.seg, p.off), 0); err != nil {
		return fmt.Errorf("write spool cursor: %w", err)
	}
	for {
		seg, size, w := s.acknowledged(p.seg)
		switch {
		case seg == 0:
			return nil
		case w == nil || !w.zero(size):
			os.Remove(s.path(seg))
		default:
			s.mu.Lock()
			s.kept.spare = append(s.kept.spare, w)
			s.mu.Unlock()
		}
	}
}

// acknowledged takes the oldest segment before one out of the spool; 0: there is none. w is nil where it is not kept.
func (s *spool) acknowledged(before int64) (seg, size int64, w *segmentFile) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; s.first < before; s.first++ {
		if size, ok := s.sizes[s.first]; ok {
			s.total -= size
			delete(s.sizes, s.first)
			return s.first, size, s.kept.take(s.first)
		}
	}
	return 0, 0, nil
}

// end is where the next entry will be written, and whether segment seg is complete (another follows).
func (s *spool) end(seg int64) (size int64, next int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if seg == s.seg {
		return s.sizes[seg], 0
	}
	next = seg + 1
	for next < s.seg {
		if _, ok := s.sizes[next]; ok {
			break
		}
		next++
	}
	return s.sizes[seg], next
}

// bytes is what the spool takes on disk.
func (s *spool) bytes() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// close lets go of the folder. When everything is acknowledged nothing stays in it but the cursor and the lock.
func (s *spool) close(done position) {
	s.mu.Lock()
	if s.w != nil {
		_ = s.w.truncate(s.sizes[s.seg]) // for the disk's sake
		s.w.close()
		s.w = nil
	}
	s.kept.close()
	if done.seg == s.seg && done.off == s.sizes[s.seg] {
		os.Remove(s.path(s.seg))
	}
	s.mu.Unlock()
	s.release()
}

func (s *spool) release() {
	if s.cursor != nil {
		s.cursor.Close()
	}
	s.lock.Close()
}
