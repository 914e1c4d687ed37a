package prefix

import (
	"slices"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

// stream is how far a node's events have been taken in. Events are numbered 1, 2, 3 … within an epoch, which begins with
// an empty cache; so a gap is seen, and closed by a snapshot, which says after which event it was taken.
type stream struct {
	epoch   int64
	seq     int64 // of the last event that was taken in
	synced  bool  // false: a snapshot is needed
	leaving bool
	emptied int             // times that its part of the index was emptied
	waiting []kvevent.Event // came while a snapshot was needed; bounded by maxWaiting
}

// maxWaiting events are kept until a snapshot comes; with more the snapshot will be found too old, and another is needed.
const maxWaiting = 1 << 14

// Apply takes events in. It returns false when a snapshot of the node is needed to go on.
func (x *Index) Apply(s Slot, events []kvevent.Event) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.node(s)
	if h == nil || h.leaving {
		return true
	}
	for i := range events {
		x.take(s, h, &events[i])
	}
	return h.synced
}

func (x *Index) take(s Slot, h *holdings, ev *kvevent.Event) {
	switch {
	case h.epoch != ev.Epoch && ev.Seq == 1: // the cache begins empty
		x.empty(s, h)
		h.epoch, h.synced, h.waiting = ev.Epoch, true, nil
	case !h.synced:
		if len(h.waiting) < maxWaiting {
			h.waiting = append(h.waiting, *ev)
		}
		return
	case h.epoch == ev.Epoch && ev.Seq <= h.seq:
		return // told twice
	case h.epoch != ev.Epoch || ev.Seq != h.seq+1:
		if h.epoch != ev.Epoch {
			x.empty(s, h)
		}
		x.gaps++
		h.synced = false
		h.waiting = append(h.waiting[:0], *ev)
		return
	}
	h.seq = ev.Seq
	for i := range ev.Blocks {
		x.add(s, h, ev.Blocks[i].Hash)
	}
	for _, hash := range ev.Removed {
		x.drop(s, h, hash)
	}
}

func (x *Index) empty(s Slot, h *holdings) {
	for hash := range h.blocks {
		x.drop(s, h, hash)
	}
	h.seq = 0
	h.emptied++
}

// Heard compares with the newest event that a node says to have sent. It returns false when a snapshot is needed: events
// were lost, and nothing came after them.
func (x *Index) Heard(s Slot, epoch, seq int64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.node(s)
	if h == nil || h.leaving {
		return true
	}
	if !h.synced && seq == 0 { // nothing was ever stored: there is nothing to fetch
		x.empty(s, h)
		h.epoch, h.synced, h.waiting = epoch, true, nil
	}
	if h.synced && (h.epoch != epoch || h.seq < seq) {
		x.gaps++
		h.synced = false
	}
	return h.synced
}

// Reset replaces what is known of a node by a snapshot, and takes in what came after it. It returns false when events
// between the two are missing: another snapshot is needed. One goroutine at a time resets a node.
func (x *Index) Reset(s Slot, snap kvevent.Snapshot) bool {
	gone, emptied := x.differ(s, snap)
	for part := range slices.Chunk(gone, step) {
		x.change(s, part, x.drop)
	}
	for part := range slices.Chunk(snap.Blocks, step) {
		x.change(s, part, x.add)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.node(s)
	if h == nil || h.leaving {
		return true
	}
	if h.emptied != emptied { // a new epoch began meanwhile: the snapshot is of the old one
		x.empty(s, h)
		h.synced = false
		return false
	}
	waiting := h.waiting
	h.stream = stream{epoch: snap.Epoch, seq: snap.Seq, synced: true, emptied: emptied}
	for i := range waiting {
		if waiting[i].Epoch == snap.Epoch || waiting[i].Seq == 1 {
			x.take(s, h, &waiting[i])
		}
	}
	return h.synced
}

// differ lists the blocks that the index has and the snapshot has not.
func (x *Index) differ(s Slot, snap kvevent.Snapshot) (gone []blockhash.Hash, emptied int) {
	keep := make(map[blockhash.Hash]struct{}, len(snap.Blocks))
	for _, hash := range snap.Blocks {
		keep[hash] = struct{}{}
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	h := x.node(s)
	if h == nil {
		return nil, 0
	}
	for hash := range h.blocks {
		if _, stays := keep[hash]; !stays {
			gone = append(gone, hash)
		}
	}
	return gone, h.emptied
}

// change makes a few changes under one lock.
func (x *Index) change(s Slot, part []blockhash.Hash, f func(Slot, *holdings, blockhash.Hash)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	h := x.node(s)
	if h == nil || h.leaving {
		return
	}
	for _, hash := range part {
		f(s, h, hash)
	}
}
