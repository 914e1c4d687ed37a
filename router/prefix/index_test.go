package prefix

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

type hash = blockhash.Hash

func stored(seq int64, hashes ...hash) kvevent.Event {
	ev := kvevent.Event{Epoch: 1, Seq: seq, Type: kvevent.Stored}
	for _, h := range hashes {
		ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
	}
	return ev
}

func removed(seq int64, hashes ...hash) kvevent.Event {
	return kvevent.Event{Epoch: 1, Seq: seq, Type: kvevent.Removed, Removed: hashes}
}

func match(x *Index, prompt ...hash) map[Slot]int {
	var held [MaxNodes]int32
	x.Match(held[:], prompt, 3)
	out := map[Slot]int{}
	for s, tokens := range held {
		if tokens > 0 {
			out[Slot(s)] = int(tokens / 3)
		}
	}
	return out
}

func wantMatch(t *testing.T, x *Index, prompt []hash, want map[Slot]int) {
	t.Helper()
	if got := match(x, prompt...); !maps.Equal(got, want) {
		t.Errorf("match of %v: %v, want %v", prompt, got, want)
	}
}

func TestMatchIsTheLongestPrefixOfEachNode(t *testing.T) {
	x := New(0)
	a, b, c := x.Join(), x.Join(), x.Join()
	x.Apply(a, []kvevent.Event{stored(1, 1, 2, 3)})
	x.Apply(b, []kvevent.Event{stored(1, 1), stored(2, 3)}) // 3 without 2 is no prefix
	x.Apply(c, []kvevent.Event{stored(1, 9)})
	wantMatch(t, x, []hash{1, 2, 3, 4}, map[Slot]int{a: 3, b: 1})
	wantMatch(t, x, []hash{7}, map[Slot]int{})
	wantMatch(t, x, nil, map[Slot]int{})
	x.Apply(a, []kvevent.Event{removed(2, 2)})
	wantMatch(t, x, []hash{1, 2, 3}, map[Slot]int{a: 1, b: 1})
}

