package chaos

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"

	"meridian.internal/e2e/cluster"
)

// TestAStalledPrefillIsHedged: a context node stops without a word. Before anybody knows, requests that it holds get a second
// prefill elsewhere; their generation legs keep their admission, and the text is the one that they would have said.
func TestAStalledPrefillIsHedged(t *testing.T) {
	r := start(t, cluster.Config{Ctx: 2, Gen: 1, RouterArgs: []string{"--hedge-quantile=0.99"}})
	for i := range 80 { // what a prefill takes; and hedges are earned
		r.ok(t, fmt.Sprintf("before-%d", i))
	}
	want := r.send("undisturbed", fields(20, 5))
	if err := want.wait(t); err != nil {
		t.Fatal(err)
	}
	victim := r.Find("ctx0")
	if err := victim.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 4 { // more than one node gets
		all.Go(func() { r.ok(t, fmt.Sprintf("stalled-%d", i)) })
	}
	all.Wait()
	if err := victim.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if m := r.metrics(t, r.Routers[0]); !strings.Contains(m, `meridian_router_hedges_total{result="won"}`) {
		t.Error("no second prefill has won")
	}
	hedged := 0
	for i := range 4 {
		l, err := r.client.Timeline(r.ctx, fmt.Sprintf("stalled-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		if l.Outcome != "finished" || l.NegativeSpans > 0 || len(l.Violations) > 0 {
			t.Errorf("request %d: %s, attempts %+v, %d negative spans, violations %v", i, l.Outcome, l.Attempts, l.NegativeSpans, l.Violations)
		}
		if attempts(l, "ctx") == 2 && attempts(l, "gen") == 1 {
			hedged++
		}
	}
	if hedged == 0 {
		t.Error("no request has two prefills for one admission in its timeline")
	}
	r.idle(t)
	var held map[string]int
	r.poll(t, patience, "not every reservation is back", func() bool {
		held = r.held(t)
		return grownSince(held, held) == "" // the router's counts are 0
	})
}
