package worker

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// Streamed or whole, an answer to a router carries the raw stamps of the node's clock; TensorRT-LLM's header, in seconds of
// the adjusted clock, goes to who asks for metrics.
func TestAnswersCarryTheStampsOfTheClock(t *testing.T) {
	f := newFake(t)
	shift := int64(7e12)
	if err := f.o.Adjusted.Push(clock.Push{OffsetNS: &shift}); err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{`{"model":"tiny","prompt":[5],"stream":true}`, `{"model":"tiny","prompt":[5]}`} {
		for _, c := range []struct {
			name            string
			router, metrics string
		}{{"a router that wants metrics", "r0", "1"}, {"a router that wants none", "r0", ""}, {"a client", "", "1"}} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.srv.URL+"/v1/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			for name, v := range map[string]string{api.HeaderRouter: c.router, api.HeaderReturnMetrics: c.metrics} {
				if v != "" {
					req.Header.Set(name, v)
				}
			}
			before := f.o.Steady.Now()
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			after := f.o.Steady.Now()
			resp.Body.Close()
			id, received, sent, err := clock.ParseInband(resp.Header.Get(clock.InbandHeader))
			if c.router == "" {
				received, sent = before, after
			}
			if (err == nil) != (c.router != "") || c.router != "" && id != f.o.Steady.ID() || before > received || received > sent || sent > after {
				t.Errorf("%s: %s, %d to %d within %d to %d, %v", c.name, id, received, sent, before, after, err)
			}
			var rs, rn, ts, tn int64
			sync := resp.Header.Get(api.HeaderClockSync)
			if _, err := fmt.Sscanf(sync, "receive;ts=%d.%d, transmit;ts=%d.%d", &rs, &rn, &ts, &tn); (err == nil) != (c.metrics == "1") {
				t.Errorf("%s: %s is %q", c.name, api.HeaderClockSync, sync)
			}
			if c.metrics == "1" && (rs*1e9+rn < before+shift || ts*1e9+tn > after+shift || rs*1e9+rn > ts*1e9+tn) {
				t.Errorf("%s: %q is not within %d to %d + %d", c.name, sync, before, after, shift)
			}
		}
	}
}

// TestARecordNamesTheClockOfItsRank where the rank has one of its own; rank 0 stamps with the node's. So do their cards.
func TestARecordNamesTheClockOfItsRank(t *testing.T) {
	f := newFake(t)
	e := clock.Estimate{Reference: f.o.Steady.ID(), Local: "00000000000000dd.00000004", OffsetNS: 5, LowerNS: 3, UpperNS: 7, State: clock.Synced}
	f.o.RankClock = func(rank int) (clock.Estimate, bool) { return e, rank == 1 }
	own := clock.Estimate{Reference: f.o.Steady.ID(), Local: "00000000000000aa.00000000", OffsetNS: 6, State: clock.Synced}
	ranks := clock.Estimate{Reference: e.Local, Local: own.Local, OffsetNS: 7, State: clock.Synced} // one card
	other := clock.Estimate{Reference: "00000000000000dd.00000005", Local: own.Local, OffsetNS: 8, State: clock.Synced}
	f.o.CardClocks = func() []clock.Estimate { return []clock.Estimate{own, ranks, other} }
	node := []phase.Clock{{ID: f.o.Steady.ID(), Kind: "mono"}, {ID: own.Local, Kind: "gpu", Estimate: &own}}
	for rank, want := range [][]phase.Clock{node, append(node, phase.Clock{ID: e.Local, Kind: "rank", Estimate: &e}, phase.Clock{ID: ranks.Local, Kind: "gpu", Estimate: &ranks})} {
		f.rank = &rank
		resp, err := http.Post(f.srv.URL+"/v1/completions", "application/json", strings.NewReader(`{"model":"tiny","prompt":[5]}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		rec := f.records[rank]
		if !reflect.DeepEqual(rec.Clocks, want) || rec.Stamps.EngineClock != 2*rank || *rec.DPRank != rank {
			t.Errorf("rank %d: clocks %+v, the engine's is %d", rank, rec.Clocks, rec.Stamps.EngineClock)
		}
	}
}
