package service

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// A daemon that was stopped, or that waits for NATS, has no say after the time of its entry, before its own loop has noticed.
func TestALeadEndsWithItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLease(nil, "me", slog.New(slog.DiscardHandler))
		if l.held() {
			t.Error("it leads and never was given the lead")
		}
		till := time.Now().Add(leaseTTL)
		l.till.Store(&till)
		l.set(true)
		time.Sleep(leaseTTL - 1)
		if !l.held() {
			t.Error("it does not lead though its time is not over")
		}
		time.Sleep(time.Nanosecond)
		if l.held() {
			t.Error("it leads though its time is over")
		}
	})
}
