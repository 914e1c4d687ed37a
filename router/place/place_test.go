package place

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// nodes are named n0, n1, … ; f changes one.
func nodes(n int, f func(i int, x *Node)) []Node {
	out := make([]Node, n)
	for i := range out {
		out[i].Name = fmt.Sprintf("n%d", i)
		out[i].Seed, out[i].Slot = SeedOf(out[i].Name), i
		if f != nil {
			f(i, &out[i])
		}
	}
	return out
}

func TestPoliciesChoose(t *testing.T) {
	queued := func(tokens ...int) []Node {
		return nodes(len(tokens), func(i int, x *Node) { x.QueuedTokens = tokens[i] })
	}
	rand := func(draws ...int) func(int) int {
		return func(int) int { d := draws[0]; draws = draws[1:]; return d }
	}
	for _, c := range []struct {
		name   string
		policy Policy
		side   Side
		nodes  []Node
		q      Query
		want   int
	}{
		{"the shortest prefill queue", LeastLoaded, Prefill, queued(30, 10, 20), Query{}, 1},
		{"equal queues take turns", LeastLoaded, Prefill, queued(5, 5, 5), Query{Turn: 5}, 2},
		{"round robin does not look at load", RoundRobin, Prefill, queued(99, 0), Query{Turn: 2}, 0},
		{"the better of two that are drawn", PowerOfTwo, Prefill, queued(0, 30, 20), Query{Rand: rand(1, 1)}, 2},
		{"one node needs no draw", PowerOfTwo, Prefill, queued(3), Query{}, 0},
		{"a costly hand-over counts as queue", LeastLoaded, Prefill, nodes(2, func(i int, x *Node) { x.PairTokens = float64(64 * (1 - i)) }), Query{}, 1},
		{"a cached prefix wins over a short queue", KVAware, Prefill, nodes(2, func(i int, x *Node) {
			x.QueuedTokens = 100 * i
		}), Query{Tokens: 1000, Held: []int32{0, 900}}, 1},
		{"a long queue wins over a cached prefix", KVAware, Prefill, nodes(2, func(i int, x *Node) {
			x.QueuedTokens = 1000 * i
		}), Query{Tokens: 1000, Held: []int32{0, 900}}, 0},
		{"no prefix saves the last token", KVAware, Prefill, nodes(2, func(i int, x *Node) { x.QueuedTokens = i }), Query{Tokens: 1000, Held: []int32{999, 1000}}, 0},
		{"fewest sequences", LeastLoaded, Decode, nodes(3, func(i int, x *Node) { x.Sequences = 3 - i }), Query{}, 2},
		{"less KV in use, with equal sequences", LeastLoaded, Decode, nodes(2, func(i int, x *Node) { x.KVMaxTokens, x.KVUsedTokens = 100, 50-i }), Query{Tokens: 1}, 1},
		{"no room for the prompt weighs more than sequences", LeastLoaded, Decode, nodes(2, func(i int, x *Node) {
			x.KVMaxTokens, x.KVUsedTokens, x.Sequences = 100, 90*(1-i), 3*i
		}), Query{Tokens: 60}, 1},
		{"KV that is there already", KVAware, Decode, nodes(2, func(i int, x *Node) { x.Sequences = i }), Query{Tokens: 100, Held: []int32{0, 100}}, 1},
		{"a load that is uneven by a few sequences takes no conversation away", KVAware, Decode, nodes(2, func(i int, x *Node) { x.Sequences = 3 * i }), Query{Tokens: 1000, Held: []int32{0, 900}}, 1},
		{"nor one by a few in a hundred", KVAware, Decode, nodes(2, func(i int, x *Node) { x.Sequences = 60 + 15*i }), Query{Tokens: 1000, Held: []int32{0, 1000}}, 1},
		{"but one by half does", KVAware, Decode, nodes(2, func(i int, x *Node) { x.Sequences = 60 + 30*i }), Query{Tokens: 1000, Held: []int32{0, 1000}}, 0},
		{"a conversation without a key goes to the least loaded", Conversation, Prefill, queued(3, 1), Query{}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			var ch Chooser
			if got, ok := ch.Choose(c.policy, c.side, c.nodes, &c.q); !ok || got != c.want {
				t.Errorf("chose %d, %v, want %d; scores %v", got, ok, c.want, ch.scores)
			}
		})
	}
}

