package pool

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"meridian.internal/router/place"
	"meridian.internal/router/prefix"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

// sized is reg with KV blocks of 4 tokens.
func sized(name string) node.Info {
	i := reg(name, "h", infer.Load{})
	i.Model.TokensPerBlock = 4
	return i
}

func report(name string, seq int64, l infer.Load) node.Report {
	return node.Report{Role: node.Role(name[:3]), Name: name, ClockID: clock.MakeID(1, 1), Seq: seq, Load: l}
}

func (w *world) table(name string) place.Node {
	m := w.members[key(node.Role(name[:3]), name)]
	return m.table.nodes[m.at]
}

func TestAReportReplacesTheReservationsThatItIncludes(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("ctx0", "h", infer.Load{}))
	w.Put(reg("gen0", "h", infer.Load{}))
	queued := func(want int, why string) {
		t.Helper()
		if got := w.table("ctx0").QueuedTokens; got != want {
			t.Errorf("%s: %d tokens are queued, want %d", why, got, want)
		}
	}
	c := w.pick(t, Ask{Tokens: 1000})
	queued(1000, "reserved")
	c.Ctx.Sent()
	w.now.Add(int64(seenAfter) / 2)
	w.Report(report("ctx0", 1, infer.Load{WaitingTokens: 5}))
	queued(1005, "a report that may be from before the leg came adds to it")
	w.now.Add(int64(seenAfter))
	w.Report(report("ctx0", 2, infer.Load{WaitingTokens: 700, Running: 1}))
	queued(700, "the report includes the leg, and knows how far prefill is")
	w.Report(report("ctx0", 1, infer.Load{WaitingTokens: 9999}))
	queued(700, "an old report is ignored")
	other := report("ctx0", 9, infer.Load{WaitingTokens: 9999})
	other.ClockID = clock.MakeID(1, 2)
	w.Report(other)
	queued(700, "a report of another instance is ignored")
	w.now.Add(int64(staleAfter) + 1)
	w.tidy()
	queued(1000, "a load that is too old is not believed: what is reserved counts")
	if s := w.Snapshot()[0]; !s.LoadStale || s.Reserved != 1 {
		t.Errorf("status %+v", s)
	}
	c.Release()
	c.Release()
	queued(0, "released once")
	if w.members["ctx.ctx0"].unseen != (use{}) {
		t.Errorf("unseen %+v", w.members["ctx.ctx0"].unseen)
	}
}

func TestAReservationThatIsForgottenExpires(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("ctx0", "h", infer.Load{}))
	w.Put(reg("gen0", "h", infer.Load{}))
	c := w.pick(t, Ask{Tokens: 10, Life: time.Second})
	w.now.Add(int64(time.Second+lifeSlack) - 1)
	w.tidy()
	if w.members["gen.gen0"].all == (use{}) {
		t.Error("it expired early")
	}
	w.now.Add(2)
	w.tidy()
	for _, m := range w.members {
		if m.all != (use{}) || len(m.leases) != 0 {
			t.Errorf("%s: %+v is still reserved", m.info.Name, m.all)
		}
	}
	if w.counts.expired != 2 {
		t.Errorf("%d counted as expired, want 2", w.counts.expired)
	}
	c.Release() // late
	if w.members["gen.gen0"].all != (use{}) {
		t.Error("released twice")
	}
}

func share(w *world, router string, seq int64, full bool) Share {
	return Share{Router: router, Epoch: "e", Seq: seq, Full: full, Nodes: w.Reserved(full)}
}

// Two routers place at the same time and know of each other only what they tell: no node gets more than its part.
func TestTwoRoutersShareTheirReservations(t *testing.T) {
	a, b := newWorld(t, Options{}), newWorld(t, Options{})
	for _, n := range []string{"ctx0", "ctx1", "ctx2", "gen0", "gen1", "gen2"} {
		a.Put(reg(n, "h", infer.Load{}))
		b.Put(reg(n, "h", infer.Load{}))
	}
	a.Others(share(b, "b", 1, true))
	b.Others(share(a, "a", 1, true))
	count := map[string]int{}
	var held []*Choice
	for i := range 30 {
		for _, w := range []*world{a, b} {
			c := w.pick(t, Ask{Tokens: 100})
			held = append(held, c)
			count[c.Ctx.Name]++
			count[c.Gen.Name]++
			if w == a {
				b.Others(share(a, "a", int64(i+2), false))
			} else {
				a.Others(share(b, "b", int64(i+2), false))
			}
		}
	}
	for n, k := range count {
		if k < 19 || k > 21 {
			t.Errorf("%s got %d of 60, want about 20", n, k)
		}
	}
	if s := a.Snapshot()[0]; s.OthersReserved < 9 {
		t.Errorf("a knows of %d legs of b on %s, want about 10", s.OthersReserved, s.Info.Name)
	}
	for _, c := range held {
		c.Release()
	}
	a.Others(share(b, "b", 99, false))
	if s := a.Snapshot()[0]; s.OthersReserved != 0 || s.Reserved != 0 {
		t.Errorf("left behind: %+v", s)
	}
}

