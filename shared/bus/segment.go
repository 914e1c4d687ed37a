package bus

import (
	"os"
	"runtime/debug"
)

// segmentFile is a segment that is written. Where that can be, it is mapped into memory, shared: what was copied there survives
// the process as what was written does, and costs no call into the kernel. Behind what was written it is zeros, which are
// no frame.
type segmentFile struct {
	f    *os.File
	path string
	mem  []byte // nil: it is not mapped
}

// createSegment makes a segment; size is what it holds in most cases.
func createSegment(path string, size int64) (*segmentFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	return &segmentFile{f: f, path: path, mem: mapFile(f, size)}, nil
}

// write writes b at an offset, and says how much of it may be there.
func (g *segmentFile) write(b []byte, at int64) (int, error) {
	if at+int64(len(b)) <= int64(len(g.mem)) {
		if copied(g.mem[at:], b) {
			return len(b), nil
		}
		g.unmap() // the disk has failed under it: it may say more of it when asked to write
	}
	return g.f.WriteAt(b, at)
}

// copied copies into mapped memory; false: the memory is not there.
func copied(mem, b []byte) bool { return there(func() { copy(mem, b) }) }

// there tells whether f found the mapped memory that it touches.
func there(f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { ok = recover() == nil }()
	f()
	return true
}

// zero makes the first size bytes zeros again; false: that cannot be, and the segment is closed.
func (g *segmentFile) zero(size int64) bool {
	if size <= int64(len(g.mem)) && there(func() { clear(g.mem[:size]) }) {
		return true
	}
	g.close()
	return false
}

// truncate takes what follows size off; the segment is not mapped any more.
func (g *segmentFile) truncate(size int64) error {
	g.unmap()
	return g.f.Truncate(size)
}

func (g *segmentFile) unmap() {
	if g.mem != nil {
		unmapFile(g.mem)
		g.mem = nil
	}
}

func (g *segmentFile) close() {
	g.unmap()
	g.f.Close()
}

// keptSegments are mapped segments that are not written now. One that is acknowledged is written again under another number: its
// pages are there, where those of a new file cost more than a write. The spool's mutex guards it.
type keptSegments struct {
	behind map[int64]*segmentFile // full ones that are not acknowledged
	spare  []*segmentFile         // acknowledged ones, zeros; their files have old numbers until they are written
}

// maxKept bounds the full ones, and so the spare ones.
const maxKept = 32

// full takes over a segment that is full.
func (k *keptSegments) full(seg int64, g *segmentFile) {
	if g.mem == nil || len(k.behind)+len(k.spare) >= maxKept {
		g.close()
		return
	}
	if k.behind == nil {
		k.behind = map[int64]*segmentFile{}
	}
	k.behind[seg] = g
}

// take gives away a full one; nil: it is not kept.
func (k *keptSegments) take(seg int64) *segmentFile {
	g := k.behind[seg]
	delete(k.behind, seg)
	return g
}

// again makes a spare one the segment of a path; nil: there is none.
func (k *keptSegments) again(path string) *segmentFile {
	n := len(k.spare)
	if n == 0 {
		return nil
	}
	g := k.spare[n-1]
	k.spare = k.spare[:n-1]
	if os.Rename(g.path, path) != nil {
		g.close()
		os.Remove(g.path)
		return nil
	}
	g.path = path
	return g
}

func (k *keptSegments) close() {
	for _, g := range k.behind {
		g.close()
	}
	for _, g := range k.spare {
		g.close()
		os.Remove(g.path)
	}
	*k = keptSegments{}
}
