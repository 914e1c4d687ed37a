package service

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"testing"

	"meridian.internal/shared/clock"
)

// What comes while a node takes a push follows as soon as that is over, not with the next estimate.
func TestAnOffsetThatComesDuringAPushFollowsIt(t *testing.T) {
	bodies, answer := make(chan clock.Push), make(chan struct{})
	node := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var b clock.Push
		if err := json.NewDecoder(r.Body).Decode(&b); err != nil {
			t.Error(err)
		}
		bodies <- b
		<-answer
	}))
	defer node.Close()
	p := newPusher(slog.New(slog.DiscardHandler), nil)
	p.client.Timeout = 0 // the test takes its time
	limit, stop := context.WithCancel(within(t))
	var running sync.WaitGroup
	running.Go(func() { _ = p.run(limit) })
	defer running.Wait()
	defer stop()
	roles := map[string]role{"router.r0": {name: "r0", router: true}, "gen.g0": {name: "g0", url: node.URL}}
	offer := func(ns int64) {
		p.offer(roles, clock.Published{Router: "r0", Node: "g0", Estimate: clock.Estimate{OffsetNS: ns, State: clock.Synced}}, "r0")
		for len(p.poke) > 0 && limit.Err() == nil {
			runtime.Gosched() // until run has looked
		}
	}
	taken := func(want int64) {
		t.Helper()
		select {
		case b := <-bodies:
			if *b.OffsetNS != want {
				t.Errorf("pushed are %d ns, want %d", *b.OffsetNS, want)
			}
		case <-limit.Done():
			t.Fatalf("%d ns are not pushed", want)
		}
	}
	offer(10_000)
	taken(10_000)
	offer(20_000)
	answer <- struct{}{}
	taken(20_000)
	answer <- struct{}{}
}
