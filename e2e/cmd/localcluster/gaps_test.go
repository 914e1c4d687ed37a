package main

import (
	"strings"
	"testing"
)

// slices of a trace: a prompt in iteration 4, then decode steps, one of a smaller batch, and the name of a track.
const trace = `{"traceEvents":[
{"ph":"M","pid":0,"name":"process_name","args":{"name":"gen0"}},
{"ph":"X","name":"forward iter 4","ts":0,"dur":50,"args":{"iter":4,"batch":3,"context":1}},
{"ph":"X","name":"forward iter 5","ts":100,"dur":50,"args":{"iter":5,"batch":3,"context":0}},
{"ph":"X","name":"sample iter 5","ts":150,"dur":10,"args":{"iter":5}},
{"ph":"X","name":"sample iter 6","ts":250.5,"dur":9.5,"args":{"iter":6}},
{"ph":"X","name":"iter 6","ts":0,"dur":900,"args":{"iter":6,"batch":3,"context":0}},
{"ph":"X","name":"forward iter 6","ts":172,"dur":78.5,"args":{"iter":6,"batch":3,"context":0}},
{"ph":"X","name":"forward iter 7","ts":263,"dur":40,"args":{"iter":7,"batch":3,"context":0}},
{"ph":"X","name":"forward iter 8","ts":310,"dur":40,"args":{"iter":8,"batch":2,"context":0}},
{"ph":"X","name":"forward iter 10","ts":500,"dur":40,"args":{"iter":10,"batch":3,"context":0}}]}`

func TestGapsLieBetweenDecodeStepsOfTheBatchThatFollowEachOther(t *testing.T) {
	g, err := gapsOf([]byte(trace), 3)
	if err != nil {
		t.Fatal(err)
	}
	if len(g.steps) != 4 || len(g.empty) != 2 || g.empty[0] != 3 || g.empty[1] != 12 || g.steps[3] != 88 {
		t.Errorf("steps %v, gaps %v; want the longest of 4 steps 88, gaps 3 and 12", g.steps, g.empty)
	}
	if want := "gap p50 3.0, p90 3.0, p99 3.0, most 12.0 µs of 2"; !strings.Contains(g.String(), want) {
		t.Errorf("%q lacks %q", g, want)
	}
	if _, err := gapsOf([]byte(trace), 2); err == nil || !strings.Contains(err.Error(), "decode 2") {
		t.Errorf("a single step of the batch: %v", err)
	}
}
