package sched

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"meridian.internal/gpu/kv"
)

// world is a scheduler with named sequences; steps stay in flight until done.
type world struct {
	t    *testing.T
	s    *Scheduler
	pool *kv.Pool
	log  []string
}

func newWorld(t *testing.T, cfg Config, blocks int) *world {
	w := &world{t: t, pool: kv.New(blocks, 4, 1, kv.Events{})}
	w.s = New(cfg, w.pool)
	return w
}

// add queues a sequence of n prompt tokens, all equal, with max output tokens.
func (w *world) add(name string, n, max int) *Seq {
	q := &Seq{Tokens: slices.Repeat([]int32{int32(name[0])}, n), Limit: n + max, Match: n, Data: name}
	w.s.Add(q)
	return q
}

// step plans one step, written like "a:5+3* b:9+1" (KV length + tokens, * when a token is sampled) with the preempted
// ones after a bar.
func (w *world) step() []Item {
	items, preempted := w.s.Next(nil)
	var out []string
	for _, it := range items {
		mark := ""
		if it.Sample {
			mark = "*"
		}
		out = append(out, fmt.Sprintf("%v:%d+%d%s", it.Seq.Data, it.KVLen, it.Tokens, mark))
	}
	for _, q := range preempted {
		out = append(out, fmt.Sprintf("|%v", q.Data))
	}
	w.log = append(w.log, strings.Join(out, " "))
	return items
}

// done completes a step: sampled tokens become known, sequences at their limit end.
func (w *world) done(items []Item) {
	for _, it := range items {
		q := it.Seq
		if it.Sample {
			q.Pending--
			q.Tokens = append(q.Tokens, 7)
		}
		w.s.Publish(q, it.KVLen+it.Tokens)
		w.s.Complete(q)
		if it.Sample && len(q.Tokens) >= q.Limit {
			w.s.Finish(q)
		}
	}
}

func (w *world) steps(n int) {
	for range n {
		w.done(w.step())
	}
}

func (w *world) want(lines ...string) {
	w.t.Helper()
	if !slices.Equal(w.log, lines) {
		w.t.Errorf("steps\n%s\nwant\n%s", strings.Join(w.log, "\n"), strings.Join(lines, "\n"))
	}
	w.log = nil
}

// idle checks that nothing is left.
func (w *world) idle() {
	w.t.Helper()
	if s := w.pool.Stats(); s.Used != 0 || s.Leased != 0 || len(w.s.running)+len(w.s.waiting) != 0 || w.s.coming != 0 || len(w.s.slots) != w.s.cfg.MaxBatchSize {
		w.t.Errorf("left: %+v, %d running, %d waiting, %d coming, %d slots free", s, len(w.s.running), len(w.s.waiting), w.s.coming, len(w.s.slots))
	}
	if err := w.pool.Check(); err != nil {
		w.t.Error(err)
	}
}

func TestDecodeGoesBeforePrefillInChunks(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 4, MaxNumTokens: 6}, 32)
	w.add("a", 3, 5)
	w.steps(1)
	w.add("b", 9, 2)
	w.add("c", 4, 1)
	w.steps(5)
	w.want("a:0+3*", "a:3+1* b:0+5", "a:4+1* b:5+4* c:0+1", "a:5+1* b:9+1* c:1+3*", "a:6+1*", "")
	w.idle()
}

func TestStepsArePlannedOnSubmittedWork(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 4, MaxNumTokens: 8}, 32)
	q := w.add("a", 3, 3)
	first, second := w.step(), w.step()
	if !first[0].First || second[0].First {
		t.Error("First must be set on the first item only")
	}
	third, fourth := w.step(), w.step()
	w.want("a:0+3*", "a:3+1*", "a:4+1*", "")
	if len(q.Tokens) != 3 || q.Pending != 3 || q.InFlight != 3 {
		t.Errorf("%d tokens known, %d pending, %d steps in flight", len(q.Tokens), q.Pending, q.InFlight)
	}
	for _, items := range [][]Item{first, second, third, fourth} {
		w.done(items)
	}
	w.idle()
}

func TestPriorityGoesFirst(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 2, MaxNumTokens: 4}, 32)
	w.add("a", 2, 1)
	w.add("b", 2, 1)
	high := &Seq{Tokens: []int32{1, 2}, Limit: 3, Priority: 5, Data: "h"}
	w.s.Add(high)
	w.steps(2)
	w.want("h:0+2* a:0+2*", "b:0+2*")
	w.idle()
}

func TestTheYoungestIsPreemptedAndComesBack(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 4, MaxNumTokens: 16}, 4)
	w.add("a", 4, 6)
	w.add("b", 4, 6)
	w.steps(8)
	w.want(
		"a:0+4* b:0+4*", "a:4+1* b:4+1*", "a:5+1* b:5+1*", "a:6+1* b:6+1*", "a:7+1* b:7+1*", // two blocks each: all four
		"a:8+1* |b", // a needs a third, and ends
		"b:0+9*",    // recomputed with what it had sampled
		"",
	)
	w.idle()
}

func TestAPreemptedSequenceKeepsItsPlaceAndPriority(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 4, MaxNumTokens: 16}, 7)
	w.add("a", 7, 6)
	low := &Seq{Tokens: []int32{1, 2, 3}, Limit: 12, Priority: -1, Data: "l"}
	w.s.Add(low)
	w.add("b", 5, 8)
	w.steps(6)
	if !strings.Contains(strings.Join(w.log, "\n"), "|l") || strings.Contains(strings.Join(w.log, "\n"), "|b") {
		w.t.Errorf("steps %q, want only the low priority preempted", w.log)
	}
	w.steps(30)
	w.idle()
}