func TestChangesAreNewsWhereAnotherRouterIs(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("ctx0", "h", infer.Load{}))
	w.Put(reg("gen0", "h", infer.Load{}))
	w.pick(t, Ask{Tokens: 1})
	if len(w.News()) != 0 {
		t.Error("there is nobody to tell")
	}
	w.Others(Share{Router: "o", Epoch: "1", Seq: 1, Full: true})
	w.pick(t, Ask{Tokens: 1})
	if len(w.News()) != 1 {
		t.Error("the other router is not told")
	}
}

func TestTheWordOfOtherRoutersIsRepairedAndExpires(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("gen0", "h", infer.Load{}))
	w.Put(reg("gen1", "h", infer.Load{}))
	legs := func(n int, of string) ShareNode { return ShareNode{node.RoleGen, of, use{GenLegs: n}} }
	want := func(why string, a, b int) {
		t.Helper()
		if x, y := w.table("gen0").Sequences, w.table("gen1").Sequences; x != a || y != b {
			t.Errorf("%s: %d and %d sequences, want %d and %d", why, x, y, a, b)
		}
	}
	w.Others(Share{Router: "o", Epoch: "1", Seq: 5, Nodes: []ShareNode{legs(3, "gen0")}})
	want("changes without a beginning say nothing", 0, 0)
	w.Others(Share{Router: "o", Epoch: "1", Seq: 6, Full: true, Nodes: []ShareNode{legs(3, "gen0")}})
	w.Others(Share{Router: "o", Epoch: "1", Seq: 7, Nodes: []ShareNode{legs(2, "gen1")}})
	want("all, then a change", 3, 2)
	w.Others(Share{Router: "o", Epoch: "1", Seq: 7, Nodes: []ShareNode{legs(9, "gen1")}})
	want("told twice", 3, 2)
	w.Others(Share{Router: "o", Epoch: "1", Seq: 9, Full: true, Nodes: []ShareNode{legs(1, "gen1")}})
	want("what is not in a full message is gone: message 8 was lost", 0, 1)
	w.Others(Share{Router: "o", Epoch: "2", Seq: 1, Full: true, Nodes: []ShareNode{legs(4, "gen0")}})
	want("another process under the name", 4, 0)
	w.Put(reg("gen2", "h", infer.Load{}))
	w.Drop(node.RoleGen, "gen0", "test")
	w.Put(reg("gen0", "h", infer.Load{}))
	want("a node that comes back", 4, 0)
	w.now.Add(int64(peerExpires) + 1)
	w.tidy()
	want("a router that fell silent", 0, 0)
}

func FuzzParseShare(f *testing.F) {
	f.Add(`{"router":"r","epoch":"e","seq":1,"full":true,"nodes":[{"role":"gen","node":"g","ctx_legs":1,"ctx_tokens":2,"gen_legs":3,"gen_tokens":4}]}`)
	f.Add(`{"router":"r","epoch":"e","seq":1,"nodes":[{"gen_legs":-1}]}`)
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseShare([]byte(in))
		if err != nil {
			if !errors.Is(err, ErrBadShare) {
				t.Fatalf("error %v is not ErrBadShare", err)
			}
			return
		}
		for _, n := range s.Nodes {
			if n.CtxLegs < 0 || n.GenTokens < 0 {
				t.Fatalf("a negative sum was taken: %+v", n)
			}
		}
	})
}

