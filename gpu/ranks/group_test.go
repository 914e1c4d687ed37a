package ranks

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

var small = sim.Config{Vocab: 1000, TokensPerBlock: 8, KVBlocks: 80, MaxSlots: 8}

// TestARankWithLessKVRefusesForItselfOnly: cards leave different room for blocks.
func TestARankWithLessKVRefusesForItselfOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		devices := []sim.Config{small, small, small}
		devices[0].KVBlocks, devices[2].KVBlocks = 10, 10
		devices[1].Cost.Step = 1e6
		r := newRigOf(t, Options{Engine: engine.Config{MaxBatchSize: 1, MaxWaiting: 1}}, devices)
		long := infer.Request{Prompt: make([]int32, 200), MaxTokens: 2, IgnoreEOS: true}
		for range 6 { // each rank has its turn
			s, err := r.Submit(long)
			if err != nil {
				t.Fatal(err)
			}
			if _, done, err := finish(s); err != nil || *done.Report.Rank != 1 {
				t.Fatalf("done %+v, %v, want it from rank 1", done, err)
			}
		}
		full := 0
		var open []Sequence
		for range 9 {
			s, err := r.Submit(long)
			if err == nil {
				open = append(open, s)
				continue
			}
			if full++; !errors.Is(err, engine.ErrQueueFull) {
				t.Errorf("rank 1 has no place: %v", err)
			}
		}
		for _, s := range open {
			if _, _, err := finish(s); err != nil {
				t.Error(err)
			}
		}
		if full < 3 {
			t.Errorf("%d of 9 were refused", full)
		}
		long.Prompt = make([]int32, 700)
		if _, err := r.Submit(long); !errors.Is(err, engine.ErrTooLong) {
			t.Errorf("for no rank: %v, want ErrTooLong", err)
		}
		r.stop()
	})
}

func TestTextsAreThoseOfOneRank(t *testing.T) {
	for _, ranks := range []int{1, 2, 4} {
		for _, overlap := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				random := rand.New(rand.NewPCG(uint64(ranks), 1))
				list := requests(random, 80, small.Vocab)
				want := texts(t, list, small)
				dev := small
				dev.Cost = sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000}
				r := newRig(t, ranks, Options{Engine: engine.Config{Overlap: overlap, PrefixReuse: true, MaxNumTokens: 40}}, dev)
				used := map[int]int{}
				var mu sync.Mutex
				var wg sync.WaitGroup
				for i, req := range list {
					later := time.Duration(random.IntN(20)) * time.Millisecond
					wg.Go(func() {
						time.Sleep(later)
						s, err := r.Submit(req)
						if err != nil {
							t.Error(err)
							return
						}
						got, done, err := finish(s)
						if err != nil || !slices.Equal(got, want[i]) || (ranks > 1) != (done.Report.Rank != nil) || ranks > 1 && *done.Report.Rank != s.Rank() {
							t.Errorf("request %d on rank %d: %v, %v, want %v, error %v", i, s.Rank(), got, done, want[i], err)
						}
						mu.Lock()
						used[s.Rank()]++
						mu.Unlock()
					})
				}
				wg.Wait()
				r.stop()
				if len(used) != ranks {
					t.Errorf("%d ranks ran something, want %d: %v", len(used), ranks, used)
				}
			})
		}
	}
}

// handOver hands the KV of a prompt from one group to another, as two nodes do, and decodes there. cached are the tokens that
// the first of them had.
func handOver(ctx, gen *rig, req infer.Request) (got []int32, cached int, err error) {
	req.Kind = infer.ContextOnly
	s, err := ctx.Submit(req)
	if err != nil {
		return nil, 0, err
	}
	x := s.Export()
	defer x.Release()
	req.Kind = infer.GenerationOnly
	h, err := gen.Reserve(context.Background(), req)
	if err != nil {
		return nil, 0, err
	}
	info := gen.info()
	for {
		span, err := x.NextSpan(context.Background())
		if err != nil {
			break
		}
		if span.TokenFrom = max(span.TokenFrom, h.Held()); span.TokenFrom >= span.TokenTo {
			continue
		}
		b := make([]byte, engine.SpanBytes(info, span))
		if err := x.Read(context.Background(), span, b); err != nil {
			return nil, 0, err
		}
		if err := h.Write(context.Background(), span, b); err != nil {
			return nil, 0, err
		}
	}
	first, done, err := finish(s)
	if err != nil {
		return nil, 0, err
	}
	seq, err := h.Start([]infer.Token{{ID: first[0]}})
	if err != nil {
		return nil, 0, err
	}
	got, _, err = finish(seq)
	return got, done.Report.CachedTokens, err
}

