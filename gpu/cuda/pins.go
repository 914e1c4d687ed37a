//go:build cuda

package cuda

import (
	"sync"
	"syscall"
	"unsafe"
)

// pins are pieces of the host's memory that the card copies from and to without a detour: first for the weights, then for who hands KV over. It is Go's
// memory: who holds a piece when the card is closed keeps it.
type pins struct {
	mu   sync.Mutex // guards what follows
	all  []byte     // registered with the driver; nil: nothing is
	free [][]byte
}

const (
	pinBytes = 1 << 20 // of a piece: a frame of KV
	pinCount = 64      // of sixteen transfers; more get other memory. With fewer, pieces of weights do not fill the link
	hugePage = 2 << 20 // of the system; large pages are pinned sooner
)

// open registers the memory. Where the system does not let that be, there is none.
func (p *pins) open(c *context) {
	all := make([]byte, pinBytes*pinCount+hugePage)
	all = all[-uintptr(unsafe.Pointer(&all[0]))%hugePage:][:pinBytes*pinCount]
	_ = syscall.Madvise(all, syscall.MADV_HUGEPAGE)
	inParts(len(all), len(all)/hugePage, func(from, to int) { clear(all[from:to]) }) // the driver would get one page after the other
	if c.register(all) == nil {
		p.use(all)
	}
}

func (p *pins) use(all []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = all
	for ; len(all) >= pinBytes; all = all[pinBytes:] {
		p.free = append(p.free, all[:pinBytes:pinBytes])
	}
}

// whole is all the memory, for as long as nobody else takes a piece; nil: none is registered.
func (p *pins) whole() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all
}

// close makes ordinary memory of all; no copy is on its way any more.
func (p *pins) close(c *context) error {
	p.mu.Lock()
	all := p.all
	p.all, p.free = nil, nil
	p.mu.Unlock()
	if all == nil {
		return nil
	}
	return c.unregister(all)
}

// Take implements kvwire.Buffers. When no piece is left, or it is too small, it gives other memory.
func (p *pins) Take(n int) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.free) - 1
	if last < 0 || n > pinBytes {
		return make([]byte, n)
	}
	b := p.free[last]
	p.free = p.free[:last]
	return b[:n]
}

// Give implements kvwire.Buffers.
func (p *pins) Give(b []byte) {
	if p.hold(b) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.free = append(p.free, b[:pinBytes])
	}
}

// hold tells whether b lies in the memory.
func (p *pins) hold(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first, at := uintptr(unsafe.Pointer(unsafe.SliceData(p.all))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return first <= at && at+uintptr(cap(b)) <= first+uintptr(len(p.all)) && len(p.all) > 0
}
