package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

const (
	randomEnds  = 600 // requests in make test; MERIDIAN_RANDOM_ENDS for more
	endsAtATime = 48
	killEvery   = 150 // requests
)

// TestRandomEndsLeaveNothingBehind: clients that leave at any moment, deadlines that are too short and nodes that are killed;
// when all is quiet every reservation, KV block, goroutine and connection is back, and each request had one outcome.
func TestRandomEndsLeaveNothingBehind(t *testing.T) {
	n := number(t, "MERIDIAN_RANDOM_ENDS", randomEnds)
	seed := uint64(number(t, "MERIDIAN_RANDOM_SEED", 1))
	r := start(t, cluster.Config{Ctx: 2, Gen: 2, NoClocksync: true, NodeArgs: []string{"--sim-step=1ms", "--sim-prefill-token=20us", "--sim-shallow"}})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute+time.Duration(n)*50*time.Millisecond)
	defer cancel()
	r.ctx = ctx
	r.soak(t, "warm", 2*endsAtATime)
	r.idle(t)
	before, countedBefore := r.held(t), r.outcomes(t)
	var next, left, failed, finished atomic.Int64
	var all sync.WaitGroup
	for w := range endsAtATime {
		draw := rand.New(rand.NewPCG(seed, uint64(w)))
		all.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || ctx.Err() != nil {
					return
				}
				switch err := r.endAtRandom(draw, i); {
				case err == nil:
					finished.Add(1)
				case errors.Is(err, context.Canceled):
					left.Add(1)
				default:
					failed.Add(1)
					t.Logf("request end-%d failed: %v", i, err)
				}
			}
		})
	}
	kills := r.killNodes(t, rand.New(rand.NewPCG(seed, 1000)), &next, n)
	all.Wait()
	r.client.Close()
	t.Logf("seed %d: %d finished, %d clients left, %d failed, %d kills", seed, finished.Load(), left.Load(), failed.Load(), kills)
	if err := r.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	r.idle(t)
	var grown string
	r.poll(t, patience, "not everything is back", func() bool {
		grown = grownSince(before, r.held(t))
		return grown == "" || ctx.Err() != nil
	})
	// A client may leave before its request is read; every other has one outcome.
	answered := int(finished.Load() + failed.Load())
	if counted := r.outcomes(t) - countedBefore; counted < answered || counted > n {
		t.Errorf("%d outcomes were counted for %d requests, of which %d were answered", counted, n, answered)
	}
	r.ok(t, "after")
}

// endAtRandom sends a request that may end as it should, or by a client that leaves, or by its deadline.
func (r *rig) endAtRandom(draw *rand.Rand, i int) error {
	ctx, leave := context.WithCancel(r.ctx)
	defer leave()
	f := fields(5+draw.IntN(200), 1+draw.IntN(60))
	req := client.Request{ID: fmt.Sprintf("end-%d", i), Fields: f}
	switch draw.IntN(5) {
	case 0: // at any time
		time.AfterFunc(time.Millisecond+time.Duration(draw.IntN(60))*time.Millisecond, leave)
	case 1: // in the stream
		after := draw.IntN(20)
		req.OnText = func(string) {
			if after--; after < 0 {
				leave()
			}
		}
	case 2:
		f["stream"] = false
		delete(f, "stream_options")
		if draw.IntN(2) == 0 {
			time.AfterFunc(time.Millisecond+time.Duration(draw.IntN(60))*time.Millisecond, leave)
		}
	case 3:
		f["n"] = 1 + draw.IntN(3)
	}
	_, err := r.client.Do(ctx, req)
	return err
}

// killNodes kills a node now and then and starts it again, until the requests are over. It returns how many it killed.
func (r *rig) killNodes(t *testing.T, draw *rand.Rand, sent *atomic.Int64, n int) (kills int) {
	for at := killEvery; at < n; at += killEvery {
		r.poll(t, time.Until(deadline(r.ctx)), "the load does not go on", func() bool { return int(sent.Load()) >= at })
		victim := r.Nodes[draw.IntN(len(r.Nodes))]
		if err := victim.Signal(syscall.SIGKILL); err != nil {
			t.Error(err)
		}
		ended(t, victim)
		kills++
		if err := r.Restart(r.ctx, victim); err != nil {
			t.Error(err)
			return kills
		}
	}
	return kills
}

func deadline(ctx context.Context) time.Time {
	at, _ := ctx.Deadline()
	return at
}

// held is what the processes hold, by name: goroutines and descriptors of each, and the router's own counts.
func (r *rig) held(t *testing.T) map[string]int {
	t.Helper()
	out := map[string]int{}
	for _, p := range r.All() {
		if !p.Running() {
			continue
		}
		for line := range strings.Lines(r.metrics(t, p)) {
			name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok || !counts(name) {
				continue
			}
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatalf("%s: %q", p.Name, line)
			}
			out[p.Name+" "+name] = int(v)
		}
		if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID())); err == nil {
			out[p.Name+" descriptors"] = len(fds)
		}
	}
	return out
}

func counts(name string) bool {
	for _, prefix := range []string{"go_goroutines", "meridian_router_requests_running", "meridian_router_admission{", "meridian_router_reserved_legs{"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// endsGrowth bounds goroutines and descriptors more than before: kept connections differ by a few.
const endsGrowth = 40

// grownSince says what is held more than before; the router's own counts must be 0.
func grownSince(before, now map[string]int) string {
	grown := ""
	for name, n := range now {
		allowed := before[name] + endsGrowth
		if strings.Contains(name, "meridian_") {
			allowed = 0
		}
		if n > allowed {
			grown += fmt.Sprintf("%s: %d, was %d; ", name, n, before[name])
		}
	}
	return grown
}

// outcomes sums the router's counts of ended requests.
func (r *rig) outcomes(t *testing.T) int {
	t.Helper()
	sum := 0
	for line := range strings.Lines(r.metrics(t, r.Routers[0])) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.HasPrefix(name, "meridian_router_requests_total{") {
			v, err := strconv.Atoi(value)
			if err != nil {
				t.Fatalf("%q", line)
			}
			sum += v
		}
	}
	return sum
}