// A plain map of sets is what the index must agree with, whatever the number of holders.
func TestIndexAgreesWithSets(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	x := New(0)
	const nodes, blocks = 100, 40
	var slots []Slot
	sets := map[Slot]map[hash]bool{}
	seqs := map[Slot]int64{}
	for range nodes {
		s := x.Join()
		slots = append(slots, s)
		sets[s] = map[hash]bool{}
	}
	for range 20000 {
		s := slots[rng.IntN(nodes)]
		h := hash(rng.IntN(blocks))
		seqs[s]++
		if rng.IntN(3) > 0 {
			x.Apply(s, []kvevent.Event{stored(seqs[s], h)})
			sets[s][h] = true
		} else {
			x.Apply(s, []kvevent.Event{removed(seqs[s], h)})
			delete(sets[s], h)
		}
	}
	for range 200 {
		prompt := make([]hash, 1+rng.IntN(6))
		for i := range prompt {
			prompt[i] = hash(rng.IntN(blocks))
		}
		want := map[Slot]int{}
		for s, set := range sets {
			n := 0
			for n < len(prompt) && set[prompt[n]] {
				n++
			}
			if n > 0 {
				want[s] = n
			}
		}
		wantMatch(t, x, prompt, want)
	}
	for _, s := range slots {
		x.Leave(s)
	}
	if st := x.Stats(); st.Blocks != 0 || len(x.blocks) != 0 || len(x.sets) != len(x.free) {
		t.Errorf("after all have left: %+v, %d entries, %d sets", st, len(x.blocks), len(x.sets))
	}
	if s := x.Join(); s != 0 {
		t.Errorf("the first free slot is %d, want 0", s)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	x := New(3)
	a := x.Join()
	x.Apply(a, []kvevent.Event{stored(1, 1, 2, 3, 4, 5)})
	if st := x.Stats(); st.Blocks != 3 || st.Dropped != 2 {
		t.Errorf("got %+v, want 3 blocks and 2 dropped", st)
	}
	wantMatch(t, x, []hash{1, 2, 3, 4, 5}, map[Slot]int{a: 3})
	x.Apply(a, []kvevent.Event{removed(2, 3, 5), stored(3, 3)})
	wantMatch(t, x, []hash{1, 2, 3}, map[Slot]int{a: 3})
}

func TestNodesWithoutASlotAreLeftOut(t *testing.T) {
	x := New(0)
	for range MaxNodes {
		if x.Join() == None {
			t.Fatal("no slot")
		}
	}
	if s := x.Join(); s != None || !x.Apply(s, []kvevent.Event{stored(1, 1)}) || !x.Heard(s, 1, 5) {
		t.Errorf("a node over the limit got slot %d, or was asked for a snapshot", s)
	}
}

// script is what a node sends, and whether the index then wants a snapshot.
type script struct {
	do   func(x *Index, s Slot) bool
	want bool // synced
}

func apply(events ...kvevent.Event) func(x *Index, s Slot) bool {
	return func(x *Index, s Slot) bool { return x.Apply(s, events) }
}

func reset(seq int64, blocks ...hash) func(x *Index, s Slot) bool {
	return func(x *Index, s Slot) bool {
		return x.Reset(s, kvevent.Snapshot{Epoch: 1, Seq: seq, Blocks: blocks})
	}
}

func heard(epoch, seq int64) func(x *Index, s Slot) bool {
	return func(x *Index, s Slot) bool { return x.Heard(s, epoch, seq) }
}

func TestGapsAreSeenAndClosedBySnapshots(t *testing.T) {
	other := func(ev kvevent.Event) kvevent.Event { ev.Epoch = 2; return ev }
	for _, c := range []struct {
		name   string
		script []script
		holds  []hash // of the blocks 1 to 9
	}{
		{"from the first event", []script{{apply(stored(1, 1), stored(2, 2)), true}}, []hash{1, 2}},
		{"told twice", []script{{apply(stored(1, 1), stored(2, 2), stored(1, 7)), true}}, []hash{1, 2}},
		{"a node that was there before", []script{{apply(stored(8, 8)), false}, {reset(7, 1, 2), true}}, []hash{1, 2, 8}},
		{"a gap", []script{{apply(stored(1, 1)), true}, {apply(removed(3, 1)), false}, {reset(2, 1, 2), true}}, []hash{2}},
		{"events in the snapshot already", []script{
			{apply(stored(1, 1), stored(3, 3)), false}, {apply(stored(4, 4)), false}, {reset(4, 1, 3, 4), true}, {apply(stored(5, 5)), true},
		}, []hash{1, 3, 4, 5}},
		{"a snapshot that is too old", []script{{apply(stored(5, 5)), false}, {reset(2, 1), false}, {reset(5, 1, 5), true}}, []hash{1, 5}},
		{"the last event was lost", []script{{apply(stored(1, 1)), true}, {heard(1, 1), true}, {heard(1, 2), false}, {reset(2, 1, 2), true}}, []hash{1, 2}},
		{"a report that is late", []script{{apply(stored(1, 1), stored(2, 2)), true}, {heard(1, 1), true}}, []hash{1, 2}},
		{"a new epoch from its start", []script{{apply(stored(1, 1)), true}, {apply(other(stored(1, 2))), true}}, []hash{2}},
		{"a new epoch in its middle", []script{{apply(stored(1, 1)), true}, {apply(other(stored(4, 4))), false}}, nil},
		{"nothing was ever stored", []script{{heard(1, 0), true}, {apply(stored(1, 1)), true}}, []hash{1}},
		{"the beginning of an epoch that is over, again", []script{
			{apply(other(stored(1, 9)), other(stored(2, 8))), true}, {apply(stored(1, 1), stored(2, 2)), true}, // the node began anew
			{apply(other(stored(1, 9))), true}, // believed until the node's next word
			{heard(1, 2), false}, {reset(2, 1, 2), true},
		}, []hash{1, 2}},
		{"the middle of an epoch that is over, again", []script{
			{apply(other(stored(1, 9)), other(stored(2, 8))), true}, {apply(stored(1, 1)), true},
			{apply(other(stored(2, 8))), false}, {heard(1, 1), false}, {reset(1, 1), true}, {apply(stored(2, 2)), true},
		}, []hash{1, 2}},
		{"events of an epoch that is over", []script{{apply(other(stored(9, 9))), false}, {reset(3, 1), true}}, []hash{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := New(0)
			s := x.Join()
			for i, step := range c.script {
				if got := step.do(x, s); got != step.want {
					t.Fatalf("step %d: synced %v, want %v", i, got, step.want)
				}
			}
			var got []hash
			for h := hash(1); h < 10; h++ {
				if len(match(x, h)) > 0 {
					got = append(got, h)
				}
			}
			if !slices.Equal(got, c.holds) {
				t.Errorf("holds %v, want %v", got, c.holds)
			}
		})
	}
}

// Whatever is lost or comes again, and whenever snapshots come, an index that says it is in step holds what the node holds.
func TestLostAndReplayedEventsNeverLeaveAWrongIndex(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	x := New(0)
	s := x.Join()
	truth := map[hash]bool{}
	seq := int64(0)
	synced := false
	inStep := 0
	var sent []kvevent.Event // of this epoch, after those of one that is over
	for i := range int64(20) {
		ev := stored(i+1, hash(rng.IntN(50)))
		ev.Epoch = 9
		sent = append(sent, ev)
	}
	for range 5000 {
		seq++
		h := hash(rng.IntN(50))
		ev := stored(seq, h)
		if truth[h] {
			ev = removed(seq, h)
		}
		truth[h] = !truth[h]
		sent = append(sent, ev)
		if rng.IntN(10) == 0 {
			from := rng.IntN(len(sent))
			synced = x.Apply(s, sent[from:min(len(sent), from+1+rng.IntN(30))])
		}
		if rng.IntN(20) > 0 {
			synced = x.Apply(s, []kvevent.Event{ev})
		}
		if !synced && rng.IntN(3) == 0 {
			snap := kvevent.Snapshot{Epoch: 1, Seq: seq}
			for h, there := range truth {
				if there {
					snap.Blocks = append(snap.Blocks, h)
				}
			}
			x.Reset(s, snap)
		}
		if synced = x.Heard(s, 1, seq); !synced {
			continue
		}
		inStep++
		for h := range hash(50) {
			if got := len(match(x, h)) > 0; got != truth[h] {
				t.Fatalf("after event %d: block %d held %v, want %v", seq, h, got, truth[h])
			}
		}
	}
	if inStep < 1000 {
		t.Errorf("in step only %d of 5000 times", inStep)
	}
}

func BenchmarkMatch64Blocks1000Nodes(b *testing.B) {
	x := New(0)
	prompt := make([]hash, 64)
	for i := range prompt {
		prompt[i] = hash(rand.Uint64())
	}
	for i := range 1000 {
		s := x.Join()
		x.Apply(s, []kvevent.Event{stored(1, prompt[:i%65]...)})
	}
	var held [1000]int32
	for b.Loop() {
		x.Match(held[:], prompt, 32)
	}
}
