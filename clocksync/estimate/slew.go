package estimate

import "meridian.internal/clocksync/ntp"

// slews follows raw - steady of both sides.
type slews struct{}

func (s *slews) add(ref, local *ntp.Pair) {}