func TestBlocksInFlightAreWaitedFor(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 4, MaxNumTokens: 16}, 4)
	w.add("a", 4, 8)
	w.add("b", 4, 8)
	w.steps(4)
	flying := w.step() // fills the second block of both
	w.log = nil
	w.step() // a needs a third: b goes, but its blocks are named by the step in flight
	w.step() // a waits for them, and does not preempt itself
	w.done(flying)
	w.steps(5)
	w.want("|b", "", "a:8+1*", "a:9+1*", "a:10+1*", "b:0+9*", "b:9+1*")
	w.steps(2)
	w.idle()
}

func TestAHeldSequenceWaitsForReady(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 2, MaxNumTokens: 16, PrefixReuse: true}, 8)
	w.add("p", 8, 1)
	w.steps(1)
	q := &Seq{Tokens: slices.Repeat([]int32{'p'}, 8), Limit: 11, Match: 8, Held: true, Fixed: true, Data: "r"}
	w.s.Add(q)
	w.s.Admit()
	if q.Cached != 8 || len(q.Blocks) != 3 || !q.Running() {
		t.Errorf("%d cached, %d blocks, running %v; want all 8 and room for one token more", q.Cached, len(q.Blocks), q.Running())
	}
	w.steps(1)
	q.Tokens = append(q.Tokens, 9)
	w.s.Ready(q, 8)
	w.steps(3)
	w.want("p:0+8*", "", "r:8+1*", "r:9+1*", "")
	w.idle()
}

func TestReuseLeavesOneTokenToCompute(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 2, MaxNumTokens: 16, PrefixReuse: true}, 8)
	w.add("p", 8, 1)
	w.steps(1)
	w.add("p", 8, 1)
	w.add("p", 9, 1)
	w.steps(1)
	w.want("p:0+8*", "p:7+1* p:8+1*") // of the second block of the twin, three tokens are copied
}

func TestEndInFlightKeepsTheBlocks(t *testing.T) {
	w := newWorld(t, Config{MaxBatchSize: 2, MaxNumTokens: 16}, 8)
	q := w.add("a", 8, 4)
	first, second := w.step(), w.step()
	w.s.Finish(q)
	if w.pool.Stats().Used != 3 {
		t.Errorf("%d blocks used with two steps in flight, want 3", w.pool.Stats().Used)
	}
	w.s.Complete(first[0].Seq)
	if w.pool.Stats().Used != 3 {
		t.Errorf("%d blocks used with one step in flight, want 3", w.pool.Stats().Used)
	}
	w.s.Complete(second[0].Seq)
	w.idle()
}

// TestRandomLoadEndsWhole plans random loads with two steps in flight, cancels and scarce blocks.
func TestRandomLoadEndsWhole(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 3))
		cfg := Config{MaxBatchSize: 1 + rng.IntN(6), PrefixReuse: seed%2 == 0}
		cfg.MaxNumTokens = cfg.MaxBatchSize + rng.IntN(20)
		w := newWorld(t, cfg, 8+rng.IntN(20))
		var all []*Seq
		var flying [][]Item
		for n := 0; n < 60 || len(w.s.running)+len(w.s.waiting)+len(flying) > 0; n++ {
			if n > 20_000 {
				t.Fatalf("seed %d: no end: %d running, %d waiting, %+v", seed, len(w.s.running), len(w.s.waiting), w.pool.Stats())
			}
			if n < 60 {
				q := w.add(string(rune('a'+rng.IntN(3))), 1+rng.IntN(16), 1+rng.IntN(16))
				q.Priority = rng.IntN(3)
				all = append(all, q)
			}
			if q := all[rng.IntN(len(all))]; rng.IntN(20) == 0 && q.state != ended {
				w.s.Finish(q)
			}
			items, _ := w.s.Next(nil)
			budget := cfg.MaxNumTokens
			for _, it := range items {
				budget -= it.Tokens
			}
			if budget < 0 || len(items) > cfg.MaxBatchSize {
				t.Fatalf("seed %d: %d items, %d tokens over the budget", seed, len(items), -budget)
			}
			if len(items) > 0 {
				flying = append(flying, items)
			}
			if len(flying) == 2 || (len(items) == 0 && len(flying) > 0) {
				w.finishRandom(flying[0])
				flying = flying[1:]
			}
		}
		w.idle()
	}
}

// finishRandom is done for sequences that may have been cancelled.
func (w *world) finishRandom(items []Item) {
	for _, it := range items {
		q := it.Seq
		if it.Sample {
			q.Pending--
		}
		if q.state == ended {
			w.s.Complete(q)
			continue
		}
		if it.Sample {
			q.Tokens = append(q.Tokens, 7)
		}
		w.s.Publish(q, it.KVLen+it.Tokens)
		w.s.Complete(q)
		if it.Sample && len(q.Tokens) >= q.Limit {
			w.s.Finish(q)
		}
	}
}

func BenchmarkNext(b *testing.B) {
	pool := kv.New(1<<14, 32, 1, kv.Events{})
	s := New(Config{MaxBatchSize: 256, MaxNumTokens: 2048}, pool)
	for range 256 {
		s.Add(&Seq{Tokens: []int32{1}, Limit: 1 << 30})
	}
	var items []Item
	for b.Loop() {
		items, _ = s.Next(items[:0])
		for _, it := range items {
			it.Seq.Pending--
			it.Seq.Tokens = it.Seq.Tokens[:1]
			it.Seq.Computed = 0
			s.Complete(it.Seq)
		}
	}
}