func TestABetterRankComesFirst(t *testing.T) {
	list := nodes(3, func(i int, x *Node) { x.Rank, x.QueuedTokens = Rank(3-i), 2-i })
	var c Chooser
	for _, p := range Policies() {
		for _, want := range []int{2, 1} {
			if got, ok := c.Choose(p, Prefill, list, &Query{Key: 7, Rand: rand.IntN}); !ok || got != want {
				t.Errorf("%s chose %d, want %d", p, got, want)
			}
			list[2].Rank = Excluded
		}
		list[2].Rank = Good + 1
		list[1].Rank = Excluded
		list[2].Rank = Excluded
		if _, ok := c.Choose(p, Prefill, list, &Query{}); ok {
			t.Errorf("%s chose among excluded nodes", p)
		}
		list[1].Rank, list[2].Rank = 2, 1
	}
}

func TestRoundRobinIsEvenWhateverIsExcluded(t *testing.T) {
	list := nodes(5, func(i int, x *Node) {
		if i == 1 {
			x.Rank = Excluded
		}
	})
	var c Chooser
	got := map[int]int{}
	for turn := range 40 {
		at, _ := c.Choose(RoundRobin, Decode, list, &Query{Turn: turn})
		got[at]++
	}
	for i := range list {
		if want := map[bool]int{true: 0, false: 10}[i == 1]; got[i] != want {
			t.Errorf("node %d was chosen %d times, want %d", i, got[i], want)
		}
	}
}

// A conversation stays where it is while others join and leave, and no node is loaded far over the mean.
func TestConversationsStayTogetherWithinABound(t *testing.T) {
	var c Chooser
	const n, conversations, turns = 10, 400, 5
	list := nodes(n, nil)
	home := map[uint64]int{}
	moved := 0
	for range turns {
		for k := range conversations {
			key := SeedOf(fmt.Sprint("conversation", k))
			at, _ := c.Choose(Conversation, Decode, list, &Query{Key: key, Tokens: 10})
			list[at].Sequences++
			if old, known := home[key]; known && old != at {
				moved++
			}
			home[key] = at
			sum := 0
			for i := range list {
				sum += list[i].Sequences
			}
			if bound := imbalance*float64(sum)/n + sequenceSlack + 1; float64(list[at].Sequences) > bound {
				t.Fatalf("node %d has %d sequences, the bound is %.1f", at, list[at].Sequences, bound)
			}
		}
		for i := range list {
			list[i].Sequences = 0 // the turn's requests have ended
		}
	}
	if share := float64(moved) / (conversations * (turns - 1)); share > 0.1 {
		t.Errorf("%.0f %% of the turns went elsewhere than the one before, want at most 10 %%", 100*share)
	}
	left := home[SeedOf("conversation7")]
	list[left].Rank = Excluded
	for k := range conversations {
		key := SeedOf(fmt.Sprint("conversation", k))
		if at, _ := c.Choose(Conversation, Decode, list, &Query{Key: key, Tokens: 10}); at == left {
			t.Fatalf("conversation %d went to the node that left", k)
		}
	}
}

func TestBestListsTheChosenAndTheLowestScores(t *testing.T) {
	list := nodes(9, func(i int, x *Node) { x.QueuedTokens = (i * 5) % 9 })
	var c Chooser
	at, _ := c.Choose(LeastLoaded, Prefill, list, &Query{Turn: 3})
	best := c.Best(nil, at, 3)
	if len(best) != 3 || best[0].At != at || best[0].Score != 0 || best[1].Score != 1 || best[2].Score != 2 {
		t.Errorf("chosen %d, best %v", at, best)
	}
	at, _ = c.Choose(RoundRobin, Prefill, list, &Query{Turn: 7}) // a bad one
	if best = c.Best(nil, at, 3); len(best) != 3 || best[2].At != at {
		t.Errorf("chosen %d is not among %v", at, best)
	}
}

