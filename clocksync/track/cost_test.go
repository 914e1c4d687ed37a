package track

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/clock"
)

// answerEnv makes the test binary so many responders: what nodes do for their own process is not the follower's cost.
const answerEnv = "MERIDIAN_COST_ANSWER"

func TestMain(m *testing.M) {
	n, err := strconv.Atoi(os.Getenv(answerEnv))
	if err != nil {
		os.Exit(m.Run())
	}
	if err := answer(n); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// answer prints the addresses of n responders and serves until stdin ends. Their clock is 20 ppm fast.
func answer(n int) error {
	s, err := clock.New(clock.Options{FaultSkewPPM: 20})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	for range n {
		r, err := respond.Listen("127.0.0.1:0", s, respond.Options{})
		if err != nil {
			cancel()
			return err
		}
		fmt.Println(r.Addr())
		g.Go(func() error { return r.Serve(ctx) })
	}
	_, _ = bufio.NewReader(os.Stdin).ReadString(0) // until the benchmark ends
	cancel()
	return g.Wait()
}

// answers starts a process that answers for n peers, each at its own address.
func answers(b *testing.B, n int) (addrs []string) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), fmt.Sprintf("%s=%d", answerEnv, n)), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	for lines := bufio.NewScanner(out); len(addrs) < n; {
		if !lines.Scan() {
			b.Fatalf("%d responders of %d, then %v", len(addrs), n, lines.Err())
		}
		addrs = append(addrs, lines.Text())
	}
	return addrs
}

// BenchmarkPeers is what this process pays for following many peers: probing and estimating. Reported as CPU time per burst
// and as the share of a core that 100 peers take at one burst a second.
func BenchmarkPeers(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			own, addrs := steady(b, clock.Options{}), answers(b, n)
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			var bursts, failed atomic.Int64
			tr := New(Options{Steady: own, OnUpdate: func(u Update) {
				bursts.Add(1)
				if u.Err != nil {
					failed.Add(1)
				}
			}})
			ps := make([]Peer, n)
			for i := range ps {
				ps[i] = Peer{Name: fmt.Sprintf("n%04d", i), ClockAddr: addrs[i]}
			}
			tr.SetPeers(ps)
			wg.Go(func() { _ = tr.Run(ctx) })
			for b.Loop() {
				time.Sleep(settle) // until the newcomers are through with joining
				c0, n0, x0, t0 := cpu(), bursts.Load(), exchanges(tr), time.Now()
				time.Sleep(10 * time.Second)
				used, done, took := cpu()-c0, bursts.Load()-n0, time.Since(t0)
				per := float64(used) / float64(done)
				b.ReportMetric(per/1e3, "µs-cpu/burst")
				b.ReportMetric(per/1e9*100*100, "%core/100peers@1Hz")
				b.ReportMetric(float64(exchanges(tr)-x0)/float64(done), "exchanges/burst")
				b.ReportMetric(float64(done)/took.Seconds()/float64(n), "Hz/peer")
				b.ReportMetric(float64(failed.Load()), "failed")
			}
			cancel()
			wg.Wait()
		})
	}
}

// settle is how long 1,000 newcomers take to join beside each other, with bursts of 16.
const settle = 20 * time.Second

func exchanges(t *Tracker) (n int64) {
	for _, s := range t.Statuses() {
		n += s.Stats.Exchanges
	}
	return n
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
