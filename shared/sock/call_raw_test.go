//go:build linux && !race

package sock

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestSmallPiecesAreAcknowledgedTogether counts what a reader's socket sends while it reads pieces one by one.
func TestSmallPiecesAreAcknowledgedTogether(t *testing.T) {
	const pieces = 40
	sent := func(trickles bool) (segments int) {
		c, peer := pair(t, true)
		if trickles {
			c.Trickles()
		}
		before := segmentsOut(t, c)
		for range pieces {
			if _, err := peer.Write(make([]byte, 200)); err != nil {
				t.Fatal(err)
			}
			if err := c.Fill(); err != nil {
				t.Fatal(err)
			}
			c.Discard(len(c.Buffered()))
		}
		return segmentsOut(t, c) - before
	}
	sent(false) // what is new to the system may be acknowledged at once
	each, together := sent(false), sent(true)
	if each < pieces*3/4 {
		t.Skipf("this system acknowledges %d pieces with %d segments anyway", pieces, each)
	}
	if together > pieces*3/4 {
		t.Errorf("%d pieces were acknowledged with %d segments, and with %d when none was to be", pieces, together, each)
	}
}

func segmentsOut(t *testing.T, c *Conn) int {
	t.Helper()
	var info *unix.TCPInfo
	var failed error
	if err := c.Raw().Control(func(fd uintptr) { info, failed = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); err != nil {
		t.Fatal(err)
	}
	if failed != nil {
		t.Skip("no TCP_INFO: " + failed.Error())
	}
	return int(info.Segs_out)
}
