package main

import "testing"

func TestTheHeapHasRoomButNotAMultiple(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		live uint64
		want int
	}{{0, 400}, {10 * mib, 400}, {48 * mib, 400}, {96 * mib, 200}, {192 * mib, 100}, {1 << 40, 100}} {
		if got := gcPercent(c.live); got != c.want {
			t.Errorf("with %d bytes alive: %d %%, want %d %%", c.live, got, c.want)
		}
	}
}

func TestGarbageIsCollectedOnceNothingGoesOn(t *testing.T) {
	const mib = 1 << 20
	h := idleHeap{}
	for i, c := range []struct {
		allocs uint64
		due    bool
	}{{50 * mib, false}, {51 * mib, true}, {52 * mib, false}, {200 * mib, false}, {300 * mib, false}, {300 * mib, true}, {300 * mib, false}} {
		if got := h.look(c.allocs); got != c.due {
			t.Errorf("look %d at %d bytes: %t", i, c.allocs, got)
		}
	}
}
