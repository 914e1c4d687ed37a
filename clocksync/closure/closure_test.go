package closure

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// cluster has clocks with known corrections, and messages between them.
type cluster struct {
	r      *rand.Rand
	clocks []Clock
	truth  map[string]int64 // correction
	lies   map[string]int64 // what a clock's stamps are off by, beyond its correction
}

func newCluster(seed uint64, n int, bound int64) cluster {
	c := cluster{r: rand.New(rand.NewPCG(seed, 1)), truth: map[string]int64{Reference: 0}, lies: map[string]int64{}}
	for i := range n {
		name := fmt.Sprintf("n%d", i)
		x := c.r.Int64N(2*bound) - bound
		c.truth[name] = x
		c.clocks = append(c.clocks, Clock{name, x - c.r.Int64N(bound), x + c.r.Int64N(bound)})
	}
	return c
}

// send makes a message that left at real time t and took d.
func (c cluster) send(from, to string, t, d int64) Message {
	return Message{From: from, To: to, SentNS: t - c.truth[from] + c.lies[from], ReceivedNS: t + d - c.truth[to] + c.lies[to]}
}

// talk makes messages both ways between all pairs.
func (c cluster) talk(n int, floor int64) (ms []Message) {
	names := []string{Reference}
	for _, k := range c.clocks {
		names = append(names, k.Name)
	}
	for range n {
		for _, a := range names {
			for _, b := range names {
				if a != b {
					ms = append(ms, c.send(a, b, c.r.Int64N(1e9), floor+c.r.Int64N(floor)))
				}
			}
		}
	}
	return ms
}

func TestTrueMessagesTightenAndNeverExclude(t *testing.T) {
	for seed := range uint64(200) {
		c := newCluster(seed, 1+int(seed%6), 100_000)
		got := Close(c.clocks, c.talk(2, 5_000))
		if got.Cycle != nil {
			t.Fatalf("seed %d: true messages contradict: %v", seed, got.Cycle)
		}
		tighter := 0
		for i, k := range got.Clocks {
			if x := c.truth[k.Name]; x < k.LowerNS || x > k.UpperNS {
				t.Errorf("seed %d: %s [%d, %d], the truth is %d", seed, k.Name, k.LowerNS, k.UpperNS, x)
			}
			if k.LowerNS < c.clocks[i].LowerNS || k.UpperNS > c.clocks[i].UpperNS {
				t.Errorf("seed %d: %s became wider", seed, k.Name)
			}
			if k.UpperNS-k.LowerNS <= 20_000 {
				tighter++
			}
		}
		if tighter != len(c.clocks) {
			t.Errorf("seed %d: %d of %d clocks known to 20 us", seed, tighter, len(c.clocks))
		}
	}
}

func TestABoundTravelsAlongAChain(t *testing.T) {
	clocks := []Clock{{"a", -10, 10}, {"b", -1_000_000, 1_000_000}, {"c", -1_000_000, 1_000_000}}
	got := Close(clocks, []Message{{"a", "b", 100, 105, 0}, {"b", "a", 200, 205, 0}, {"b", "c", 100, 107, 1}, {"c", "b", 200, 207, 1}})
	want := []Clock{{"a", -10, 10}, {"b", -15, 15}, {"c", -23, 23}}
	if !slices.Equal(got.Clocks, want) {
		t.Errorf("%v, want %v", got.Clocks, want)
	}
}

func TestALieOfAMillisecondIsNamedAmongThreeLinkedNodes(t *testing.T) {
	const runs = 500
	for seed := range uint64(runs) {
		c := newCluster(seed, 3, 50_000)
		liar := fmt.Sprintf("n%d", seed%3)
		c.lies[liar] = 1_000_000
		if seed%2 == 0 {
			c.lies[liar] = -1_000_000
		}
		got := Close(c.clocks, c.talk(1, 20_000))
		if !slices.Equal(got.Liars, []string{liar}) || !slices.Contains(got.Cycle, liar) {
			t.Errorf("seed %d: %s lies, named %v by the cycle %v", seed, liar, got.Liars, got.Cycle)
		}
	}
}