func TestAPromptGoesWhereItsPrefixIs(t *testing.T) {
	x := prefix.New(0)
	w := newWorld(t, Options{CtxPolicy: place.KVAware, GenPolicy: place.KVAware, Index: x})
	for _, n := range []string{"ctx0", "ctx1", "ctx2", "gen0", "gen1"} {
		w.Put(sized(n))
	}
	ids := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	blocks := w.Hash("m", ids)
	if len(blocks) != 1 || len(blocks[0].Blocks) != 3 {
		t.Fatalf("hashed %+v", blocks)
	}
	for name, n := range map[string]int{"ctx1": 2, "gen1": 3} {
		slot, _, ok := w.Slot(node.Role(name[:3]), name)
		ev := kvevent.Event{Seq: 1, Epoch: 1, Type: kvevent.Stored}
		for _, h := range blocks[0].Blocks[:n] {
			ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
		}
		if !ok || !x.Apply(slot, []kvevent.Event{ev}) {
			t.Fatalf("%s is not followed", name)
		}
	}
	for range 3 {
		c := w.pick(t, Ask{Tokens: len(ids), Prefix: blocks})
		d := c.Decision
		if c.Ctx.Name != "ctx1" || c.Gen.Name != "gen1" || d.MatchedTokens == nil || *d.MatchedTokens != 8 || c.Cause != CausePair {
			t.Errorf("got %+v, matched %v", d, d.MatchedTokens)
		}
		if *d.Candidates[0].MatchedTokens != 8 || d.Candidates[0].Score != 4 || *d.Candidates[1].MatchedTokens != 0 {
			t.Errorf("candidates %+v", d.Candidates)
		}
		if c.Ctx.use.CtxTokens != 4 {
			t.Errorf("%d tokens are reserved for prefill, want the 4 that are not cached", c.Ctx.use.CtxTokens)
		}
		c.Release()
	}
	if c := w.pick(t, Ask{Tokens: len(ids)}); c.Ctx.use.CtxTokens != len(ids) || c.Decision.MatchedTokens != nil {
		t.Errorf("the match was left for the next request: %+v", c.Decision)
	}
	w.Drop(node.RoleCtx, "ctx1", "test")
	if c := w.pick(t, Ask{Tokens: len(ids), Prefix: blocks}); c.Ctx.Name == "ctx1" || *c.Decision.MatchedTokens != 0 {
		t.Errorf("after it left: %+v", c.Decision)
	}
	if st := x.Stats(); st.Blocks != 3 {
		t.Errorf("%d blocks in the index, want the 3 of gen1", st.Blocks)
	}
}

// line is a request that was served by ctx0 and gen, or by gen alone; prefill takes 1 us a token on ctx and genNS on gen.
func line(ctx, gen string, tokens, perToken, visible int64) *timeline.Line {
	chunks := &timeline.Columns{
		Names: []string{"tokens", "forward_start_ns", "sample_end_ns"}, Values: [][]int64{{tokens}, {1000}, {1000 + tokens*perToken}},
	}
	l := &timeline.Line{Outcome: phase.Finished, Decision: &phase.Decision{Ctx: ctx, Gen: gen}}
	if ctx == "" {
		l.Phases = []timeline.Phase{{Role: phase.Gen, Node: gen, Chunks: chunks}}
		return l
	}
	l.Phases = []timeline.Phase{{Role: phase.Ctx, Node: ctx, Chunks: chunks}}
	l.Handover = &timeline.Handover{Bytes: tokens * 10, Tokens: int(tokens), VisibleNS: &visible, WireNS: tokens * 5}
	return l
}

// Chunks that a pipeline runs at the same time take their time once.
func TestPrefillOfAPipelineIsNotTakenForSlower(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(sized("ctx0"))
	l := line("ctx0", "gen0", 1, 1, 0)
	l.Phases[0].Chunks.Values = [][]int64{{100, 100, 100}, {0, 50_000, 200_000}, {100_000, 150_000, 250_000}} // of 150 + 50 us
	for range 20 {
		w.Learn(l)
	}
	if got := w.Snapshot()[0].PrefillNS; got == nil || *got != 200_000/300 {
		t.Errorf("a token of prefill takes %v ns, want %d", got, 200_000/300)
	}
}

