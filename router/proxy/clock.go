package proxy

import (
	"meridian.internal/clocksync/ntp"
	"meridian.internal/router/pool"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
)

// exchanged makes a clock exchange of a leg whose head has just been read: t1 was read before its first byte was written. A
// header that is none of ours proves nothing.
func (p *Proxy) exchanged(l *pool.Lease, header string, t1 int64) {
	t4 := p.o.Steady.Now()
	if id, t2, t3, err := clock.ParseInband(header); err == nil {
		p.o.Exchange(node.Key(l.Role, l.Name), id, ntp.Exchange{T1: t1, T2: t2, T3: t3, T4: t4})
	}
}
