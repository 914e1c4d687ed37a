//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"unsafe"

	"meridian.internal/gpu/backend"
)

// copier moves KV between the card and the host on a stream of its own. Large regions in one piece are copied from and to where they lie; others
// a kernel packs in a buffer of the card, or takes apart. Pinned memory of the caller's is copied from and to as it is; other memory goes
// through two stages in turn, of which one is filled or emptied while the other is on its way. One goroutine owns it.
type copier struct {
	*launcher
	info   backend.Info
	kv     []address       // by group of layers
	places []backend.Place // of the layers of the stage
	pins   *pins
	packed buffer
	list   buffer
	turns  [2]turn
}

// turn is a part of a copy on its way.
type turn struct {
	stage
	desc pinned // regions and their places
	to   []byte // of the caller, for which the stage is; nil: there is nothing in it
}

// stage is a pinned buffer; free comes to pass when what went through it last is where it belongs.
type stage struct {
	pinned
	free event
}

// freeStage frees what a stage holds; nothing is on its way through it.
func (c *context) freeStage(s *stage) error {
	err := c.freePinned(&s.pinned)
	if s.free != 0 {
		err = firstOf(err, c.do("cuEventDestroy_v2", uintptr(s.free)))
	}
	return err
}

const (
	copyStage   = 4 << 20   // bytes of a part, at least one region
	leastDirect = 16 << 10  // bytes of a region that is worth a copy of its own
	copyHands   = 4         // goroutines between a stage and the caller's memory: one is slower than the link to the card
	leastCopied = 256 << 10 // bytes that are worth a goroutine
)

func newCopier(c *context, d *device, p *pins) (*copier, error) {
	s, err := c.newStream()
	if err != nil {
		return nil, err
	}
	k := &copier{launcher: newLauncher(s, d.kernels), info: d.info, kv: d.kv, places: d.places, pins: p}
	for i := range k.turns {
		if k.turns[i].free, err = c.newEvent(); err != nil {
			return nil, errors.Join(err, k.close())
		}
	}
	return k, nil
}

// run does one job: out of the card into buf, or from buf into the card.
func (c *copier) run(regions []backend.Region, buf []byte, out bool) error {
	if err := checkRegions(c.info, regions, len(buf)); err != nil {
		return err
	}
	err := c.move(regions, buf, out)
	for i := range c.turns {
		c.turns[i].to = nil // after an error
	}
	return firstOf(err, c.wait())
}

func (c *copier) move(regions []backend.Region, buf []byte, out bool) error {
	i := 0
	for ; len(regions) > 0; i++ {
		n, bytes := 0, 0
		for n < len(regions) {
			size := elements(c.info, regions[n]) * backend.ElementSize(c.info.KVType)
			if n > 0 && bytes+size > copyStage {
				break
			}
			bytes, n = bytes+size, n+1
		}
		if bytes > 0 {
			if err := c.part(&c.turns[i%2], regions[:n], buf[:bytes], out); err != nil {
				return err
			}
		}
		regions, buf = regions[n:], buf[bytes:]
	}
	return firstOf(c.settle(&c.turns[i%2]), c.settle(&c.turns[(i+1)%2]))
}

// settle waits for what a turn had on its way, and brings it to where it belongs.
func (c *copier) settle(t *turn) error {
	if err := c.waitEvent(t.free); err != nil { // at once, if it was never queued
		return err
	}
	if t.to != nil {
		spread(t.to, t.bytes())
		t.to = nil
	}
	return nil
}

// part queues as many regions as one stage holds.
func (c *copier) part(t *turn, regions []backend.Region, buf []byte, out bool) error {
	if err := c.settle(t); err != nil {
		return err
	}
	at := uintptr(unsafe.Pointer(&buf[0]))
	if !c.pins.hold(buf) {
		if err := c.growPinned(&t.pinned, max(len(buf), copyStage)); err != nil {
			return err
		}
		if at = t.at; out {
			t.to = buf
		} else {
			spread(t.bytes(), buf)
		}
	}
	queue := c.pack
	if c.direct(regions, len(buf)) {
		queue = c.each
	}
	return firstOf(queue(t, regions, at, len(buf), out), c.record(t.free))
}

