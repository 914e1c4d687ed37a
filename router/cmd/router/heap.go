package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// relaxedGC is for a live heap of a few MB, with which the collector would run dozens of times a second and be half of
	// the latency in the tail.
	relaxedGC = 400
	usualGC   = 100
	// roomBytes may come on top of what lives before the collector runs, or as much again as lives where that is more.
	roomBytes = 192 << 20
	roomLook  = time.Second
)

// heapRoom has the collector run seldom without letting memory grow to a multiple of what lives, until ctx ends. GOGC of
// the environment wins.
func heapRoom(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"}}
	tick := time.NewTicker(roomLook)
	defer tick.Stop()
	idle := idleHeap{}
	for percent := 0; ; {
		metrics.Read(live)
		if idle.due() {
			debug.FreeOSMemory()
		}
		sum := uint64(0)
		for _, s := range live {
			sum += s.Value.Uint64()
		}
		// Setting it stops the world for a moment: small differences are let be.
		if want := gcPercent(sum); want*10 < percent*9 || want*10 > percent*11 {
			percent = want
			debug.SetGCPercent(percent)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

const (
	// idleBytes allocated in a second are so few that nothing is going on but what idles anyway.
	idleBytes = 2 << 20
	// garbageBytes are worth a collection for their own sake.
	garbageBytes = 8 << 20
)

// idleHeap notices when garbage lies about because nothing is going on: with much room the collector would not come for long.
type idleHeap struct{ last, collected uint64 }

// due looks, once for each tick.
func (h *idleHeap) due() bool {
	total := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(total)
	return h.look(total[0].Value.Uint64())
}

// look takes how much was allocated ever.
func (h *idleHeap) look(allocs uint64) bool {
	quiet := allocs-h.last < idleBytes
	h.last = allocs
	if !quiet || allocs-h.collected < garbageBytes {
		return false
	}
	h.collected = allocs
	return true
}

// gcPercent gives room for roomBytes, within relaxedGC and usualGC.
func gcPercent(live uint64) int {
	return int(min(max(roomBytes*100/max(live, 1), usualGC), relaxedGC))
}
