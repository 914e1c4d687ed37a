package main

import (
	"fmt"
	"sync/atomic"
	"time"

	"meridian.internal/router/proxy"
)

// clockWait is how long a router that could serve waits for the clocks of its nodes, so that the timelines of its first
// requests are aligned. A clock that stays unknown keeps nobody from being served.
const clockWait = 2 * time.Second

// readiness remembers since when requests could be placed.
type readiness struct{ since atomic.Int64 } // steady ns; 0: they could not yet

// check joins what the proxy says with what is known of the clocks.
func (r *readiness) check(now int64, placeable error, nodes func() []proxy.ClusterNode) error {
	if placeable != nil {
		return placeable
	}
	r.since.CompareAndSwap(0, max(now, 1))
	if now-r.since.Load() >= clockWait.Nanoseconds() {
		return nil
	}
	for _, n := range nodes() {
		if n.State == "ready" && !n.Static && n.Clock != nil && n.Clock.OffsetNS == nil {
			return fmt.Errorf("the clock of %s %s is not known yet: %s", n.Role, n.Name, n.Clock.State)
		}
	}
	return nil
}