// direct tells whether regions are large and in one piece each.
func (c *copier) direct(regions []backend.Region, bytes int) bool {
	i := &c.info
	return bytes >= leastDirect*len(regions) && !slices.ContainsFunc(regions, func(r backend.Region) bool {
		return r.HeadFrom > 0 || r.HeadTo < i.KVHeads || r.TokenFrom > 0 || r.TokenTo < i.TokensPerBlock
	})
}

// each queues a copy for each region.
func (c *copier) each(_ *turn, regions []backend.Region, at uintptr, _ int, out bool) error {
	i, size := &c.info, backend.ElementSize(c.info.KVType)
	layer := size * 2 * i.TokensPerBlock * i.KVHeads * i.HeadSize
	for _, r := range regions {
		if r.LayerFrom == r.LayerTo {
			continue
		}
		p, n := c.places[r.LayerFrom-i.Stage.First], size*elements(c.info, r)
		kv := c.kv[p.Group] + address((int(r.Block)*i.GroupLayers(p.Group)+p.Layer)*layer)
		var err error
		if out {
			err = c.download(at, kv, n)
		} else {
			err = c.upload(kv, at, n)
		}
		if err != nil {
			return err
		}
		at += uintptr(n)
	}
	return nil
}

// pack queues the copy of all regions in one piece, and the kernel before or after it.
func (c *copier) pack(t *turn, regions []backend.Region, at uintptr, bytes int, out bool) error {
	n := len(regions)
	if err := c.describe(t, regions, bytes); err != nil {
		return err
	}
	if !out {
		if err := c.upload(c.packed.at, at, bytes); err != nil {
			return err
		}
	}
	c.launch("moveKV", grid{x: n, y: 16, threads: 256}, uint64(c.packed.at), uint64(c.list.at), uint64(c.list.at)+uint64(32*n), flag(out))
	if err := c.taken(); err != nil || !out {
		return err
	}
	return c.download(at, c.packed.at, bytes)
}

// spread copies with a few goroutines what is worth it.
func spread(dst, src []byte) {
	n := min(len(dst), len(src))
	inParts(n, min(copyHands, 1+n/leastCopied), func(from, to int) { copy(dst[from:to], src[from:to]) })
}

// inParts runs f on parts of [0, n), beside each other.
func inParts(n, parts int, f func(from, to int)) {
	var others sync.WaitGroup
	for i := 1; i < parts; i++ {
		others.Go(func() { f(n*i/parts, n*(i+1)/parts) })
	}
	f(0, n/parts)
	others.Wait()
}

// describe sends the list of regions, 8 numbers each, and then the places of their first elements and of their groups' memory.
func (c *copier) describe(t *turn, regions []backend.Region, bytes int) error {
	n := len(regions)
	if bytes > c.packed.size || 48*n > c.list.size {
		if err := c.wait(); err != nil { // the other turn may be on its way through them
			return err
		}
	}
	_, err := c.grow(&c.packed, max(bytes, copyStage))
	_, err2 := c.grow(&c.list, max(48*n, 1<<16))
	if err := firstOf(err, err2, c.growPinned(&t.desc, max(48*n, 1<<16))); err != nil {
		return err
	}
	d, at := t.desc.bytes(), 0
	for i, r := range regions {
		var p backend.Place // of an empty region: any
		if r.LayerFrom < r.LayerTo {
			p = c.places[r.LayerFrom-c.info.Stage.First]
		}
		end := p.Layer + r.LayerTo - r.LayerFrom // a region's layers are of one group, one behind the other
		for j, v := range []int{int(r.Block), p.Layer, end, r.HeadFrom, r.HeadTo, r.TokenFrom, r.TokenTo, c.info.GroupLayers(p.Group)} {
			binary.LittleEndian.PutUint32(d[32*i+4*j:], uint32(v))
		}
		binary.LittleEndian.PutUint64(d[32*n+16*i:], uint64(at))
		binary.LittleEndian.PutUint64(d[32*n+16*i+8:], uint64(c.kv[p.Group]))
		at += elements(c.info, r)
	}
	return c.upload(c.list.at, t.desc.at, 48*n)
}

func (c *copier) close() error {
	err := firstOf(c.free(c.packed.at), c.free(c.list.at))
	for i := range c.turns {
		t := &c.turns[i]
		err = firstOf(err, c.freeStage(&t.stage), c.freePinned(&t.desc))
	}
	return firstOf(err, c.do("cuStreamDestroy_v2", c.handle))
}