// checkPrefixesAreFound sends prompts of four families, which share all but their last block, one after another: each family stays on
// the rank of its first, and finds its KV there. It returns these ranks.
func checkPrefixesAreFound(t *testing.T, r *rig) (home map[int32]int) {
	t.Helper()
	home = map[int32]int{}
	for i := range int32(40) {
		family := i % 4
		prompt := make([]int32, 60)
		for k := range prompt {
			prompt[k] = (family*101 + int32(k)) % 900
		}
		prompt[59] = 900 + i // only the last block differs
		s, err := r.Submit(infer.Request{ID: int64(i), Prompt: prompt, MaxTokens: 2})
		if err != nil {
			t.Fatal(err)
		}
		_, done, err := finish(s)
		if err != nil {
			t.Fatal(err)
		}
		if i < 4 {
			home[family] = s.Rank()
		} else if s.Rank() != home[family] || done.Report.CachedTokens < 56 {
			t.Errorf("request %d of family %d: rank %d, %d tokens cached; its prefix is on rank %d", i, family, s.Rank(), done.Report.CachedTokens, home[family])
		}
	}
	return home
}

func TestAPrefixBringsARequestToTheRankThatHoldsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4, Options{Engine: engine.Config{PrefixReuse: true}}, small)
		home := checkPrefixesAreFound(t, r)
		used := map[int]bool{}
		for _, rank := range home {
			used[rank] = true
		}
		if len(used) != 4 {
			t.Errorf("homes are %v, want each family on a rank of its own", home)
		}
	})
}

