package device

import (
	"fmt"
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/model"
)

// room is how many KV blocks there are: of the layers that see everything, and of those of each window.
type room struct{ blocks, windowBlocks int }

// room is what the options ask for. Windows get so many blocks that they and the other layers hold equally many sequences of a
// whole context: a sequence holds only a part of a window's.
func (o *Options) room(c *model.Config) (room, error) {
	if o.MemoryFraction > 0 {
		return room{}, nil
	}
	element, windows := 4, c.Windows // bytes: KV is float32 but for the normal mode of cuda
	if o.Device == "cuda" {
		windows = nil // it keeps the KV of all layers alike
		if !o.Deterministic {
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
	split := func(blocks int) room {
		return room{blocks, max(int(math.Ceil(float64(blocks)*share)), min(blocks, most))}
	}
	if o.KVBlocks > 0 {
		return split(o.KVBlocks), nil
	}
	size := float64(layer) * (float64(c.Layers-slid) + float64(slid)*share)
	if o.KVMemory == 0 {
		return split(max(int(defaultKVMemory/size), 2*context)), nil
	}
	n := int(float64(o.KVMemory) / size)
	if n < context {
		return room{}, fmt.Errorf("--kv-memory %d: holds %d KV blocks of %.0f bytes; one context of %d tokens needs %d", o.KVMemory, n, size, c.ContextLen, context)
	}
	return split(n), nil
}
