package track

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/clock"
)

// BenchmarkPeers is the cost of following many peers, all in this process: probing, estimating and answering. Reported as
// CPU time per burst and as the share of a core that 100 peers take at one burst a second.
func BenchmarkPeers(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			own, other := steady(b, clock.Options{}), steady(b, clock.Options{FaultSkewPPM: 20})
			r, err := respond.Listen("127.0.0.1:0", other, respond.Options{})
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			wg.Go(func() { _ = r.Serve(ctx) })
			var bursts, failed atomic.Int64
			tr := New(Options{Steady: own, OnUpdate: func(u Update) {
				bursts.Add(1)
				if u.Err != nil {
					failed.Add(1)
				}
			}})
			ps := make([]Peer, n)
			for i := range ps {
				ps[i] = Peer{Name: fmt.Sprintf("n%04d", i), ClockAddr: r.Addr().String()}
			}
			tr.SetPeers(ps)
			wg.Go(func() { _ = tr.Run(ctx) })
			for b.Loop() {
				time.Sleep(8 * time.Second) // until the newcomers are through with joining
				c0, n0, t0 := cpu(), bursts.Load(), time.Now()
				time.Sleep(10 * time.Second)
				used, done, took := cpu()-c0, bursts.Load()-n0, time.Since(t0)
				per := float64(used) / float64(done)
				b.ReportMetric(per/1e3, "µs-cpu/burst")
				b.ReportMetric(per/1e9*100*100, "%core/100peers@1Hz")
				b.ReportMetric(float64(done)/took.Seconds()/float64(n), "Hz/peer")
				b.ReportMetric(float64(failed.Load()), "failed")
			}
			cancel()
			wg.Wait()
		})
	}
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