// TestEachRankKeepsItsOwnBlocksOnDisk: ranks share the folder and its size, never files.
func TestEachRankKeepsItsOwnBlocksOnDisk(t *testing.T) {
	dir := t.TempDir()
	o := Options{Engine: engine.Config{PrefixReuse: true, DiskKVDir: dir, DiskKVBytes: 1 << 20}}
	prompt := func(id int64) infer.Request {
		req := infer.Request{ID: id, MaxTokens: 4, IgnoreEOS: true}
		for i := range int32(41) {
			req.Prompt = append(req.Prompt, int32(id)*100+i)
		}
		return req
	}
	const requests = 6
	submit := func(r *rig, id int64) Sequence {
		s, err := r.Submit(prompt(id))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	end := func(s Sequence) (ids []int32, cached int) {
		ids, done, err := finish(s)
		if err != nil {
			t.Fatal(err)
		}
		return ids, done.Report.CachedTokens
	}
	r := newRig(t, 2, o, small)
	var seqs []Sequence
	for id := range int64(requests) { // at once, so that each rank gets some
		seqs = append(seqs, submit(r, id))
	}
	var want, got [][]int32
	for _, s := range seqs {
		ids, cached := end(s)
		if want = append(want, ids); cached != 0 {
			t.Fatalf("%d tokens cached at the start", cached)
		}
	}
	size := func(rank int) int64 {
		info, err := os.Stat(filepath.Join(dir, fmt.Sprintf("rank-%d", rank), "kv.blocks"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	const block = 4 * 2 * 2 * 2 * 4 * 8                                                                                                   // bytes: layers, K and V, heads, head size, float32, tokens
	for end := time.Now().Add(time.Minute); size(0)+size(1) < 30*block || min(size(0), size(1)) < 5*block; time.Sleep(time.Millisecond) { // files are written in real time
		if time.Now().After(end) {
			t.Fatalf("%d and %d bytes on disk, want 30 blocks of %d bytes in all", size(0), size(1), block)
		}
	}
	r.stop()
	r = newRig(t, 2, o, small)
	for id := range int64(requests) { // one after another: load on its rank does not send one elsewhere
		ids, cached := end(submit(r, id))
		if got = append(got, ids); cached != 40 {
			t.Errorf("after a restart request %d has %d tokens cached, want 40", id, cached)
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("after a restart: %v, want %v", got, want)
	}
}

func TestTheLeastLoadedRankComesFirst(t *testing.T) {
	load := func(running, waiting int) infer.Load { return infer.Load{Running: running, WaitingTokens: waiting} }
	for _, c := range []struct {
		name string
		list []choice
		turn int
		want []int
	}{
		{"all alike: whose turn it is", []choice{{rank: 0}, {rank: 1}, {rank: 2}}, 1, []int{1, 2, 0}},
		{"less runs", []choice{{rank: 0, load: load(2, 0)}, {rank: 1, load: load(1, 0)}}, 0, []int{1, 0}},
		{"less waits", []choice{{rank: 0, load: load(1, 500)}, {rank: 1, load: load(2, 0)}}, 0, []int{1, 0}},
		{"just accepted", []choice{{rank: 0, queued: 1}, {rank: 1}}, 0, []int{1, 0}},
		{"the prefix is worth more than some load", []choice{{rank: 0}, {rank: 1, matched: 96, load: load(2, 0)}}, 0, []int{1, 0}},
		{"and less than much", []choice{{rank: 0}, {rank: 1, matched: 96, load: load(4, 0)}}, 0, []int{0, 1}},
	} {
		order(c.list, 100, c.turn)
		var got []int
		for _, x := range c.list {
			got = append(got, x.rank)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// generator is what the load counted itself.
type generator struct {
	mu                          sync.Mutex
	submitted, completed, ended int64
	prompt, cached, output      int64
}

func (l *generator) run(t *testing.T, r *rig, random *rand.Rand, list []infer.Request, until func() bool) {
	for i := 0; !until(); i++ {
		if random.IntN(8) == 0 { // all ranks may go idle
			time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
		}
		req := list[random.IntN(len(list))]
		req.ID = random.Int64()
		s, err := r.Submit(req)
		if err != nil {
			t.Error(err)
			return
		}
		if random.IntN(6) == 0 {
			time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond)
			s.Cancel()
		}
		_, done, err := finish(s)
		if err != nil {
			t.Error(err)
			return
		}
		l.mu.Lock()
		l.submitted++
		if done.Err == nil {
			l.completed++
		}
		if done.Report.FirstScheduledNS != 0 {
			l.prompt += int64(done.Report.PromptTokens)
			l.cached += int64(done.Report.CachedTokens)
		}
		l.output += int64(done.Report.OutputTokens)
		l.mu.Unlock()
	}
}

// TestEveryRowSetIsCompleteAndExact runs 10,000 iterations (fewer under the race detector) of 4 ranks with random loads, random delays of ranks and cancels.
func TestEveryRowSetIsCompleteAndExact(t *testing.T) {
	const ranks, iters = 4, iterations
	for _, c := range []struct {
		interval int
		all      bool
	}{{1, false}, {3, false}, {10, false}, {1, true}, {10, true}} {
		interval := c.interval
		t.Run(fmt.Sprintf("interval %d, gathered %t", interval, c.all), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				seed := rand.New(rand.NewPCG(uint64(interval), 7))
				devices := make([]sim.Config, ranks)
				for i := range devices {
					devices[i] = small
					devices[i].Shallow = true
					delays := rand.New(rand.NewPCG(seed.Uint64(), 1))
					devices[i].Cost = sim.Cost{Step: 20_000, PrefillToken: 500, Decode: 1000}
					devices[i].Sleep = func(d time.Duration) { time.Sleep(d + time.Duration(delays.IntN(200_000))) }
				}
				r := newRigOf(t, Options{Engine: engine.Config{Overlap: interval != 3, PrefixReuse: true, MaxNumTokens: 64}, Sink: rows.Sink{Interval: interval, KVInterval: interval, RequestStats: true, AllRanks: c.all}}, devices)
				list := requests(seed, 60, small.Vocab)
				var l generator
				var wg sync.WaitGroup
				for range 10 {
					random := rand.New(rand.NewPCG(seed.Uint64(), 2))
					wg.Go(func() { l.run(t, r, random, list, func() bool { return r.Load().Iter >= iters }) })
				}
				wg.Wait()
				time.Sleep(time.Second)
				synctest.Wait()
				checkSets(t, r.rows, ranks, interval)
				checkSums(t, r.rows, &l)
				covered := make([]int64, ranks)
				for _, row := range r.rows {
					if covered[row.Rank] += row.Covers; covered[row.Rank] != row.Iter {
						t.Fatalf("rank %d: rows up to iteration %d cover %d iterations", row.Rank, row.Iter, covered[row.Rank])
					}
				}
				r.stop()
				if n := r.aligner.Dropped(); n != 0 {
					t.Errorf("%d rows were dropped", n)
				}
			})
		})
	}
}

// TestRowsThatAreGatheredAreTheSame runs the same load twice. Nothing in it happens at the same moment of simulated time, so that
// it is the same to the nanosecond.
func TestRowsThatAreGatheredAreTheSame(t *testing.T) {
	for _, interval := range []int{1, 3} {
		var runs [2][]rows.Row
		for i := range runs {
			synctest.Test(t, func(t *testing.T) {
				devices := []sim.Config{small, small, small}
				for rank := range devices {
					devices[rank].Cost = sim.Cost{Step: 50_000 + 7001*float64(rank), PrefillToken: 1009, Decode: 2003}
				}
				r := newRigOf(t, Options{
					Engine: engine.Config{Overlap: true, PrefixReuse: true, MaxNumTokens: 40}, Sink: rows.Sink{Interval: interval, RequestStats: true, AllRanks: i == 1},
				}, devices)
				random := rand.New(rand.NewPCG(5, 6))
				var wg sync.WaitGroup
				for _, req := range requests(random, 60, small.Vocab) {
					time.Sleep(time.Duration(random.IntN(400_000)) + 13)
					if random.IntN(10) == 0 {
						time.Sleep(20 * time.Millisecond) // all go idle
					}
					s, err := r.Submit(req)
					if err != nil {
						t.Fatal(err)
					}
					wg.Go(func() { _, _, _ = finish(s) })
				}
				wg.Wait()
				time.Sleep(time.Second)
				synctest.Wait()
				r.stop()
				checkSets(t, r.rows, len(devices), interval)
				if told := r.ranks[0].(local).member.told; (told > 0) != (i == 1) {
					t.Errorf("%d rows of rank 0 were gathered", told)
				}
				if n := r.aligner.Dropped(); n != 0 {
					t.Errorf("%d rows were dropped", n)
				}
				runs[i] = r.rows
			})
		}
		if len(runs[0]) < 300/interval || len(runs[0]) != len(runs[1]) {
			t.Fatalf("%d rows, %d when they are gathered", len(runs[0]), len(runs[1]))
		}
		for i := range runs[0] {
			a, b := &runs[0][i], &runs[1][i]
			if a.WallNS, b.WallNS = 0, 0; !reflect.DeepEqual(a, b) {
				t.Fatalf("row %d of rank %d:\n%+v, gathered\n%+v", i, a.Rank, *a, *b)
			}
		}
	}
}

// TestCardsAreTheirRanks: the requests of a rank share what its own cards have used, and a row tells of the memory of these. What a card
// that two ranks use has drawn they share, by tokens; of its memory nobody can say what is whose. The process has its memory once.
func TestCardsAreTheirRanks(t *testing.T) {
	watts := []float64{100, 500, 300}
	for _, c := range []struct {
		cards  [][]int
		watts  [2]float64 // of a rank's own cards, and its part of the others
		memory [2]rows.Int
	}{
		{[][]int{{0}, {1, 2}}, [2]float64{100, 800}, [2]rows.Int{rows.Some(10), rows.Some(50)}},
		{[][]int{{0}, {1, 0}}, [2]float64{50, 550}, [2]rows.Int{{}, rows.Some(20)}},
		{[][]int{{2}, {2}}, [2]float64{150, 150}, [2]rows.Int{}},
		{nil, [2]float64{}, [2]rows.Int{}},
	} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			sink := rows.Sink{Interval: 1}
			sink.Memory = func(cards []int) rows.Memory {
				m := rows.Memory{CPU: rows.Some(5), Pinned: rows.Some(6)}
				for _, card := range cards {
					m.GPU = rows.Some(m.GPU.V + int64(10*(card+1)))
				}
				return m
			}
			sink.Energy = func(cards []int) (joules float64, ok bool) {
				for _, card := range cards {
					joules += watts[card] * time.Since(start).Seconds()
				}
				return joules, len(cards) > 0
			}
			dev := small
			dev.Cost = sim.Cost{Step: 1e6}
			r := newRig(t, 2, Options{Cards: c.cards, Sink: sink}, dev)
			var mu sync.Mutex
			var used [2]float64
			var wg sync.WaitGroup
			for i := range 8 {
				s, err := r.ranks[i%2].Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 400, IgnoreEOS: true}) // both are busy to the end
				if err != nil {
					t.Fatal(err)
				}
				wg.Go(func() {
					_, done, err := finish(s)
					if e := done.Report.EnergyJ; err != nil || (e != nil) != (c.watts[s.Rank()] > 0) {
						t.Errorf("cards %v, rank %d: energy %v, %v", c.cards, s.Rank(), e, err)
					} else if e != nil {
						mu.Lock()
						defer mu.Unlock()
						used[s.Rank()] += *e
					}
				})
			}
			wg.Wait()
			took := time.Since(start).Seconds()
			time.Sleep(time.Second) // all is told
			synctest.Wait()
			r.stop()
			for rank, w := range c.watts {
				if math.Abs(used[rank]-w*took) > 0.02*w*took {
					t.Errorf("cards %v: the requests of rank %d used %.2f J, its cards %.2f", c.cards, rank, used[rank], w*took)
				}
			}
			for i := range r.rows {
				row := &r.rows[i]
				want := rows.Memory{GPU: c.memory[row.Rank]}
				if row.Rank == 0 {
					want.CPU, want.Pinned = rows.Some(5), rows.Some(6)
				}
				if row.Memory != want {
					t.Fatalf("cards %v: a row of rank %d tells of %+v, want %+v", c.cards, row.Rank, row.Memory, want)
				}
			}
		})
	}
}

