package export

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/phase"
)

// hostile is a line as the merge makes it of a record of a node that lies: its stamps are absurd, and its own estimate says that they are good.
func hostile(t *testing.T, raw int64, est int64, wall bool) *timeline.Line {
	t.Helper()
	const rc, gc = clock.ID("00000000000000aa.00000001"), clock.ID("00000000000000bb.00000002")
	at := func(ms int64) *int64 { v := (1000 + ms) * 1e6; return &v }
	r := &phase.Record{Schema: phase.Schema, Role: phase.Disagg, Node: "r0", Instance: rc, Router: "r0", RequestID: "a", Style: "generation_first", Outcome: phase.Finished, Clocks: []phase.Clock{{ID: rc}}, DisaggRequestID: 5}
	r.Stamps = phase.Stamps{ReceiveNS: at(0), ParsedNS: at(1), PlacedNS: at(1), GenDispatchNS: at(1), GenHeadersNS: at(3), CtxDispatchNS: at(3), FirstTokenNS: at(12), LastTokenNS: at(20), EndNS: at(21)}
	r.Decision = &phase.Decision{Ctx: "ctx0", Gen: "gen0"}
	mk := func(role phase.Role, node string) *phase.Record {
		g := &phase.Record{Schema: phase.Schema, Role: role, Node: node, Instance: gc, Router: "r0", RequestID: "a", Outcome: phase.Finished, DisaggRequestID: 5,
			Clocks: []phase.Clock{{ID: gc, Estimate: &clock.Estimate{Reference: rc, Local: gc, OffsetNS: est, State: clock.Synced, LowerNS: est, UpperNS: est, ValidFromNS: math.MinInt64}}}}
		v := raw
		g.Stamps = phase.Stamps{ReceiveNS: &v, ParsedNS: &v, AdmittedNS: &v, QueuedNS: &v, FirstScheduledNS: &v, FirstTokenNS: &v, FirstTokenSentNS: &v, HeadersSentNS: &v, EndNS: &v}
		text := phase.Append(nil, g)
		g2, err := phase.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return g2
	}
	c := timeline.Clocks{Reference: rc}
	if wall {
		c.Wall = func(ns int64) int64 { return ns + 1_795_000_000_000_000_000 }
	}
	l := timeline.Merge([]timeline.Part{{Record: r}, {Record: mk(phase.Ctx, "ctx0")}, {Record: mk(phase.Gen, "gen0")}}, c)
	l2, err := timeline.Parse(timeline.Append(nil, l))
	if err != nil {
		t.Fatal(err)
	}
	return l2
}

// Stamps that no clock shows leave every format valid: a collector refuses a whole POST for one number.
func TestStampsThatNoClockShows(t *testing.T) {
	for _, raw := range []int64{math.MinInt64, math.MinInt64 + 1, -5e18, math.MaxInt64, 5e18} {
		for _, wall := range []bool{true, false} {
			l := hostile(t, raw, 0, wall)
			for _, f := range []string{"chrome", "otlp", "trtllm", "csv", "parquet", "perfetto"} {
				var b bytes.Buffer
				x, _ := New(f, &b)
				if err := x.Line(l); err != nil {
					t.Error(f, err)
				}
				if err := x.Close(); err != nil {
					t.Error(f, err)
				}
				if f == "chrome" || f == "otlp" || f == "trtllm" {
					d := json.NewDecoder(&b)
					d.UseNumber()
					var v any
					if err := d.Decode(&v); err != nil {
						t.Errorf("raw %d wall %v: %s is no JSON: %v", raw, wall, f, err)
						continue
					}
					if f == "otlp" {
						walk(t, raw, wall, v)
					}
				}
			}
		}
	}
}

// walk wants every time of an OTLP message to be a fixed64.
func walk(t *testing.T, raw int64, wall bool, v any) {
	t.Helper()
	switch x := v.(type) {
	case map[string]any:
		for k, w := range x {
			if strings.HasSuffix(k, "TimeUnixNano") {
				if _, err := strconv.ParseUint(w.(string), 10, 64); err != nil {
					t.Errorf("raw %d wall %v: OTLP %s is %v, no fixed64", raw, wall, k, w)
				}
				continue
			}
			walk(t, raw, wall, w)
		}
	case []any:
		for _, w := range x {
			walk(t, raw, wall, w)
		}
	}
}