// KV transfers link the nodes; the router alone cannot contradict a liar who shifted all its stamps and whose estimate
// followed the lie, except through the others.
func TestALieThatTheEstimateFollowedIsNamedByTheTransfers(t *testing.T) {
	for seed := range uint64(300) {
		c := newCluster(seed, 3, 40_000)
		liar := fmt.Sprintf("n%d", seed%3)
		c.lies[liar] = 1_000_000
		var ms []Message
		for _, m := range c.talk(1, 10_000) {
			if m.From != Reference && m.To != Reference {
				ms = append(ms, m)
			}
		}
		if got := Close(c.clocks, ms); !slices.Equal(got.Liars, []string{liar}) {
			t.Errorf("seed %d: %s lies, named %v", seed, liar, got.Liars)
		}
	}
}

// A context node that feeds two generation nodes, which do not talk to each other: leaving out either end of the links that
// contradict explains them, but only one of the two can be off by a constant.
func TestAConstantLieIsNamedInAStar(t *testing.T) {
	for seed := range uint64(300) {
		c := newCluster(seed, 3, 40_000)
		liar := fmt.Sprintf("n%d", seed%3)
		c.lies[liar] = 1_000_000 * (1 - 2*int64(seed/3%2))
		var ms []Message
		for _, m := range c.talk(1, 10_000) {
			if m.From == "n0" && m.To != Reference || m.To == "n0" && m.From != Reference {
				ms = append(ms, m)
			}
		}
		got := Close(c.clocks, ms)
		if !slices.Equal(got.Liars, []string{liar}) {
			t.Errorf("seed %d: %s lies, named %v", seed, liar, got.Liars)
		}
		if got.ExcessNS < 500_000 || got.ExcessNS > 1_100_000 {
			t.Errorf("seed %d: a lie of 1 ms contradicts by %d ns", seed, got.ExcessNS)
		}
	}
}

func TestTooFewLinksNameNobodyAlone(t *testing.T) {
	clocks := []Clock{{"a", -10, 10}, {"b", -10, 10}}
	got := Close(clocks, []Message{{"a", "b", 1000, 0, 0}})
	if !slices.Equal(got.Liars, []string{"a", "b"}) || len(got.Cycle) == 0 {
		t.Errorf("liars %v, cycle %v", got.Liars, got.Cycle)
	}
	if !slices.Equal(got.Clocks, clocks) {
		t.Errorf("a contradiction changed the bounds to %v", got.Clocks)
	}
}

func TestSlackAndStrangersWeakenTheProof(t *testing.T) {
	clocks := []Clock{{"a", -10, 10}}
	for name, m := range map[string]Message{
		"the slack explains it":           {Reference, "a", 1000, 0, 1000},
		"a clock that is not known":       {Reference, "x", 1000, 0, 0},
		"a message of a clock to itself":  {"a", "a", 1000, 0, 0},
		"the bound just allows the order": {Reference, "a", 10, 0, 0},
	} {
		if got := Close(clocks, []Message{m}); got.Cycle != nil {
			t.Errorf("%s: cycle %v", name, got.Cycle)
		}
	}
	if got := Close(clocks, []Message{{Reference, "a", 11, 0, 0}}); !slices.Equal(got.Liars, []string{"a"}) {
		t.Errorf("one ns beyond the bound: %+v", got)
	}
}

func FuzzClose(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint8(9))
	f.Fuzz(func(t *testing.T, seed uint64, n, m uint8) {
		r := rand.New(rand.NewPCG(seed, 3))
		var clocks []Clock
		for i := range int(n % 12) {
			lo := r.Int64N(1000) - 500
			clocks = append(clocks, Clock{fmt.Sprint(i), lo, lo + r.Int64N(500)})
		}
		var ms []Message
		for range m {
			ms = append(ms, Message{fmt.Sprint(r.IntN(12)), fmt.Sprint(r.IntN(12)), r.Int64N(1000), r.Int64N(1500), r.Int64N(50)})
		}
		got := Close(clocks, ms)
		if len(got.Clocks) != len(clocks) || len(got.Liars) > 0 && got.Cycle == nil {
			t.Fatalf("%+v", got)
		}
		for i, c := range got.Clocks {
			if got.Cycle == nil && (c.LowerNS > c.UpperNS || c.LowerNS < clocks[i].LowerNS || c.UpperNS > clocks[i].UpperNS) {
				t.Fatalf("%v from %v", c, clocks[i])
			}
		}
	})
}

func BenchmarkClose(b *testing.B) {
	c := newCluster(1, 100, 100_000)
	ms := c.talk(1, 5_000)
	for b.Loop() {
		Close(c.clocks, ms)
	}
}
