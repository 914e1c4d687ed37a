package upstream

import (
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/sock"
)

func TestIdleConnectionsAreClosedWithoutFurtherTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(Options{})
		defer c.Close()
		ours, theirs := net.Pipe()
		c.put(&conn{Conn: sock.New(ours), host: &host{target: "http://node:1"}})
		time.Sleep(4 * time.Second)
		if c.Idle() != 1 {
			t.Fatalf("%d idle connections after 4 s, want 1", c.Idle())
		}
		time.Sleep(6 * time.Second) // at the latest one more round of the sweeper
		if c.Idle() != 0 {
			t.Fatalf("%d idle connections after 10 s, want 0", c.Idle())
		}
		if _, err := theirs.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the other side reads %v, want EOF", err)
		}
	})
}
