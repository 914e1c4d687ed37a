package timeline

import (
	"testing"

	"meridian.internal/shared/phase"
)

// raced is a request of which two context nodes computed the prompt: ctx0 was begun first, and slower; ctx1 served.
func raced() (router, loser, winner, gen *phase.Record) {
	rs := ring()
	router, winner, gen = rs[0], rs[1], rs[2]
	loser = rec(phase.Ctx, map[string]float64{"receive": 0.8, "parsed": 0.9, "started": 0.9, "admitted": 1, "queued": 1, "first_scheduled": 1.2, "end": 9.6})
	loser.Outcome = phase.Cancelled
	winner.Node = "ctx1"
	router.DisaggRequestID++
	winner.DisaggRequestID++
	router.Decision.Ctx = "ctx1"
	for _, r := range []*phase.Record{loser, winner, gen} {
		router.Legs = append(router.Legs, phase.Leg{Role: r.Role, Node: r.Node, Records: true})
	}
	return router, loser, winner, gen
}

func TestAContextNodeThatDidNotServeIsNeverTakenForTheOneThatDid(t *testing.T) {
	router, loser, winner, gen := raced()
	whole := Merge(parts([]*phase.Record{router, loser, winner, gen}), clocks())
	if len(whole.Violations) > 0 || !whole.Complete || whole.CriticalSpan == "" {
		t.Errorf("%+v", whole.Violations)
	}
	l := Merge(parts([]*phase.Record{router, loser, gen}), clocks()) // the record of the winner is missing
	links := 0
	l.Links(func(k Link) {
		if k.From == "ctx0" || k.To == "ctx0" {
			links++
		}
	})
	if len(l.Violations) > 0 || links > 0 {
		t.Errorf("%d links of a leg that did not serve, violations %+v", links, l.Violations)
	}
	for _, s := range l.Spans {
		if s.DurNS < 0 || s.Node == "ctx0" {
			t.Errorf("%+v", s)
		}
	}
}
