package serve

import (
	"net"
	"net/http"
	"sync/atomic"
)

// DefaultMaxConns bounds the connections of a server: each costs two goroutines and its buffers.
const DefaultMaxConns = 16384

// limit closes connections beyond its maximum at once: a client that is told so can go elsewhere, one that waits in the
// kernel's queue cannot. It is a http.Server's ConnState.
type limit struct {
	max  int64
	open atomic.Int64
}

func (l *limit) state(c net.Conn, s http.ConnState) {
	switch s {
	case http.StateNew:
		if l.open.Add(1) > l.max {
			_ = c.Close() // the server notices, and says StateClosed
		}
	case http.StateClosed, http.StateHijacked:
		l.open.Add(-1)
	}
}
