// Package ntptest answers clock requests as a test wants them answered.
package ntptest

import (
	"net"
	"testing"

	"meridian.internal/clocksync/ntp"
)

// Answerer answers the n-th request with what it is told to, until the test ends; it has no clock.
func Answerer(t *testing.T, answer func(n int, q ntp.Packet) ntp.Packet) (addr string) {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	go func() {
		defer close(done)
		var b [ntp.Size + 1]byte
		for n := 0; ; n++ {
			k, from, err := c.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			if q, err := ntp.ParsePacket(b[:k], nil); err == nil {
				_, _ = c.WriteToUDPAddrPort(answer(n, q).Append(nil, nil), from)
			}
		}
	}()
	return c.LocalAddr().String()
}
