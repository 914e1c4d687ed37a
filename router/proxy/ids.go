package proxy

import (
	"encoding/hex"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"sync/atomic"

	"meridian.internal/shared/clock"
)

const (
	firstGlobalID = 1 << 40
	idSpan        = 1<<63 - 1 - firstGlobalID
	maxClientID   = 128
)

// minter makes disagg_request_ids in TensorRT-LLM's layout: 39 bits of monotonic milliseconds, 8 of the router, 6 of the
// process, 10 of a counter, moved into [2^40, 2^63). More than 1,024 ids in a millisecond run ahead of the clock instead
// of repeating.
type minter struct {
	steady *clock.Steady
	place  uint64        // router and process, 14 bits
	last   atomic.Uint64 // milliseconds and counter
}

func newMinter(name string, steady *clock.Steady) *minter {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name + "/" + string(steady.ID()))) // the instance in the id tells routers of one name apart
	return &minter{steady: steady, place: uint64(h.Sum32()&0xff)<<6 | uint64(os.Getpid()&0x3f)}
}

func (m *minter) next() int64 {
	now := uint64(m.steady.Now()/1e6) & (1<<39 - 1) << 10
	for {
		last := m.last.Load()
		v := max(now, last+1)
		if m.last.CompareAndSwap(last, v) {
			id := v>>10<<24 | m.place<<10 | v&0x3ff
			return int64(id&(1<<63-1)%idSpan) + firstGlobalID
		}
	}
}

// mintRequestID makes the router's own request id.
func mintRequestID() string {
	var b [12]byte
	for i, r := 0, rand.Uint64(); i < 8; i++ {
		b[i] = byte(r >> (8 * i))
	}
	for i, r := 0, rand.Uint32(); i < 4; i++ {
		b[8+i] = byte(r >> (8 * i))
	}
	id := [4 + 2*len(b)]byte{'r', 'e', 'q', '-'}
	hex.Encode(id[4:], b[:])
	return string(id[:])
}

// mintSeed makes a seed for a request that has none; 53 bits, so that every JSON reader keeps it.
func mintSeed() uint64 { return rand.Uint64() >> 11 }

// validID tells whether a client's request id is safe to log, to store and to send on.
func validID(s string) bool {
	if s == "" || len(s) > maxClientID {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case c == '-' || c == '_' || c == '.' || c == ':' || c == '/' || c == '+' || c == '=' || c == '@':
		default:
			return false
		}
	}
	return true
}

// validTraceparent checks the shape of W3C's header: version, trace id, parent id, flags.
func validTraceparent(s string) bool {
	if len(s) != 55 || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
