package service

import (
	"testing"
	"time"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/serve/servetest"
)

// lost is how the clock history goes; what is said before and after it is held against the truth.
func lost(t *testing.T, lose func(c *bus.Conn)) {
	nats := startNATS(t)
	c := connect(t, nats)
	router := startProcess(t, c, node.RoleRouter, "r0", clock.Options{FaultSkewPPM: -30})
	gen := startProcess(t, c, node.RoleGen, "gen-0", clock.Options{FaultSkewPPM: 70})
	svc, stop := startService(t, nats, "old")
	before := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.Seq >= 4 })
	lose(c)
	after := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Seq > before.Seq })
	if !after.Usable() {
		t.Errorf("the daemon that went on says %+v", after)
	}
	covers(t, after.Estimate, router.steady, gen.steady)
	for _, st := range svc.tracker.Statuses() {
		if st.Epochs != 1 || st.Stats.Violations+st.Stats.Steps+st.Stats.Infeasible > 0 {
			t.Errorf("%s: %+v", st.Peer.Name, st)
		}
	}
	for limit := within(t); ; {
		es, err := ReadLog(limit, c, "gen-0", "", time.Minute)
		if err == nil && len(es) > 0 {
			if es[0].Seq < before.Seq { // that one itself is logged after it is published, perhaps after the loss
				t.Errorf("the log still holds %d of before", es[0].Seq)
			}
			break
		}
		if limit.Err() != nil {
			t.Fatalf("nothing is logged: %v", err)
		}
	}
	stop()
	lose(c) // and once more, so that the next daemon finds nothing
	knowsNothing(t, c, nats, router, gen)
}

// knowsNothing starts a daemon without history: it joins, claims nothing before it has measured, and what it claims is true.
func knowsNothing(t *testing.T, c *bus.Conn, nats *bus.Embedded, router, gen *process) {
	t.Helper()
	next, _ := startService(t, nats, "new")
	for limit := within(t); ; {
		ready := 0
		for _, r := range next.Rows() {
			if r.State == clock.Joining && r.OffsetNS != nil && r.Samples == 0 {
				t.Fatalf("an estimate without a measurement: %+v", r)
			}
			if r.State == clock.Synced {
				ready++
			}
		}
		if ready == 3 { // each process against the daemon, and the node against the router
			break
		}
		if limit.Err() != nil {
			t.Fatalf("rows %+v", next.Rows())
		}
		time.Sleep(time.Millisecond)
	}
	for _, st := range next.tracker.Statuses() {
		if st.Stats.Restored != 0 {
			t.Errorf("%s: %d bursts restored from a log that is gone", st.Peer.Name, st.Stats.Restored)
		}
	}
	p := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.By == "new" })
	covers(t, p.Estimate, router.steady, gen.steady)
}

func TestAClockHistoryThatIsPurgedHarmsNobody(t *testing.T) {
	lost(t, func(c *bus.Conn) {
		for _, name := range []string{bus.StreamClockLog, "KV_" + bus.BucketClocks} {
			s, err := c.JetStream().Stream(within(t), name)
			if err == nil {
				err = s.Purge(within(t))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestAClockHistoryThatIsDeletedIsMadeAnew(t *testing.T) {
	lost(t, func(c *bus.Conn) {
		for _, name := range []string{bus.StreamClockLog, "KV_" + bus.BucketClocks} {
			if err := c.JetStream().DeleteStream(within(t), name); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// All of NATS' state is gone, registrations and lease too.
func TestNATSComesBackEmpty(t *testing.T) {
	addr := servetest.Addr(t)
	nats := startNATSAt(t, addr)
	c := connect(t, nats)
	router := startProcess(t, c, node.RoleRouter, "r0", clock.Options{FaultSkewPPM: -30})
	gen := startProcess(t, c, node.RoleGen, "gen-0", clock.Options{FaultSkewPPM: 70})
	svc, _ := startService(t, nats, "old")
	before := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.Seq >= 4 })
	nats.Close()
	c = connect(t, startNATSAt(t, addr))
	after := published(t, c, "r0", "gen-0", func(p clock.Published) bool { return p.Usable() && p.Seq > before.Seq })
	covers(t, after.Estimate, router.steady, gen.steady)
	for _, st := range svc.tracker.Statuses() {
		if st.Epochs != 1 || st.Conflicts > 0 {
			t.Errorf("%s: %+v", st.Peer.Name, st)
		}
	}
}
