package stamp

import (
	"time"

	"meridian.internal/shared/clock"
)

const (
	// wallSlackNS is what two pairs may differ by beyond their brackets before the wall clock counts as stepped. Both clocks
	// are slewed together, so that real - steady is constant between steps.
	wallSlackNS = 200
	pairMaxAge  = 20 * time.Microsecond
)

// mapper turns the kernel's wall stamps into steady time.
type mapper struct {
	steady *clock.Steady
	pair   wallPair
}

// wallPair is the kernel's monotonic clock next to its wall clock; at is what the steady clock showed then.
type wallPair struct{ mono, wall, half, at int64 }

func (p wallPair) diff() int64 { return p.wall - p.mono }

func newMapper(s *clock.Steady) mapper {
	m := mapper{steady: s}
	m.pair = m.readPair()
	return m
}

func (m *mapper) readPair() wallPair {
	mono, wall, half := m.steady.Wall()
	return wallPair{mono, wall, half, m.steady.FromKernel(mono)}
}

// toSteady maps a wall stamp that is at most a moment old.
func (m *mapper) toSteady(wall, now int64) (ns, half int64, ok bool) {
	if now-m.pair.at > int64(pairMaxAge) || now < m.pair.at {
		if !m.renew() {
			return 0, 0, false
		}
	}
	return m.place(wall)
}

// renew reads a new pair. Not ok: the wall clock was stepped since the last one, perhaps after a stamp that is to be mapped.
func (m *mapper) renew() (ok bool) {
	old := m.pair
	m.pair = m.readPair()
	d, tolerated := m.pair.diff()-old.diff(), m.pair.half+old.half+wallSlackNS
	return d <= tolerated && -d <= tolerated
}

// place maps by the newest pair.
func (m *mapper) place(wall int64) (ns, half int64, ok bool) {
	ns = m.steady.FromKernel(wall - m.pair.diff())
	if ns > m.steady.Now()+m.pair.half {
		return 0, 0, false
	}
	return ns, m.pair.half, true
}
