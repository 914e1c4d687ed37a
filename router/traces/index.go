package traces

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"slices"
	"sort"

	"meridian.internal/router/jsonl"
)

// An index lies beside a file of lines and tells where in it a request is, so that one of millions is found with two dozen
// small reads. All numbers are little-endian:
//
//	"MTLIDX1\n" | u64 bytes of text that it covers | u64 entries | u64 frames | u32 CRC-32C of what follows | u32 of the 32 bytes before
//	frames × (u64 offset in the text, u64 offset in the compressed file)
//	entries × (u64 FNV-1a of the id, u64 offset of its line in the text), by hash and offset
//
// Each line has an entry for the router's id and one for the client's. An entry is a hint: whoever follows it compares the
// id of the line that is there.
const (
	IndexSuffix = ".idx"

	indexMagic  = "MTLIDX1\n"
	indexHeader = 40
	pairBytes   = 16
)

// ErrIndex is returned for an index that is damaged or cut off; it is built anew from its file.
var ErrIndex = errors.New("traces: bad index")

// entry says that the line at an offset has an id with this hash.
type entry struct {
	hash   uint64
	offset int64
}

// hashID is FNV-1a of 64 bits: what is in files must not change from process to process.
func hashID(id string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(id) {
		h = (h ^ uint64(id[i])) * 1099511628211
	}
	return h
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendIndex writes an index; it sorts entries.
func appendIndex(dst []byte, covers int64, frames []jsonl.Frame, entries []entry) []byte {
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.offset, b.offset)) })
	at := len(dst)
	dst = append(dst, indexMagic...)
	for _, v := range []int64{covers, int64(len(entries)), int64(len(frames))} {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(v))
	}
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0)
	for _, f := range frames {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(f.Plain))
		dst = binary.LittleEndian.AppendUint64(dst, uint64(f.Packed))
	}
	for _, e := range entries {
		dst = binary.LittleEndian.AppendUint64(dst, e.hash)
		dst = binary.LittleEndian.AppendUint64(dst, uint64(e.offset))
	}
	head := dst[at : at+indexHeader]
	binary.LittleEndian.PutUint32(head[32:], crc32.Checksum(dst[at+indexHeader:], castagnoli))
	binary.LittleEndian.PutUint32(head[36:], crc32.Checksum(head[:36], castagnoli))
	return dst
}

// index is an index that is open for lookups. It keeps only the table of frames in memory.
type index struct {
	r       io.ReaderAt
	covers  int64
	entries int64
	frames  []jsonl.Frame
	from    int64 // of the entries
}

// readIndex checks the header and the length. The checksum of the entries is compared by verify only: a lookup reads a few
// of millions.
func readIndex(r io.ReaderAt, size int64) (*index, error) {
	var head [indexHeader]byte
	if size < indexHeader {
		return nil, fmt.Errorf("%w: %d bytes, want at least %d", ErrIndex, size, indexHeader)
	}
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return nil, fmt.Errorf("read index: %w", err)
	}
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(head[at:]) }
	covers, entries, frames := u64(8), u64(16), u64(24)
	switch {
	case string(head[:8]) != indexMagic:
		return nil, fmt.Errorf("%w: begins with %q, want %q", ErrIndex, head[:8], indexMagic)
	case binary.LittleEndian.Uint32(head[36:]) != crc32.Checksum(head[:36], castagnoli):
		return nil, fmt.Errorf("%w: the header's checksum is wrong", ErrIndex)
	case covers > math.MaxInt64 || entries > math.MaxInt32*8 || frames > math.MaxInt32 || uint64(size) != indexHeader+pairBytes*(entries+frames):
		return nil, fmt.Errorf("%w: %d bytes do not hold %d entries and %d frames", ErrIndex, size, entries, frames)
	}
	x := &index{r: r, covers: int64(covers), entries: int64(entries), from: indexHeader + pairBytes*int64(frames)}
	table := make([]byte, pairBytes*frames)
	if _, err := r.ReadAt(table, indexHeader); err != nil && frames > 0 {
		return nil, fmt.Errorf("read index: %w", err)
	}
	for ; len(table) > 0; table = table[pairBytes:] {
		f := jsonl.Frame{Plain: int64(binary.LittleEndian.Uint64(table)), Packed: int64(binary.LittleEndian.Uint64(table[8:]))}
		if n := len(x.frames); f.Plain < 0 || f.Packed < 0 || (n > 0 && f.Plain <= x.frames[n-1].Plain) {
			return nil, fmt.Errorf("%w: its frames are not in order", ErrIndex)
		}
		x.frames = append(x.frames, f)
	}
	return x, nil
}

// verify compares the checksum of everything after the header.
func (x *index) verify(size int64) error {
	var head [indexHeader]byte
	if _, err := x.r.ReadAt(head[:], 0); err != nil {
		return fmt.Errorf("read index: %w", err)
	}
	sum := crc32.New(castagnoli)
	if _, err := io.Copy(sum, io.NewSectionReader(x.r, indexHeader, size-indexHeader)); err != nil {
		return fmt.Errorf("read index: %w", err)
	}
	if sum.Sum32() != binary.LittleEndian.Uint32(head[32:]) {
		return fmt.Errorf("%w: its checksum is wrong", ErrIndex)
	}
	return nil
}

// find gives the offsets of the lines that may have an id, in their order.
func (x *index) find(id string) ([]int64, error) {
	want := hashID(id)
	var fault error
	read := func(i int64) entry {
		var b [pairBytes]byte
		if _, err := x.r.ReadAt(b[:], x.from+i*pairBytes); err != nil && fault == nil {
			fault = fmt.Errorf("read index: %w", err)
		}
		return entry{binary.LittleEndian.Uint64(b[:]), int64(binary.LittleEndian.Uint64(b[8:]))}
	}
	first := sort.Search(int(x.entries), func(i int) bool { return read(int64(i)).hash >= want })
	var out []int64
	for i := int64(first); i < x.entries && fault == nil; i++ {
		e := read(i)
		if e.hash != want {
			break
		}
		if e.offset >= 0 && e.offset < x.covers && !slices.Contains(out, e.offset) {
			out = append(out, e.offset)
		}
	}
	return out, fault
}

// openIndex opens the index of a file of lines. It fails with ErrIndex or os.ErrNotExist where there is none of use.
func openIndex(path string) (*index, *os.File, error) {
	f, err := os.Open(path + IndexSuffix)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil {
		var x *index
		if x, err = readIndex(f, info.Size()); err == nil {
			return x, f, nil
		}
	}
	f.Close()
	return nil, nil, err
}
