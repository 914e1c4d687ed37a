package rowcheck

import (
	"slices"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

// world is two rows, the counters and the one record that belong together.
type world struct {
	static   rows.Static
	rows     []rows.Row
	counters map[string]float64
	line     timeline.Line
	lost     int64
	text     func(i int, row string) string // changes what is written of the i-th row; nil: nothing
}

func good() *world {
	w := &world{static: rows.Static{Node: "ctx0", ClockID: "c"}}
	a := rows.Row{Seq: 1, Iter: 1, Covers: 1, Requests: rows.Requests{New: 1, NewActive: 1, Active: 1}, Sums: rows.Sums{Prompt: 12, Cached: 4, Context: 8, Output: 1}}
	a.Batch.Scheduled, a.Batch.CtxTokens = rows.Some(1), rows.Some(8)
	a.KV = rows.KV{Sampled: true, Max: 10, Free: 7, Used: 3, AllocNew: 2, DAllocNew: 2, Reused: 1}
	b := rows.Row{Seq: 2, Iter: 2, Covers: 1, Requests: rows.Requests{Completed: 1}, Sums: rows.Sums{Output: 1}}
	b.Batch.Scheduled, b.Batch.CtxTokens = rows.Some(1), rows.Some(0)
	b.KV = rows.KV{Sampled: true, Max: 10, Free: 10, AllocNew: 2, Freed: 1, Evictable: 1, Reused: 1}
	w.rows = []rows.Row{a, b}
	w.counters = map[string]float64{"meridian_num_requests_new_total": 1, "meridian_num_requests_completed_total": 1, "meridian_iter_output_tokens_total": 2}
	w.line = timeline.Line{Phases: []timeline.Phase{{
		Role: phase.Ctx, Node: "ctx0", Clock: timeline.PhaseClock{ID: "c"}, Iters: &phase.Iters{First: 1, Last: 2},
		Tokens: phase.Tokens{Prompt: 12, Cached: 4, Output: 2}, KV: &infer.KVCounts{AllocTotalBlocks: 3, AllocNewBlocks: 2, ReusedBlocks: 1},
		Chunks: &timeline.Columns{Names: []string{"iter", "tokens", "batch_size"}, Values: [][]int64{{1}, {8}, {1}}},
	}}}
	return w
}

// ranked is the same with a second rank, which runs nothing but computes the chunk of the record.
func ranked() *world {
	w := good()
	var all []rows.Row
	for _, a := range w.rows {
		b := rows.Row{Rank: 1, Iter: a.Iter, Covers: a.Covers, Batch: a.Batch, Sums: a.Sums, KV: a.KV}
		b.Requests.Active = a.Requests.Active
		a.Synthetic, a.Batch, a.Sums, a.KV, a.Requests.Active = true, rows.Batch{Scheduled: rows.Some(0)}, rows.Sums{}, rows.KV{Sampled: true, Max: 10, Free: 10}, 0
		a.Seq, b.Seq = int64(len(all))+1, int64(len(all))+2
		all = append(all, a, b)
	}
	w.rows = all
	rank := 1
	w.line.Phases[0].DPRank = &rank
	return w
}

// drop takes a row out and numbers the rest anew.
func (w *world) drop(i int) {
	w.rows = slices.Delete(w.rows, i, i+1)
	for i := range w.rows {
		w.rows[i].Seq = int64(i + 1)
	}
}

func (w *world) check() []Fault {
	c := New()
	if w.lost > 0 {
		c.Line(AppendLost(nil, w.static.Node, w.static.ClockID, w.lost), "f:0")
	}
	for i := range w.rows {
		row := string(rows.NewEncoder(w.static).Append(nil, &w.rows[i]))
		if w.text != nil {
			row = w.text(i, row)
		}
		c.Line([]byte(row), "f:1")
	}
	if w.counters != nil {
		c.Line(AppendCounters(nil, w.static.Node, w.static.ClockID, w.counters), "f:3")
	}
	c.Timeline(&w.line)
	return c.Finish()
}

func TestEachDisagreementIsASentence(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*world)
		want   string // "": all agrees
	}{
		{"all agree", func(*world) {}, ""},
		{"no records at all", func(w *world) { w.line = timeline.Line{} }, ""},
		{"no counters", func(w *world) { w.counters = nil }, ""},
		{"a row is gone", func(w *world) { w.rows[1].Seq = 3 }, "row 3 of ctx0 follows row 1"},
		{"a row is there twice", func(w *world) { w.rows = append(w.rows, w.rows[1]) }, "row 2 of ctx0 follows row 2"},
		{"rows that were lost are said to be", func(w *world) { w.lost, w.rows[0].Seq, w.rows[1].Seq = 5, 6, 7 }, ""},
		{"iterations that go back", func(w *world) { w.rows[1].Iter, w.line.Phases = 1, nil }, "is of iteration 1, the one before of 1"},
		{"a request that never ended", func(w *world) {
			w.rows[1].Requests.Completed = 0
			delete(w.counters, "meridian_num_requests_completed_total")
		}, "1 new requests and 0 that ended"},
		{"blocks that leaked", func(w *world) { w.rows[1].KV.Freed = 0 }, "2 KV blocks handed out, 0 freed"},
		{"rows that the node itself found wrong", func(w *world) { w.rows[1].KV.Violations = 2 }, "did not add up in 2 rows"},
		{"blocks that are not there", func(w *world) { w.rows[0].KV.Used = 2 }, "7 free and 2 used KV blocks"},
		{"a change that is missing", func(w *world) { w.rows[0].KV.DAllocNew = 1; w.line.Phases[0].KV = nil; w.line.Phases = nil }, "add up to 1 new KV blocks, the last one says 2"},
		{"a counter that is off", func(w *world) { w.counters["meridian_iter_output_tokens_total"] = 3 }, "meridian_iter_output_tokens_total of ctx0 is 3, its rows add up to 2"},
		{"a record too many", func(w *world) { w.line.Phases = append(w.line.Phases, w.line.Phases[0]); w.line.Phases[1].Chunks = nil }, "hold 2 requests that ran on ctx0, its rows count 1"},
		{"prompt tokens that differ", func(w *world) { w.line.Phases[0].Tokens.Prompt = 11 }, "11 prompt tokens, its rows to 12"},
		{"output that was never sampled", func(w *world) { w.line.Phases[0].Tokens.Output = 3 }, "3 output tokens, its rows to 2"},
		{"output that was cut off", func(w *world) { w.line.Phases[0].Tokens.Output = 1 }, ""},
		{"KV blocks that no record has", func(w *world) { w.line.Phases[0].KV.AllocNewBlocks = 1 }, "1 new KV blocks, its rows to 2"},
		{"KV blocks of a probe", func(w *world) {
			w.rows[0].Sums.ProbeBlocks, w.rows[1].KV.AllocNew, w.rows[1].KV.DAllocNew, w.rows[1].KV.Freed = 3, 5, 3, 4
		}, ""},
		{"KV blocks that differ", func(w *world) { w.line.Phases[0].KV.AllocNewBlocks = 3 }, "3 new KV blocks, its rows to 2"},
		{"a place that was held for a request that never started", func(w *world) {
			w.rows[0].Requests.New, w.rows[0].Requests.NewActive, w.rows[1].Requests.Cancelled = 2, 2, 1
			w.rows[0].Sums.Prompt, w.rows[1].KV.AllocNew, w.rows[1].KV.DAllocNew, w.rows[1].KV.Freed = 17, 4, 2, 3
			w.counters = nil
			w.line.Phases = append(w.line.Phases, timeline.Phase{Role: phase.Gen, Node: "ctx0", Clock: timeline.PhaseClock{ID: "c"},
				Tokens: phase.Tokens{Prompt: 5}, KV: &infer.KVCounts{AllocTotalBlocks: 2, AllocNewBlocks: 2}})
		}, ""},
		{"an iteration after the last", func(w *world) { w.line.Phases[0].Iters.Last = 9 }, "ran in iteration 9, the rows end with 2"},
		{"a chunk that was not computed", func(w *world) { w.line.Phases[0].Chunks.Values[1][0] = 9 }, "computed 8 prompt tokens, records say 9"},
		{"a batch of another size", func(w *world) { w.line.Phases[0].Chunks.Values[2][0] = 2 }, "had a batch of 1, a record says 2"},
		{"a record of another process", func(w *world) { w.line.Phases[0].Clock.ID, w.line.Phases[0].Tokens.Prompt = "old", 99 }, ""},
		{"a negative time", func(w *world) { w.rows[0].IterLatency = rows.SomeSpan(-5e5) }, "iterLatencyMS is -0.5"},
		{"sampling that ended before it began", func(w *world) { w.rows[0].Sample = rows.SomeSpan(-5e5) }, "gpuSampleTimeMS is -0.5"},
		{"a negative wait", func(w *world) { w.rows[0].QueueLatency = rows.SomeSpan(-5e5) }, "newActiveRequestsQueueLatencyMS is -0.5"},
		{"less than no prefill", func(w *world) { w.rows[1].Sums.Context = -1 }, "a count is -1"},
		{"ranks: all agree", func(*world) {}, ""},
		{"ranks: a rank is missing", func(w *world) {
			w.counters, w.rows[3] = nil, w.rows[2]
			w.rows[3].Seq, w.rows[3].Iter = 4, 3
		}, "rank 0 in iteration 3, the one before of rank 0 in iteration 2"},
		{"ranks: another iteration", func(w *world) { w.rows[3].Iter = 3 }, "rank 1 in iteration 3, the one before of rank 0 in iteration 2"},
		{"ranks: a rank that ran and did not", func(w *world) { w.rows[0].Batch.Scheduled = rows.Some(2) }, "ran a batch of 2"},
		{"ranks: a chunk on another rank", func(w *world) {
			w.rows[0].Requests.NewActive, w.line.Phases[0].DPRank, w.line.Phases[0].Tokens, w.line.Phases[0].KV.AllocNewBlocks = 2, nil, phase.Tokens{}, 0
		}, "computed 0 prompt tokens, records say 8"},
		{"ranks: blocks of one leaked", func(w *world) { w.rows[3].KV.Freed = 0 }, "2 KV blocks handed out, 0 freed"},
		{"ranks: a rank is missing at the beginning", func(w *world) {
			w.drop(0)
			w.rows[1].Requests.Completed, w.counters, w.line = 0, nil, timeline.Line{}
		}, "row 1 of ctx0 is of rank 1"},
		{"ranks: the first set lacks the last rank", func(w *world) {
			w.drop(1)
			w.rows[2].KV, w.counters, w.line = w.rows[1].KV, nil, timeline.Line{}
		}, "is of rank 1 in iteration 2, sets had 1 ranks before"},
		{"ranks: no set has the rank of a record", func(w *world) {
			w.drop(3)
			w.drop(1)
			w.rows[0].Requests.Active, w.counters = 0, nil
		}, "a request ran on rank 1 of ctx0, whose rows are of 1 ranks"},
		{"ranks: a row is there twice, with numbers of their own", func(w *world) {
			w.rows = append(w.rows, w.rows[3])
			w.rows[4].Seq, w.counters, w.line = 5, nil, timeline.Line{}
		}, "is of rank 1 in iteration 2, the one before of rank 1 in iteration 2"},
		{"ranks: a set is there twice, with numbers of its own", func(w *world) {
			w.rows = append(w.rows, w.rows[2], w.rows[3])
			w.rows[4].Seq, w.rows[5].Seq, w.counters, w.line = 5, 6, nil, timeline.Line{}
			w.rows[4].Requests.Completed, w.rows[5].Sums = 0, rows.Sums{}
		}, "row 5 of ctx0 is of iteration 2, the one before of 2"},
		{"ranks: an old iteration", func(w *world) {
			for _, r := range []rows.Row{w.rows[2], w.rows[3]} {
				r.Seq, r.Iter, r.Requests.Completed, r.Sums = int64(len(w.rows))+1, 1, 0, rows.Sums{}
				w.rows = append(w.rows, r)
			}
			w.line = timeline.Line{}
			w.counters = nil
		}, "row 5 of ctx0 is of iteration 1, the one before of 2"},
		{"ranks: an iteration that no row tells of", func(w *world) { w.rows[2].Iter, w.rows[3].Iter = 3, 3 }, "row 3 of ctx0 tells of 1 iterations, it is of iteration 3 and the one before of 1"},
		{"ranks: the first iterations are missing", func(w *world) {
			for i := range w.rows {
				w.rows[i].Iter++
			}
			w.line.Phases[0].Chunks.Values[0][0], w.line.Phases[0].Iters = 2, nil
		}, "row 1 of ctx0 tells of 1 iterations, it is of iteration 2"},
		{"ranks: one tells of more iterations", func(w *world) { w.rows[3].Covers = 2 }, "rank 1 tells of 2 iterations, rank 0 of 1"},
		{"ranks: a request that both count", func(w *world) {
			w.text = func(i int, row string) string {
				if i == 1 {
					row = strings.Replace(row, `"numExpiredRequests":null`, `"numExpiredRequests":1`, 1)
				}
				return row
			}
			w.rows[0].Requests.New = 2
			delete(w.counters, "meridian_num_requests_new_total")
		}, "row 2 of ctx0: rank 1 tells of the queue"},
		{"ranks: a zero of the queue where nothing is to be said", func(w *world) {
			w.text = func(i int, row string) string {
				return strings.Replace(row, `"numQueuedCtxTokens":null`, map[bool]string{true: `"numQueuedCtxTokens":0`, false: `"numQueuedCtxTokens":null`}[i == 3], 1)
			}
		}, "row 4 of ctx0: rank 1 tells of the queue"},
		{"ranks: a request on two of them", func(w *world) {
			w.rows[0].PerReq, w.rows[1].PerReq = []rows.Req{{ID: 7}, {ID: 8}}, []rows.Req{{ID: 9}, {ID: 8}}
		}, "row 2 of ctx0: request 8 is on rank 0 and on rank 1"},
		{"ranks: one that came along took time", func(w *world) { w.rows[0].Forward = rows.SomeSpan(5) }, "is said to have come along without one"},
		{"ranks: sums of the wrong rank", func(w *world) {
			w.rows[2].Sums, w.rows[3].Sums = w.rows[3].Sums, w.rows[2].Sums
			w.line.Phases[0].Tokens.Output = 2
		}, "the records of ctx0, rank 1 add up to 2 output tokens, its rows to 1"},
		{"ranks: sums that are off", func(w *world) { w.rows[1].Sums.Prompt++ }, "the records of ctx0, rank 1 add up to 12 prompt tokens, its rows to 13"},
		{"ranks: rows were lost in the middle of a set", func(w *world) {
			w.lost, w.rows = 2, w.rows[3:]
			w.rows[0].Seq, w.line.Phases = 3, nil
			w.counters = nil
		}, ""},
	} {
		w := good()
		if strings.HasPrefix(tt.name, "ranks: ") {
			w = ranked()
		}
		tt.change(w)
		got := w.check()
		switch {
		case tt.want == "" && len(got) > 0:
			t.Errorf("%s: %v", tt.name, got)
		case tt.want != "" && (len(got) != 1 || !strings.Contains(got[0].Text, tt.want)):
			t.Errorf("%s: %v, want one sentence with %q", tt.name, got, tt.want)
		}
	}
}

func FuzzLine(f *testing.F) {
	w := good()
	f.Add(rows.NewEncoder(w.static).Append(nil, &w.rows[0]))
	f.Add(AppendCounters(nil, "n", "c", map[string]float64{"a": 1}))
	f.Add(AppendLost(nil, "n", "c", 4))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := New()
		c.Line(b, "f:1")
		c.Line(b, "f:2")
		c.Finish()
	})
}