// checkSets verifies that rows come as sets of all ranks in the order of iterations, none left out.
func checkSets(t *testing.T, list []rows.Row, ranks, interval int) {
	t.Helper()
	if len(list)%ranks != 0 {
		t.Fatalf("%d rows of %d ranks", len(list), ranks)
	}
	last := int64(0)
	for i := 0; i < len(list); i += ranks {
		set := list[i : i+ranks]
		all := true
		on := map[int64]int64{} // the rank of a request
		for rank := range set {
			r := &set[rank]
			if r.Rank != int64(rank) || r.Iter != set[0].Iter || r.Drain != set[0].Drain {
				t.Fatalf("row %d: rank %d, iteration %d, drain %t in the set of iteration %d", i+rank, r.Rank, r.Iter, r.Drain, set[0].Iter)
			}
			all = all && r.Synthetic
			for _, q := range r.PerReq {
				if other, ok := on[q.ID]; ok {
					t.Fatalf("iteration %d: request %d is on rank %d and on rank %d", r.Iter, q.ID, other, r.Rank)
				}
				on[q.ID] = r.Rank
			}
			if r.PerReq != nil && int64(len(r.PerReq)) < r.Requests.Active {
				t.Errorf("iteration %d of rank %d: the states of %d requests, %d are active", r.Iter, r.Rank, len(r.PerReq), r.Requests.Active)
			}
			if r.Synthetic && (r.Batch.Scheduled.V != 0 || r.Forward.OK || r.IterLatency.OK || r.HostStep.OK) {
				t.Errorf("iteration %d: a synthetic row of rank %d tells of work: %+v", r.Iter, rank, *r)
			}
			if rank > 0 && (r.Requests.New|r.Requests.Completed|r.Requests.Queued) != 0 {
				t.Errorf("iteration %d: rank %d tells of the queue: %+v", r.Iter, rank, r.Requests)
			}
			if k := &r.KV; k.Sampled && k.Max != k.Free+k.Used {
				t.Errorf("iteration %d of rank %d: KV %+v", r.Iter, rank, *k)
			}
		}
		if set[0].Drain {
			if interval == 1 && set[0].Covers != 0 {
				t.Errorf("a drain covers %d iterations", set[0].Covers)
			}
			if all {
				t.Errorf("after iteration %d: a drain of nothing", set[0].Iter)
			}
			continue
		}
		if want := (last/int64(interval) + 1) * int64(interval); set[0].Iter != want {
			t.Fatalf("the set of iteration %d follows that of %d", set[0].Iter, last)
		}
		last = set[0].Iter
	}
}

