package bus

import (
	"os"
	"runtime/debug"
)

// segmentFile is a segment that is written. Where that can be, it is mapped into memory, shared: what was copied there survives
// the process as what was written does, and costs no call into the kernel. Behind what was written it is zeros, which are
// no frame.
type segmentFile struct {
	f   *os.File
	mem []byte // nil: it is not mapped
}

// createSegment makes a segment; size is what it holds in most cases.
func createSegment(path string, size int64) (*segmentFile, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	return &segmentFile{f: f, mem: mapFile(f, size)}, nil
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
func copied(mem, b []byte) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { ok = recover() == nil }()
	copy(mem, b)
	return true
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
