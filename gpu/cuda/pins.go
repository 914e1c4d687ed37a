//go:build cuda

package cuda

import (
	"sync"
	"unsafe"
)

// pins are pieces of the host's memory that the card copies from and to without a detour, for who hands KV over. It is Go's memory: who holds a piece
// when the card is closed keeps it.
type pins struct {
	mu   sync.Mutex // guards what follows
	all  []byte     // registered with the driver; nil: nothing is
	free [][]byte
}

const (
	pinBytes = 1 << 20 // of a piece: a frame of KV
	pinCount = 16      // of four transfers; more get other memory
)

// open registers the memory. Where the system does not let that be, there is none.
func (p *pins) open(c *context) {
	all := make([]byte, pinBytes*pinCount)
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