func checkSums(t *testing.T, list []rows.Row, l *generator) {
	t.Helper()
	var got generator
	for i := range list {
		r := &list[i]
		got.submitted += r.Requests.New
		got.completed += r.Requests.Completed
		got.ended += r.Requests.Completed + r.Requests.Cancelled + r.Requests.Expired + r.Requests.Failed
		got.prompt += r.Sums.Prompt
		got.cached += r.Sums.Cached
		got.output += r.Sums.Output
	}
	if got.submitted != l.submitted || got.completed != l.completed || got.ended != l.submitted || got.output != l.output {
		t.Errorf("rows add up to %d new, %d completed, %d ended requests and %d tokens; the load was %d, %d, %d and %d",
			got.submitted, got.completed, got.ended, got.output, l.submitted, l.completed, l.submitted, l.output)
	}
	if got.prompt < l.prompt || got.cached < l.cached { // a cancelled request may have had its slot and no step
		t.Errorf("rows add up to %d prompt tokens, %d of them cached; the load saw %d and %d", got.prompt, got.cached, l.prompt, l.cached)
	}
}

func TestWhatIsLeftAtTheEndIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := small
		dev.Cost = sim.Cost{Step: 1e6}
		r := newRig(t, 3, Options{Engine: engine.Config{Overlap: true}, Sink: rows.Sink{Interval: 10}}, dev)
		var open []Sequence
		for i := range 9 {
			s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 200, IgnoreEOS: true})
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, s)
		}
		time.Sleep(33 * time.Millisecond)
		r.stop()
		for _, s := range open {
			if _, done, err := finish(s); err != nil || !errors.Is(done.Err, engine.ErrStopped) {
				t.Errorf("ended with %v, %v", done, err)
			}
		}
		created, failed := int64(0), int64(0)
		for _, row := range r.rows {
			created += row.Requests.New
			failed += row.Requests.Failed
		}
		checkSets(t, r.rows, 3, 10)
		if created != 9 || failed != 9 {
			t.Errorf("rows count %d new and %d failed requests, want 9 and 9", created, failed)
		}
	})
}