func TestPrefillIsDoneLocallyWhereThatIsFaster(t *testing.T) {
	for _, c := range []struct {
		name          string
		localMax      int
		cached        int // blocks of 4 on gen0
		handoverNS    int64
		genNS         int64 // a token
		queued        int   // on gen0
		cause, reason string
	}{
		{"little is left to compute and the hand-over is slow", 512, 24, 1_000_000, 2000, 0, CauseLocal, "local prefill: 4 uncached tokens"},
		{"the hand-over costs nothing", 512, 24, 0, 200_000, 0, CausePair, "kv_aware among 1 ctx"},
		{"more is left than is allowed", 3, 24, 1_000_000, 2000, 0, CausePair, "kv_aware among 1 ctx"},
		{"it is switched off", 0, 24, 1_000_000, 2000, 0, CausePair, "kv_aware among 1 ctx"},
		{"a queue on the generation node", 512, 24, 1_000_000, 2000, 5000, CausePair, "kv_aware among 1 ctx"},
		{"nothing is cached and it is slow", 512, 0, 10_000, 5000, 0, CausePair, "kv_aware among 1 ctx"},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := prefix.New(0)
			w := newWorld(t, Options{CtxPolicy: place.KVAware, GenPolicy: place.KVAware, Index: x, LocalMax: c.localMax})
			w.Put(sized("ctx0"))
			w.Put(sized("gen0"))
			for i := range int64(20) {
				w.Learn(line("ctx0", "gen0", 10+10*i, 1000, c.handoverNS))
				w.Learn(line("", "gen0", 10+10*i, c.genNS, 0))
			}
			ids := make([]int32, 100)
			blocks := w.Hash("m", ids)
			slot, _, _ := w.Slot(node.RoleGen, "gen0")
			ev := kvevent.Event{Seq: 1, Epoch: 1, Type: kvevent.Stored, Blocks: []kvevent.Block{}}
			for _, h := range blocks[0].Blocks[:c.cached] {
				ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
			}
			x.Apply(slot, []kvevent.Event{ev})
			w.Report(report("gen0", 1, infer.Load{WaitingTokens: c.queued}))
			got := w.pick(t, Ask{Tokens: 100, Prefix: blocks, Fallback: true})
			d := got.Decision
			if got.Cause != c.cause || !strings.Contains(d.Reason, c.reason) || d.LocalNS == nil || d.RemoteNS == nil {
				t.Fatalf("%s: %s, local %v, remote %v; want %s, %q", got.Cause, d.Reason, d.LocalNS, d.RemoteNS, c.cause, c.reason)
			}
			if (got.Ctx == nil) != (c.cause == CauseLocal) || (c.cause == CauseLocal) != (*d.LocalNS < *d.RemoteNS) && c.localMax == 512 {
				t.Errorf("ctx %v, local %d ns, remote %d ns", got.Ctx, *d.LocalNS, *d.RemoteNS)
			}
			got.Release()
			if m := w.members["gen.gen0"]; m.all != (use{}) {
				t.Errorf("%+v is left", m.all)
			}
		})
	}
}

func TestAPrefixIsFetchedFromAPeerWhereThatIsCheaper(t *testing.T) {
	for _, c := range []struct {
		name      string
		own, peer int // blocks of 4 on gen0, and on gen1 or ctx0
		lender    string
		fetchNS   int64 // a token, as measured; 0: never tried
		genNS     int64 // a token of prefill
		want      string
	}{
		{"from another generation node", 2, 20, "gen1", 100, 2000, "gen1:1"},
		{"from the context node", 0, 24, "ctx0", 100, 2000, "ctx0:1"},
		{"never tried: as fast as hand-overs", 2, 20, "gen1", 0, 2000, "gen1:1"},
		{"slower than computing", 2, 20, "gen1", 50_000, 2000, ""},
		{"the peer has no more", 20, 20, "gen1", 100, 2000, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := prefix.New(0)
			w := newWorld(t, Options{CtxPolicy: place.KVAware, GenPolicy: place.KVAware, Index: x, LocalMax: 512})
			for _, name := range []string{"ctx0", "gen0", "gen1"} {
				i := sized(name)
				i.KVAddr = name + ":1"
				w.Put(i)
			}
			for i := range int64(20) {
				w.Learn(line("ctx0", "gen0", 10+10*i, 4000, 1_000_000))
				w.Learn(line("", "gen0", 10+10*i, c.genNS, 0))
				if n := 10 + 10*i; c.fetchNS > 0 {
					l := line("", "gen0", 1, c.genNS, 0)
					f := &l.Phases[0]
					f.Peer, f.Bytes = c.lender, n*10
					f.Transfer = []timeline.Stamp{{Name: "requested_ns", Raw: 5}, {Name: "installed_ns", Raw: 5 + n*c.fetchNS}}
					w.Learn(l)
				}
			}
			blocks := w.Hash("m", make([]int32, 100))
			for name, n := range map[string]int{"gen0": c.own, c.lender: c.peer} {
				ev := kvevent.Event{Seq: 1, Epoch: 1, Type: kvevent.Stored, Blocks: []kvevent.Block{}}
				for _, h := range blocks[0].Blocks[:n] {
					ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
				}
				slot, _, _ := w.Slot(node.Role(name[:3]), name)
				x.Apply(slot, []kvevent.Event{ev})
			}
			w.Report(report("gen1", 1, infer.Load{Running: 50})) // gen0 is taken
			got := w.pick(t, Ask{Tokens: 100, Prefix: blocks, Fallback: true})
			if got.Gen.Name != "gen0" || got.Lender != c.want || (c.want != "") != strings.Contains(got.Decision.Reason, "are fetched from "+c.lender) {
				t.Errorf("%s fetches from %q, want %q: %s", got.Gen.Name, got.Lender, c.want, got.Decision.Reason)
			}
			got.Release()
		})
	}
}