func TestFitFindsConstantAndSlope(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var f Fit
	for range 200 {
		x := 100 + rng.Float64()*1000
		f.Add(x, 5000+20*x+rng.NormFloat64()*100)
	}
	if a, b := f.Constant(), f.Slope(); math.Abs(a-5000) > 300 || math.Abs(b-20) > 0.5 {
		t.Errorf("a %.0f, b %.2f, want about 5000 and 20", a, b)
	}
	if y := f.At(2000); math.Abs(y-45000) > 1000 {
		t.Errorf("at 2000: %.0f, want about 45000", y)
	}
	for range 300 {
		x := 100 + rng.Float64()*1000
		f.Add(x, 40*x)
	}
	if b := f.Slope(); math.Abs(b-40) > 1 {
		t.Errorf("slope %.2f, want about 40: old samples fade", b)
	}
}

func TestFitWithoutASpreadIsConstantThenProportional(t *testing.T) {
	var f Fit
	if f.Known() || f.At(5) != 0 || f.Slope() != 0 {
		t.Errorf("the zero value claims to know: %v %v", f.At(5), f.Slope())
	}
	for range 20 {
		f.Add(100, 3000)
	}
	if f.At(1) != f.At(100) || math.Abs(f.At(100)-3000) > 1 || math.Abs(f.At(200)-6000) > 1 || math.Abs(f.Slope()-30) > 0.1 {
		t.Errorf("at 1, 100, 200: %.0f %.0f %.0f, slope %.1f; want 3000, 3000, 6000 and 30", f.At(1), f.At(100), f.At(200), f.Slope())
	}
}

func TestAStallIsNotTakenForWhatWorkCosts(t *testing.T) {
	work := func(samples ...float64) float64 {
		var f Fit
		for range 20 {
			f.AddWork(30, 6)
		}
		for _, y := range samples {
			f.AddWork(30, y)
		}
		return f.At(30)
	}
	if at := work(400); at > 8 {
		t.Errorf("after a stall of 400: %.1f, want about 6", at)
	}
	if at := work(slices.Repeat([]float64{60}, 60)...); at < 40 {
		t.Errorf("after 60 samples of 60: %.1f, want near 60: it is so now", at)
	}
}

func TestWhatIsComputedAgainCountsTwice(t *testing.T) {
	c := Costs{LocalNS: 500, RemoteNS: 400, TokenNS: 2, remote: 100}
	for left, want := range map[int]bool{20: true, 40: true, 60: false, 200: false} {
		if got := c.Local(left); got != want {
			t.Errorf("%d tokens left on the generation node, 100 on the context node: local %v, want %v", left, got, want)
		}
	}
}

func TestLocalPrefillIsComparedWithRemote(t *testing.T) {
	fit := func(perX float64) *Fit {
		var f Fit
		for x := 1.0; x < 50; x++ {
			f.Add(x, perX*x)
		}
		return &f
	}
	gen, ctx, q := &Node{Slot: 1}, &Node{QueuedTokens: 500}, &Query{Tokens: 1000, Held: []int32{0, 900}}
	c, ok := (&Way{ctx, gen, fit(10), fit(30), fit(2), 4}).Estimate(q)
	if !ok || math.Abs(c.LocalNS-3000) > 1 || math.Abs(c.RemoteNS-(15000+800)) > 5 {
		t.Errorf("got %+v, %v, want 3000 and 15800", c, ok)
	}
	if c, ok = (&Way{ctx, gen, fit(10), nil, fit(2), 4}).Estimate(q); !ok || math.Abs(c.LocalNS-1000) > 1 {
		t.Errorf("got %+v, %v: an unmeasured generation node is as fast as the context node", c, ok)
	}
	if _, ok = (&Way{ctx, gen, nil, fit(30), fit(2), 4}).Estimate(q); ok {
		t.Error("an estimate without a measured prefill")
	}
	if _, ok = (&Way{ctx, gen, fit(10), fit(30), nil, 4}).Estimate(q); ok {
		t.Error("an estimate without a measured hand-over")
	}
}