func TestIdleRanksMakeNoIteration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4, Options{Engine: engine.Config{Overlap: true}, Sink: rows.Sink{Interval: 1}}, small)
		s, err := r.Submit(infer.Request{ID: 1, Prompt: []int32{1}, MaxTokens: 3, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := finish(s); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		before := r.Load().Iter
		time.Sleep(time.Hour)
		if after := r.Load().Iter; after != before || before > 4 {
			t.Errorf("%d iterations for 3 tokens, and %d after an hour", before, after)
		}
	})
}

func TestALostDeviceEndsAllRanksWithAReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		devices := []sim.Config{small, small, small}
		for i := range devices {
			devices[i].Cost = sim.Cost{Step: 1e6}
		}
		errFell := errors.New("the device fell off")
		devices[2].Fail = func(iter int64) error {
			if iter > 10 {
				return errFell
			}
			return nil
		}
		r := newRigOf(t, Options{Engine: engine.Config{MaxBatchSize: 1}}, devices)
		r.runs = errFell
		var open []Sequence
		for i := range 12 {
			s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 200, IgnoreEOS: true})
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, s)
		}
		checkTold(t, open, 2, func(err error) bool { return errors.Is(err, collective.ErrLost) })
		r.stop()
	})
}

// checkTold waits for the ends of 12 requests of three ranks, of which one is lost: those of the others name it, and say as much as
// told wants.
func checkTold(t *testing.T, open []Sequence, lost int, told func(error) bool) {
	t.Helper()
	others := 0
	for _, s := range open {
		_, done, err := finish(s)
		if err != nil || done.Err == nil {
			t.Errorf("ended with %v, %v", done, err)
			continue
		}
		if s.Rank() == lost {
			continue
		}
		if others++; !strings.Contains(done.Err.Error(), fmt.Sprintf("rank %d", lost)) || !told(done.Err) {
			t.Errorf("a request of rank %d does not name the lost one: %v", s.Rank(), done.Err)
		}
	}
	if others < 4 {
		t.Errorf("%d requests on the other ranks, want about 8 of 12", others)
	}
}

func TestARankThatHangsIsNamedWithinTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		devices := []sim.Config{small, small}
		for i := range devices {
			devices[i].Cost = sim.Cost{Step: 1e6}
		}
		hang := make(chan struct{})
		devices[1].Sleep = func(time.Duration) { <-hang }
		r := newRigOf(t, Options{Deadline: 2 * time.Second}, devices)
		r.runs = collective.ErrMissed
		var open []Sequence
		for i := range 2 {
			s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 100, IgnoreEOS: true})
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, s)
		}
		begin := time.Now()
		_, done, err := finish(open[0])
		if err != nil || !errors.Is(done.Err, collective.ErrMissed) || !strings.Contains(done.Err.Error(), "[1]") || time.Since(begin) > 3*time.Second {
			t.Errorf("after %v: %v, %v", time.Since(begin), done, err)
		}
		close(hang)
		r.stop()
	})
}

func TestTheGroupIsOneCache(t *testing.T) {
	var got []string
	c := newCache(func(ev kvevent.Event) {
		switch ev.Type {
		case kvevent.Moved:
			got = append(got, fmt.Sprintf("%d %d %s>%s", ev.Seq, ev.Epoch, ev.Moved.From, ev.Moved.To))
		default:
			got = append(got, fmt.Sprintf("%d %d %s", ev.Seq, ev.Epoch, ev.Type))
		}
	}, 7, newRig(t, 1, Options{}, small).info())
	a, b := c.of(0), c.of(1)
	stored := kvevent.Event{Type: kvevent.Stored, Blocks: []kvevent.Block{{Hash: 5}}}
	removed := kvevent.Event{Type: kvevent.Removed, Removed: []blockhash.Hash{5}}
	moved := kvevent.Event{Type: kvevent.Moved, Moved: &kvevent.Move{Hash: 5, From: kvevent.Device, To: kvevent.Host}}
	for _, tell := range []func(){
		func() { a(stored) }, func() { b(stored) }, // news once
		func() { a(moved) }, func() { b(moved) }, // moved when no rank has it on its device any more
		func() { a(removed) }, func() { b(removed) }, // gone with the last
	} {
		tell()
	}
	if want := []string{"1 7 stored", "2 7 device>host", "3 7 removed"}; !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	if len(c.blocks) != 0 {
		t.Errorf("%d blocks are remembered that nobody has", len(c.blocks))
	}
}

// TestNothingThatWasCountedIsLostWhereverTheEndComes ends groups at random moments, also in the middle of a round.
func TestNothingThatWasCountedIsLostWhereverTheEndComes(t *testing.T) {
	for _, all := range []bool{false, true} {
		for seed := range uint64(60) {
			synctest.Test(t, func(t *testing.T) {
				random := rand.New(rand.NewPCG(seed, 4))
				dev := small
				dev.Shallow, dev.Cost = true, sim.Cost{Step: 20_000, PrefillToken: 500, Decode: 1000}
				dev.Sleep = func(d time.Duration) { time.Sleep(d + time.Duration(rand.IntN(100_000))) }
				r := newRig(t, 3, Options{Engine: engine.Config{Overlap: seed%2 == 0, PrefixReuse: true, MaxNumTokens: 64}, Sink: rows.Sink{Interval: 1 + int(seed%3), AllRanks: all}}, dev)
				list := requests(random, 40, small.Vocab)
				var l generator
				var wg sync.WaitGroup
				end := time.Now().Add(time.Duration(random.IntN(20_000)) * time.Microsecond)
				for range 6 {
					mine := rand.New(rand.NewPCG(random.Uint64(), 2))
					wg.Go(func() { l.run(t, r, mine, list, func() bool { return time.Now().After(end) }) })
				}
				wg.Wait()
				r.stop()
				checkSets(t, r.rows, 3, 1+int(seed%3))
				checkSums(t, r.rows, &l)
			})
		}
	}
}