// A fetch that took long once, when the machine stood, is tried again: what is not tried is not measured.
func TestOneSlowFetchIsForgotten(t *testing.T) {
	x := prefix.New(0)
	w := newWorld(t, Options{CtxPolicy: place.KVAware, GenPolicy: place.KVAware, Index: x, LocalMax: 512})
	for _, name := range []string{"ctx0", "gen0", "gen1"} {
		i := sized(name)
		i.KVAddr = name + ":1"
		w.Put(i)
	}
	for i := range int64(20) {
		w.Learn(line("ctx0", "gen0", 10+10*i, 2000, 1_000_000))
		w.Learn(line("", "gen0", 10+10*i, 2000, 0))
	}
	slow := line("", "gen0", 1, 2000, 0)
	f := &slow.Phases[0]
	f.Peer, f.Bytes = "gen1", 100
	f.Transfer = []timeline.Stamp{{Name: "requested_ns", Raw: 5}, {Name: "installed_ns", Raw: 10_000_005}}
	for range 3 {
		w.Learn(slow)
	}
	blocks := w.Hash("m", make([]int32, 100))
	ev := kvevent.Event{Seq: 1, Epoch: 1, Type: kvevent.Stored, Blocks: []kvevent.Block{}}
	for _, h := range blocks[0].Blocks[:20] {
		ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
	}
	slot, _, _ := w.Slot(node.RoleGen, "gen1")
	x.Apply(slot, []kvevent.Event{ev})
	w.Report(report("gen1", 1, infer.Load{Running: 50})) // gen0 is taken
	first, after := "", 0
	for range 300 {
		c := w.pick(t, Ask{Tokens: 100, Prefix: blocks, Fallback: true})
		if after == 0 {
			first = c.Lender
		}
		c.Release()
		if c.Lender != "" {
			break
		}
		after++
	}
	if first != "" || after == 300 {
		t.Errorf("the first fetch after the slow ones is from %q, one is tried after %d others; want none at first, and one later", first, after)
	}
}

func TestASlowPairIsAvoided(t *testing.T) {
	w := newWorld(t, Options{})
	for _, n := range []string{"ctx0", "ctx1", "gen0"} {
		w.Put(reg(n, "h", infer.Load{}))
	}
	for i := range int64(20) {
		w.Learn(line("ctx0", "gen0", 100+10*i, 1000, 2_000_000))
		w.Learn(line("ctx1", "gen0", 100+10*i, 1000, 100_000))
	}
	for range 6 {
		if c := w.pick(t, Ask{Tokens: 10}); c.Ctx.Name != "ctx1" {
			t.Errorf("got %s: its hand-over costs 1.9 ms more, which is 1900 tokens of prefill", c.Ctx.Name)
		}
	}
	pairs, n := w.Pairs()
	if n != 2 || pairs[0].CostNS == nil || *pairs[0].CostNS < 1_900_000 || pairs[0].BytesPerS == nil || *pairs[0].BytesPerS != 2_000_000_000 || pairs[0].Samples != 20 {
		t.Errorf("pairs %+v", pairs)
	}
}

