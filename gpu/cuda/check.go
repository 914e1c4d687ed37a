//go:build cuda

package cuda

import (
	"fmt"

	"meridian.internal/gpu/backend"
)

// check refuses a batch that would touch memory that is not there; nothing of it has run then.
func (d *device) check(b *backend.Batch) error {
	for _, a := range b.Assign {
		if a.Slot < 0 || a.Slot >= len(d.slots) {
			return fmt.Errorf("cuda: step %d assigns slot %d, there are %d", b.Iter, a.Slot, len(d.slots))
		}
		if a.Sampling.TopLogprobs > maxTop {
			return fmt.Errorf("cuda: step %d asks for %d log probabilities of a token, at most %d can be had", b.Iter, a.Sampling.TopLogprobs, maxTop)
		}
	}
	for _, c := range b.Copies {
		if c.Group < 0 || c.Group > len(d.info.Windows) {
			return fmt.Errorf("cuda: step %d copies a KV block of group %d, there are %d", b.Iter, c.Group, 1+len(d.info.Windows))
		}
		if n := d.info.GroupBlocks(c.Group); min(c.From, c.To) < 0 || int(max(c.From, c.To)) >= n {
			return fmt.Errorf("cuda: step %d copies KV block %d to %d, there are %d", b.Iter, c.From, c.To, n)
		}
	}
	rows := 0
	d.step++
	for i := range b.Entries {
		e := &b.Entries[i]
		if err := e.Check(&d.info); err != nil {
			return fmt.Errorf("cuda: step %d, entry %d: %w", b.Iter, i, err)
		}
		if d.checked[e.Slot] == d.step {
			return fmt.Errorf("cuda: step %d, entry %d: slot %d is in another entry too", b.Iter, i, e.Slot)
		}
		d.checked[e.Slot] = d.step
		rows += e.Queries()
	}
	if _, err := backend.HiddenOf[*onCard](b, &d.info, rows); err != nil {
		return fmt.Errorf("cuda: step %d: %w", b.Iter, err)
	}
	return nil
}

// checkRegions refuses regions outside the stage's KV and a buffer that does not have their size.
func checkRegions(i backend.Info, regions []backend.Region, bytes int) error {
	want := 0
	for _, r := range regions {
		if r.LayerFrom < i.Stage.First || r.LayerFrom > r.LayerTo || r.LayerTo > i.Stage.End {
			return fmt.Errorf("cuda: copy of KV layers [%d, %d), the stage has [%d, %d)", r.LayerFrom, r.LayerTo, i.Stage.First, i.Stage.End)
		}
		if r.LayerFrom == r.LayerTo {
			continue
		}
		group, end := i.Run(r.LayerFrom, r.LayerTo)
		switch blocks := i.GroupBlocks(group); {
		case end < r.LayerTo:
			return fmt.Errorf("cuda: copy of KV layers [%d, %d), which have different windows", r.LayerFrom, r.LayerTo)
		case r.Block < 0 || int(r.Block) >= blocks:
			return fmt.Errorf("cuda: copy of KV block %d, there are %d", r.Block, blocks)
		case r.HeadFrom < 0 || r.HeadFrom > r.HeadTo || r.HeadTo > i.KVHeads:
			return fmt.Errorf("cuda: copy of KV heads [%d, %d), there are %d", r.HeadFrom, r.HeadTo, i.KVHeads)
		case r.TokenFrom < 0 || r.TokenFrom > r.TokenTo || r.TokenTo > i.TokensPerBlock:
			return fmt.Errorf("cuda: copy of tokens [%d, %d) of a KV block of %d", r.TokenFrom, r.TokenTo, i.TokensPerBlock)
		}
		want += elements(i, r) * backend.ElementSize(i.KVType)
	}
	if want != bytes {
		return fmt.Errorf("cuda: copy of KV regions of %d bytes with a buffer of %d", want, bytes)
	}
	return nil
}

// elements is the size of a region.
func elements(i backend.Info, r backend.Region) int {
	return (r.LayerTo - r.LayerFrom) * 2 * (r.HeadTo - r.HeadFrom) * (r.TokenTo - r.TokenFrom) * i.HeadSize
}
