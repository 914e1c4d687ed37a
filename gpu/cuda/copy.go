//go:build cuda

package cuda

import (
	"encoding/binary"

	"meridian.internal/gpu/backend"
)

// copier moves KV between the card and the host on a stream of its own: a kernel packs regions, or takes them apart, in
// a buffer of the card; pinned memory lies between that and the caller's. One goroutine owns it.
type copier struct {
	*launcher
	info   backend.Info
	kv     []address       // by group of layers
	places []backend.Place // of the layers of the stage
	packed buffer
	list   buffer
	stage  pinned // packed data
	desc   pinned // regions and their places
}

// copyStage is how much is packed at a time, at least one region.
const copyStage = 16 << 20

func newCopier(c *context, d *device) (*copier, error) {
	s, err := c.newStream()
	if err != nil {
		return nil, err
	}
	return &copier{launcher: newLauncher(s, d.kernels), info: d.info, kv: d.kv, places: d.places}, nil
}

// run does one job: out of the card into buf, or from buf into the card.
func (c *copier) run(regions []backend.Region, buf []byte, out bool) error {
	if err := checkRegions(c.info, regions, len(buf)); err != nil {
		return err
	}
	for len(regions) > 0 {
		n, bytes := 0, 0
		for n < len(regions) {
			size := elements(c.info, regions[n]) * backend.ElementSize(c.info.KVType)
			if n > 0 && bytes+size > copyStage {
				break
			}
			bytes, n = bytes+size, n+1
		}
		if bytes > 0 {
			if err := c.part(regions[:n], buf[:bytes], out); err != nil {
				return err
			}
		}
		regions, buf = regions[n:], buf[bytes:]
	}
	return nil
}

// part moves as many regions as one stage holds.
func (c *copier) part(regions []backend.Region, buf []byte, out bool) error {
	n := len(regions)
	if err := c.describe(regions, len(buf)); err != nil {
		return err
	}
	if !out {
		copy(c.stage.bytes(), buf)
		if err := c.upload(c.packed.at, c.stage.at, len(buf)); err != nil {
			return err
		}
	}
	flag := 0
	if out {
		flag = 1
	}
	c.launch("moveKV", grid{x: n, y: 16, threads: 256}, uint64(c.packed.at), uint64(c.list.at), uint64(c.list.at)+uint64(32*n), number(flag))
	if err := c.taken(); err != nil {
		return err
	}
	if out {
		if err := c.download(c.stage.at, c.packed.at, len(buf)); err != nil {
			return err
		}
	}
	if err := c.wait(); err != nil {
		return err
	}
	if out {
		copy(buf, c.stage.bytes())
	}
	return nil
}

// describe sends the list of regions, 8 numbers each, and then the places of their first elements and of their groups' memory.
func (c *copier) describe(regions []backend.Region, bytes int) error {
	n := len(regions)
	_, err := c.grow(&c.packed, max(bytes, copyStage))
	if err := firstOf(err, c.growPinned(&c.stage, max(bytes, copyStage)), c.growPinned(&c.desc, max(48*n, 1<<16))); err != nil {
		return err
	}
	if _, err := c.grow(&c.list, max(48*n, 1<<16)); err != nil {
		return err
	}
	d, at := c.desc.bytes(), 0
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
	return c.upload(c.list.at, c.desc.at, 48*n)
}

func (c *copier) close() error {
	return firstOf(c.free(c.packed.at), c.free(c.list.at), c.freePinned(&c.stage), c.freePinned(&c.desc), c.do("cuStreamDestroy_v2", c.handle))
}