func TestConversationsAreSticky(t *testing.T) {
	w := newWorld(t, Options{CtxPolicy: place.Conversation, GenPolicy: place.Conversation, Index: prefix.New(0)})
	for _, n := range []string{"ctx0", "ctx1", "ctx2", "gen0", "gen1", "gen2"} {
		w.Put(sized(n))
	}
	used := map[string]bool{}
	for k := range 20 {
		a := Ask{Tokens: 10, Conversation: fmt.Sprint("c", k)}
		b := Ask{Tokens: 10, Prefix: w.Hash("m", []int32{int32(k), 2, 3, 4, 5, 6})}
		for _, ask := range []Ask{a, b} {
			first := w.pick(t, ask)
			first.Release()
			used[first.Gen.Name] = true
			for range 5 {
				c := w.pick(t, ask)
				c.Release()
				if c.Ctx.Name != first.Ctx.Name || c.Gen.Name != first.Gen.Name {
					t.Errorf("conversation %d went to %s and %s, then to %s and %s", k, first.Ctx.Name, first.Gen.Name, c.Ctx.Name, c.Gen.Name)
				}
			}
		}
	}
	if len(used) != 3 {
		t.Errorf("20 conversations use %d of 3 nodes", len(used))
	}
}

// threadCPU is the CPU time of the thread: where other work runs, it is what a choice costs, and the time is what it waits for too.
func threadCPU(b *testing.B) int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return t.Nano()
}

// BenchmarkPick1000 places a prompt of 2,048 tokens with 1,000 nodes, half of them ctx, and reports the p99. Hashing is done
// before; every node holds some prefix of the prompt.
func BenchmarkPick1000(b *testing.B) {
	ids := make([]int32, 2048)
	for i := range ids {
		ids[i] = rand.Int32N(50000)
	}
	for _, policy := range place.Policies() {
		b.Run(string(policy), func(b *testing.B) {
			x := prefix.New(0)
			p, err := New(Options{Now: func() int64 { return 1 }, CtxPolicy: policy, GenPolicy: policy, Index: x, LocalMax: 512, Qualify: false})
			if err != nil {
				b.Fatal(err)
			}
			blocks := fill(p, x, ids)
			var took, cpu []int64
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			for b.Loop() {
				start, used := time.Now(), threadCPU(b)
				c, err := p.Pick(Ask{Model: "m", Tokens: len(ids), Prefix: blocks, Conversation: "c", Fallback: true})
				cpu = append(cpu, threadCPU(b)-used)
				took = append(took, time.Since(start).Nanoseconds())
				if err != nil {
					b.Fatal(err)
				}
				c.Release()
			}
			for _, m := range []struct {
				unit   string
				values []int64
			}{{"ns", took}, {"cpu-ns", cpu}} {
				slices.Sort(m.values)
				b.ReportMetric(float64(m.values[len(m.values)*99/100]), "p99-"+m.unit)
				b.ReportMetric(float64(m.values[len(m.values)/2]), "p50-"+m.unit)
			}
		})
	}
}

// fill makes 1,000 nodes with loads, measured pairs and prefixes of the prompt.
func fill(p *Pool, x *prefix.Index, ids []int32) []Prefix {
	for i := range 500 {
		for _, name := range []string{fmt.Sprintf("ctx%03d", i), fmt.Sprintf("gen%03d", i)} {
			info := reg(name, "h", infer.Load{WaitingTokens: i * 7 % 100, Running: i * 5 % 64, KVMaxBlocks: 4096, KVUsedBlocks: i})
			info.Model.TokensPerBlock = 32
			p.Put(info)
		}
	}
	blocks := p.Hash("m", ids)
	for slot, m := range p.slots {
		if len(blocks) > 0 {
			ev := kvevent.Event{Seq: 1, Epoch: 1, Type: kvevent.Stored}
			for _, h := range blocks[0].Blocks[:slot%(len(blocks[0].Blocks)+1)] {
				ev.Blocks = append(ev.Blocks, kvevent.Block{Hash: h})
			}
			x.Apply(prefix.Slot(slot), []kvevent.Event{ev})
		}
		if m.info.Role == node.RoleGen {
			for i := range 500 {
				p.Learn(line(fmt.Sprintf("ctx%03d", i), m.info.Name, int64(100+i), 1000, int64(1000*i)))
			}
		}
	}
	return blocks
}

// BenchmarkHash2048 is what naming the blocks of the prompt costs, before any choice.
func BenchmarkHash2048(b *testing.B) {
	p, err := New(Options{Now: func() int64 { return 1 }, CtxPolicy: place.KVAware, Index: prefix.New(0)})
	if err != nil {
		b.Fatal(err)
	}
	info := reg("ctx0", "h", infer.Load{})
	info.Model.TokensPerBlock = 32
	p.Put(info)
	ids := make([]int32, 2048)
	b.ReportAllocs()
	for b.Loop() {
		p.Hash("m", ids)
	}
}
