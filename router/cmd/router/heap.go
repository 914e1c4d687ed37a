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
	roomBytes = 96 << 20
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
	for percent := 0; ; {
		metrics.Read(live)
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

// gcPercent gives room for roomBytes, within relaxedGC and usualGC.
func gcPercent(live uint64) int {
	return int(min(max(roomBytes*100/max(live, 1), usualGC), relaxedGC))
}
