package device

import (
	"fmt"
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/model"
)

// room is how many KV blocks there are.
type room struct {
	blocks  int                  // of the layers that see everything; 0: as many as --gpu-memory-fraction leaves
	windows func(blocks int) int // of the layers of each window, beside so many of the others
	bytes   float64              // of a rank's blocks; 0 where blocks is
}

// room is what the options ask for. Windows get so many blocks that they and the other layers hold equally many sequences of a
// whole context: a sequence holds only a part of a window's.
func (o *Options) room(c *model.Config) (room, error) {
	element, windows := 4, c.Windows // bytes: KV is float32 but for the normal mode of cuda
	if o.Device == "cuda" {
		if o.PP > 1 {
			windows = nil // its stages keep the KV of all layers alike
		}
		switch {
		case o.KVType == fp8:
			element = 1
		case !o.Deterministic:
			element = 2
		}
	}
	ahead := o.MaxNumTokens
	if o.Overlap {
		ahead *= 2
	}
	context := (c.ContextLen + o.TokensPerBlock - 1) / o.TokensPerBlock
	layer := o.TokensPerBlock * 2 * c.KVHeads * c.HeadSize * element // bytes of a block of one layer
	groups := backend.WindowsOf(windows, backend.Stage{End: c.Layers}, c.ContextLen, 0)
	most, slid := 0, 0 // the most blocks of a window that a sequence holds; layers with a window
	for _, w := range groups {
		most = max(most, kv.MostHeld(w.Tokens, ahead, o.TokensPerBlock, c.ContextLen))
		slid += len(w.Layers)
	}
	share := float64(most) / float64(context)
	split := func(blocks int) int { return max(int(math.Ceil(float64(blocks)*share)), min(blocks, most)) }
	with := func(blocks int) room {
		return room{blocks, split, float64(layer) * (float64(c.Layers-slid)*float64(blocks) + float64(slid)*float64(split(blocks)))}
	}
	if o.KVBlocks > 0 || o.MemoryFraction > 0 {
		return with(o.KVBlocks), nil
	}
	size := float64(layer) * (float64(c.Layers-slid) + float64(slid)*share)
	if o.KVMemory == 0 {
		return with(max(int(defaultKVMemory/size), 2*context)), nil
	}
	n := int(float64(o.KVMemory) / size)
	if n < context {
		return room{}, fmt.Errorf("--kv-memory %d: holds %d KV blocks of %.0f bytes; one context of %d tokens needs %d", o.KVMemory, n, size, c.ContextLen, context)
	}
	return with(n), nil
}

// checkHost refuses what a rank would keep in the host's memory if the machine has less: the allocation would end the process.
func (o *Options) checkHost(r room, machine float64) error {
	kept := float64(o.KVHostMemory)
	if o.Device != "cuda" {
		kept += r.bytes
	}
	if machine == 0 || kept <= machine {
		return nil
	}
	return fmt.Errorf("--kv-blocks %d, --kv-memory %d, --kv-host-memory %d: a rank would keep %.1f GiB of KV in a machine of %.1f GiB",
		o.KVBlocks, o.KVMemory, o.KVHostMemory, kept/(1<<30), machine/(1<<30))
}
