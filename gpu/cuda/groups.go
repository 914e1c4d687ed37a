//go:build cuda

package cuda

import "meridian.internal/gpu/backend"

// KV lies in groups of layers: those that see everything, and those of each window. Each group has memory of its own, of so many
// blocks that hold the layers of the group.

// allocKV takes the memory of all groups.
func (d *device) allocKV() error {
	for group := range 1 + len(d.info.Windows) {
		bytes := d.info.BlockBytes(group) * d.info.GroupBlocks(group)
		at, err := d.alloc(bytes)
		if err != nil {
			return err
		}
		d.kv, d.fixed = append(d.kv, at), append(d.fixed, at)
		if err := d.zero(at, bytes); err != nil {
			return err
		}
	}
	return nil
}

// kvBytes is the size of the KV of all groups with so many blocks, and so many of each window.
func kvBytes(i *backend.Info, blocks, windowBlocks int) int {
	n := i.BlockBytes(0) * blocks
	for w := range i.Windows {
		n += i.BlockBytes(w+1) * windowBlocks
	}
	return n
}

// kvOf is the memory of the group of a layer of the stage.
func (d *device) kvOf(i int) address { return d.kv[d.places[i].Group] }

// place is where a layer of the stage is, for kvAt and tableOf of kernels/common.cuh.
func (d *device) place(i int) int {
	p := d.places[i]
	return p.Group<<24 | d.info.GroupLayers(p.Group)<<12 | p.Layer
}

const (
	maxGroups      = 1 << 7  // that a place has room for
	maxGroupLayers = 1 << 12 // likewise
)
