package cluster

import (
	"fmt"
	"strings"
	"time"

	"meridian.internal/shared/shuttle"
)

// Place is where a node runs, if not beside the others: what its clock shows and how far away it is are known then, and the
// clocks that the cluster measures can be held against it.
type Place struct {
	ClockShift  time.Duration // its steady clock is ahead of this machine's by whole seconds: a time namespace
	There, Back shuttle.Path  // to the node and from it; both zero: no path of its own
	Args        []string      // further options of this node alone
}

// check says what a place asks for in vain.
func (c Config) checkPlaces() error {
	names := map[string]bool{}
	for i := range c.Ctx {
		names[fmt.Sprintf("ctx%d", i)] = true
	}
	for i := range c.Gen {
		names[fmt.Sprintf("gen%d", i)] = true
	}
	for name, p := range c.Places {
		switch {
		case !names[name]:
			return fmt.Errorf("place node %q: there are %d context nodes ctx0… and %d generation nodes gen0…", name, c.Ctx, c.Gen)
		case p.ClockShift%time.Second != 0:
			return fmt.Errorf("place node %s: its clock cannot be shifted by %v, only by whole seconds", name, p.ClockShift)
		case p.There.Delay < 0 || p.Back.Delay < 0:
			return fmt.Errorf("place node %s: a path of %v and %v has a negative delay", name, p.There.Delay, p.Back.Delay)
		}
	}
	return nil
}

// ParsePath reads "1ms/5ms": the delay to the node and the delay back; a third part is the jitter of both.
func ParsePath(s string) (there, back shuttle.Path, err error) {
	parts := strings.Split(s, "/")
	if len(parts) != 2 && len(parts) != 3 {
		return there, back, fmt.Errorf("path %q: want THERE/BACK or THERE/BACK/JITTER, as in 1ms/5ms", s)
	}
	var d [3]time.Duration
	for i, p := range parts {
		if d[i], err = time.ParseDuration(p); err != nil || d[i] < 0 {
			return there, back, fmt.Errorf("path %q: %q is no delay, as in 1ms/5ms", s, p)
		}
	}
	return shuttle.Path{Delay: d[0], Jitter: d[2]}, shuttle.Path{Delay: d[1], Jitter: d[2]}, nil
}
