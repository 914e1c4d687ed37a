package kv

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/kvevent"
)

func tokens(n int, seed int32) []int32 {
	t := make([]int32, n)
	for i := range t {
		t[i] = seed*1000 + int32(i)
	}
	return t
}

// acquire asks for whole blocks.
func acquire(p *Pool, toks []int32, limit, total, spare int) ([]int32, Prefix, bool) {
	g, ok := p.Acquire(Want{Tokens: toks, Limit: limit, Total: total, Spare: spare})
	return g.Blocks, g.Prefix, ok
}

// filled allocates, publishes and returns the blocks of a whole sequence.
func filled(t *testing.T, p *Pool, toks []int32) []int32 {
	t.Helper()
	blocks, at, ok := acquire(p, toks, len(toks), len(toks), 0)
	if !ok {
		t.Fatalf("no room for %d tokens: %+v", len(toks), p.Stats())
	}
	p.Publish(at, toks, blocks, nil, len(toks)/p.PerBlock())
	return blocks
}

func check(t *testing.T, p *Pool, want Stats) {
	t.Helper()
	got := p.Stats()
	got.Totals = Totals{}
	if got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

func TestBlocksChangeTheirState(t *testing.T) {
	p := New(8, 4, 1, Events{})
	a := tokens(10, 1)
	blocks := filled(t, p, a) // two full blocks and a part
	check(t, p, Stats{Max: 8, Free: 5, Used: 3})
	p.Lease(blocks)
	p.Release(blocks)
	check(t, p, Stats{Max: 8, Free: 5, Leased: 3})
	p.Unlease(blocks)
	check(t, p, Stats{Max: 8, Free: 6, Cached: 2})
	again, at := p.Match(nil, a, 10)
	if !slices.Equal(again, blocks[:2]) || at.Blocks() != 2 {
		t.Errorf("matched %v, want %v", again, blocks[:2])
	}
	check(t, p, Stats{Max: 8, Free: 6, Used: 2})
	p.Retain(again)
	p.Release(again)
	check(t, p, Stats{Max: 8, Free: 6, Used: 2})
	p.Release(again)
	check(t, p, Stats{Max: 8, Free: 6, Cached: 2})
}

func TestMatchFindsTheLongestPrefix(t *testing.T) {
	p := New(16, 4, 1, Events{})
	p.Release(filled(t, p, tokens(12, 1)))
	other := append(tokens(8, 1), tokens(4, 2)...)
	tests := []struct {
		name   string
		tokens []int32
		limit  int
		want   int
	}{
		{"all of it", tokens(12, 1), 12, 3},
		{"no more than asked for", tokens(12, 1), 11, 2},
		{"a limit beyond the end", tokens(12, 1), 99, 3},
		{"a longer prompt", tokens(15, 1), 15, 3},
		{"up to the difference", other, 12, 2},
		{"nothing in common", tokens(12, 3), 12, 0},
		{"the middle is no prefix", tokens(12, 1)[4:], 8, 0},
		{"shorter than a block", tokens(3, 1), 3, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, _ := p.Match(nil, tt.tokens, tt.limit)
			if len(got) != tt.want {
				t.Errorf("%d blocks, want %d", len(got), tt.want)
			}
			p.Release(got)
		})
	}
	if s := p.Stats(); s.Reused != 13 || s.Missed != 3+1+3+2 { // 3: when it was first filled
		t.Errorf("reused %d, missed %d", s.Reused, s.Missed)
	}
}

func TestTheLongestUnusedIsEvictedEndFirst(t *testing.T) {
	var log []string
	p := New(4, 2, 1, Events{
		Stored:  func(_, _ blockhash.Hash, t []int32, _ kvevent.Tier) { log = append(log, fmt.Sprint("stored ", t)) },
		Removed: func(blockhash.Hash) { log = append(log, "removed") },
	})
	p.Release(filled(t, p, tokens(4, 1)))
	p.Release(filled(t, p, tokens(4, 2)))
	got, _ := p.Match(nil, tokens(4, 1), 4) // now the other one is the longest unused
	p.Release(got)
	blocks, ok := p.Alloc(nil, 1)
	if !ok {
		t.Fatal("no block")
	}
	one, _ := p.Match(nil, tokens(4, 1), 4)
	two, _ := p.Match(nil, tokens(4, 2), 4)
	if len(one) != 2 || len(two) != 1 {
		t.Errorf("%d and %d blocks are left, want 2 and 1", len(one), len(two))
	}
	if want := []string{"stored [1000 1001]", "stored [1002 1003]", "stored [2000 2001]", "stored [2002 2003]", "removed"}; !slices.Equal(log, want) {
		t.Errorf("events %q, want %q", log, want)
	}
	if _, ok := p.Alloc(blocks, 1); ok {
		t.Error("a used block was handed out")
	}
	check(t, p, Stats{Max: 4, Used: 4})
}

// leave has a request of four tokens, two blocks, leave them in the pool.
func leave(t *testing.T, p *Pool, seed int32, priority int, pin bool) {
	t.Helper()
	g, _, ok := acquire(p, tokens(4, seed), 4, 4, 0)
	if !ok {
		t.Fatal("no room")
	}
	p.Publish(Prefix{}, tokens(4, seed), g, nil, 2)
	p.Prefer(g, priority, pin)
	p.Release(g)
}

// found is how many blocks of what leave left are there; they are the newest then.
func found(p *Pool, seed int32) int {
	got, _ := p.Match(nil, tokens(4, seed), 4)
	p.Release(got)
	return len(got)
}

// TestContentOfMorePriorityStaysLonger, but not for ever, and the highest priority of those who used it counts.
func TestContentOfMorePriorityStaysLonger(t *testing.T) {
	const blocks = 8
	p := New(blocks, 2, 1, Events{})
	use := func(seed int32, priority int) { leave(t, p, seed, priority, false) }
	has := func(seed int32, want bool) {
		t.Helper()
		if n := found(p, seed); (n == 2) != want {
			t.Errorf("prompt %d: %d blocks are here, want them all %v", seed, n, want)
		}
	}
	use(1, 1)
	use(2, 0)
	use(3, -1)
	use(4, 0)
	use(5, 0) // takes the place of 3, though that was used after 1 and 2
	for seed, want := range map[int32]bool{1: true, 3: false, 4: true, 5: true} {
		has(seed, want)
	}
	use(3, -1)
	use(3, 0) // now as good as others
	use(6, -1)
	use(7, 0)
	has(3, true)
	has(6, false)
	for seed := range int32(stay * blocks) {
		use(100+seed, 0)
	}
	has(1, false)
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

// TestTheTiersBelowKeepTheOrderOfTheDevice: host and disk drop content of a low priority first and pinned content last, whoever used it
// first, also when it was on the device again meanwhile.
func TestTheTiersBelowKeepTheOrderOfTheDevice(t *testing.T) {
	for _, tier := range []kvevent.Tier{kvevent.Host, kvevent.Disk} {
		p := New(8, 2, 1, Events{})
		p.AddTier(tier, 16, nil)
		limit := 4
		use := func(seed int32, priority int, pin bool) {
			t.Helper()
			g, ok := p.Acquire(Want{Tokens: tokens(4, seed), Limit: limit, Total: 4})
			if !ok {
				t.Fatal("no room")
			}
			p.Loaded(g.Loads, len(g.Loads))
			p.Publish(g.Prefix, tokens(4, seed), g.Blocks, nil, 2)
			p.Prefer(g.Blocks, priority, pin)
			p.Release(g.Blocks)
			for m, ok := p.NextOffload(tier); ok; m, ok = p.NextOffload(tier) {
				p.Offloaded(m, true)
			}
		}
		has := func(seed int32, want bool) {
			t.Helper()
			found, _ := p.matchBelow(Prefix{hash: p.root}, tokens(4, seed), 4)
			for _, m := range found {
				p.tier(m.Tier).unpin(m.Slot)
			}
			if (len(found) == 2) != want {
				t.Errorf("%s: prompt %d: %d blocks are there, want them all %v", tier, seed, len(found), want)
			}
		}
		use(1, 0, true)
		use(2, 0, false)
		use(2, 1, false) // who used it again, on the device, counts for the copy
		use(3, 1, false)
		for seed := range int32(4) {
			use(10+seed, 0, false)
		}
		use(4, -1, false)
		use(5, 0, false) // takes the place of 4, the newest
		for seed, want := range map[int32]bool{1: true, 2: true, 3: true, 4: false, 5: true, 10: true} {
			has(seed, want)
		}
		for seed := range int32(8) {
			use(20+seed, 0, false)
		}
		has(10, false)
		has(2, true)
		use(3, 0, false) // is loaded, and stays what it was, here and there
		limit = 0
		use(2, 0, false) // is computed anew, likewise
		for limit = 4; limit < 12; limit++ {
			use(30+int32(limit), 0, false)
		}
		has(3, true)
		if a, b := found(p, 2), found(p, 3); a != 2 || b != 2 {
			t.Errorf("%s: of loaded and computed prompts %d and %d blocks are on the device, want all", tier, b, a)
		}
		limit = 4
		for seed := range int32(2 * stay * 16) {
			use(100+seed, 0, false)
		}
		for seed, want := range map[int32]bool{1: true, 2: false, 3: false} {
			has(seed, want)
		}
		if err := p.Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestPinnedContentOutlivesAllOther, but takes at most half of the pool, and no room that is needed.
func TestPinnedContentOutlivesAllOther(t *testing.T) {
	const blocks = 8
	p := New(blocks, 2, 1, Events{})
	use := func(seed int32, pin bool) { leave(t, p, seed, 0, pin) }
	has := func(seed int32, want int) {
		t.Helper()
		if n := found(p, seed); n != want {
			t.Errorf("prompt %d: %d blocks are here, want %d", seed, n, want)
		}
	}
	use(1, true)
	for seed := range int32(10 * stay * blocks) {
		use(100+seed, false)
	}
	has(1, 2)
	use(2, true)
	use(3, true) // more than half: 1 loses its pins
	for seed := range int32(2 * blocks) {
		use(100+seed, false)
	}
	has(1, 0)
	has(2, 2)
	has(3, 2)
	if held, ok := p.Alloc(nil, blocks); !ok || len(held) != blocks {
		t.Errorf("%d blocks where all are wanted", len(held))
	} else {
		p.Release(held)
	}
	has(2, 0)
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

func TestAcquireChangesNothingWhenItFails(t *testing.T) {
	p := New(6, 4, 1, Events{})
	p.Release(filled(t, p, tokens(16, 1)))
	before := p.Stats()
	if _, _, ok := acquire(p, tokens(16, 1), 16, 28, 0); ok {
		t.Error("7 of 6 blocks")
	}
	if _, _, ok := acquire(p, tokens(16, 1), 16, 24, 1); ok {
		t.Error("6 of 6 blocks with one to spare")
	}
	if after := p.Stats(); after != before {
		t.Errorf("stats %+v, before %+v", after, before)
	}
	blocks, at, ok := acquire(p, tokens(16, 1), 16, 24, 0)
	if !ok || len(blocks) != 6 || at.Blocks() != 4 {
		t.Errorf("%v, %+v, %v", blocks, at, ok)
	}
}

func TestTwinsCanBothBeExtended(t *testing.T) {
	p := New(16, 4, 1, Events{})
	a, b := tokens(12, 1), append(tokens(8, 1), tokens(4, 2)...)
	ba, _ := p.Alloc(nil, 3) // both computed at the same time, neither knew of the other
	bb, _ := p.Alloc(nil, 3)
	p.Publish(Prefix{}, a, ba, nil, 3)
	at := p.Publish(Prefix{}, b, bb, nil, 1)
	p.Publish(at, b, bb, nil, 3)
	p.Release(ba)
	p.Release(bb)
	check(t, p, Stats{Max: 16, Free: 12, Cached: 4})
	for _, toks := range [][]int32{a, b} {
		if got, _ := p.Match(nil, toks, 12); len(got) != 3 {
			t.Errorf("%v: %d blocks found, want 3", toks, len(got))
		}
	}
}

// TestACollisionIsAMiss gives a block the name of other tokens, as a hash collision would.
func TestACollisionIsAMiss(t *testing.T) {
	p := New(8, 4, 1, Events{})
	p.Release(filled(t, p, tokens(8, 1)))
	victim := tokens(8, 2)
	h1 := blockhash.Chain(1, victim[:4])
	id := p.index[blockhash.Chain(1, tokens(4, 1))]
	delete(p.index, p.blocks[id].hash)
	p.blocks[id].hash = h1
	p.index[h1] = id
	if got, _ := p.Match(nil, victim, 8); len(got) != 0 {
		t.Fatalf("attached %v, which holds other tokens", got)
	}
	p.Release(filled(t, p, victim)) // takes the name over
	got, _ := p.Match(nil, victim, 8)
	if len(got) != 2 {
		t.Errorf("%d blocks found after the collision, want 2", len(got))
	}
	p.Release(got)
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

// TestAChildOfAnotherParentIsAMiss evicts a parent and writes it again: the old child must not be attached by hash alone.
func TestAChildOfAnotherParentIsAMiss(t *testing.T) {
	p := New(8, 4, 1, Events{})
	a := tokens(8, 1)
	blocks := filled(t, p, a)
	p.Release(blocks)
	p.forget(blocks[0])
	parent := filled(t, p, a[:4])
	if got, _ := p.Match(nil, a, 8); len(got) != 1 {
		t.Errorf("%d blocks attached, want the new parent only", len(got))
	} else {
		p.Release(got)
	}
	p.Release(parent)
	p.Release(filled(t, p, a))
	if got, _ := p.Match(nil, a, 8); len(got) != 2 {
		t.Errorf("%d blocks after the child was written again, want 2", len(got))
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

func TestMisuseIsABrokenInvariant(t *testing.T) {
	for name, f := range map[string]func(p *Pool){
		"release of a free block":  func(p *Pool) { p.Release([]int32{0}) },
		"retain of a free block":   func(p *Pool) { p.Retain([]int32{0}) },
		"lease of a free block":    func(p *Pool) { p.Lease([]int32{0}) },
		"end of a lease not taken": func(p *Pool) { p.Unlease([]int32{0}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(New(2, 4, 1, Events{}))
		})
	}
}

// model is the plain way to say what the pool must do: content by block, holders by hand.
type model struct {
	refs, leases map[int32]int
	content      map[int32][]int32  // what the device would hold, whole prefix, by block
	below        map[Move][]int32   // by tier and slot
	moves        []Move             // to tiers below, in flight
	held         [][]int32          // one entry a holder
	tokens       map[*int32][]int32 // of a holder, by its block table
	at           map[*int32]Prefix
	leased       [][]int32
	told         map[blockhash.Hash]kvevent.Tier // by events
	loaded       map[kvevent.Tier]int
	copied       int
}

// events follow the pool as somebody else does, who hears nothing but them.
func (m *model) events(t *testing.T) Events {
	return Events{
		Stored: func(_, hash blockhash.Hash, _ []int32, in kvevent.Tier) { m.told[hash] = in },
		Moved: func(hash blockhash.Hash, from, to kvevent.Tier) {
			if was, ok := m.told[hash]; !ok || was != from || from == to {
				t.Errorf("%x moved from %s to %s; it was told to be in %s (%t)", hash, from, to, was, ok)
			}
			m.told[hash] = to
		},
		Removed: func(hash blockhash.Hash) {
			if _, ok := m.told[hash]; !ok {
				t.Errorf("%x was removed, and was nowhere", hash)
			}
			delete(m.told, hash)
		},
	}
}

// levels verifies that the events told the tier of everything.
func (m *model) levels(t *testing.T, p *Pool) {
	for hash, told := range m.told {
		if is, ok := p.levelOf(hash); !ok || is != told {
			t.Errorf("%x is in %s (%t), the events said %s", hash, is, ok, told)
		}
	}
	n := 0
	for _, id := range p.index {
		if len(p.blocks[id].tokens) == p.perBlock {
			n++
		}
	}
	for i, tier := range p.below {
		for hash := range tier.index {
			if is, _ := p.levelOf(hash); is == p.below[i].tier {
				n++
			}
		}
	}
	if n != len(m.told) {
		t.Errorf("%d contents have a name, the events told of %d", n, len(m.told))
	}
}

// TestRandomOperationsAgainstAModel drives the pool as sequences, transfers and copies between the tiers do, a million times,
// and compares it with the model.
func TestRandomOperationsAgainstAModel(t *testing.T) {
	const per = 3
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 9))
		m := model{
			refs: map[int32]int{}, leases: map[int32]int{}, content: map[int32][]int32{}, below: map[Move][]int32{}, told: map[blockhash.Hash]kvevent.Tier{}, tokens: map[*int32][]int32{}, at: map[*int32]Prefix{},
			loaded: map[kvevent.Tier]int{},
		}
		p := New(40, per, 1, m.events(t))
		if seed > 0 {
			p.AddTier(kvevent.Host, 25*int(seed), nil)
		}
		if seed > 1 {
			p.AddTier(kvevent.Disk, 40*int(seed), nil)
		}
		for step := range 250_000 {
			switch op := rng.IntN(12); {
			case op < 4:
				m.begin(t, p, rng, per)
			case op < 7 && len(m.held) > 0:
				i := rng.IntN(len(m.held))
				if toks := m.tokens[&m.held[i][0]]; rng.IntN(2) == 0 {
					p.PublishTail(m.at[&m.held[i][0]], toks, m.held[i])
				}
				p.Prefer(m.held[i], rng.IntN(3)-1, rng.IntN(4) == 0)
				p.Release(m.held[i])
				m.held = m.drop(m.held, i, m.refs)
			case op < 8 && len(m.held) > 0:
				b := m.held[rng.IntN(len(m.held))]
				p.Lease(b)
				m.leased = append(m.leased, b)
				for _, id := range b {
					m.leases[id]++
				}
			case op < 9 && len(m.leased) > 0:
				i := rng.IntN(len(m.leased))
				p.Unlease(m.leased[i])
				m.leased = m.drop(m.leased, i, m.leases)
			case op < 10:
				m.offload(p, kvevent.Host+kvevent.Tier(rng.IntN(2)))
			case op < 12 && len(m.moves) > 0:
				m.offloaded(p, rng)
			}
			m.compare(t, p, step)
			if step%100 == 0 {
				if err := p.Check(); err != nil {
					t.Fatalf("seed %d, step %d: %v", seed, step, err)
				}
				m.levels(t, p)
			}
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
		if m.copied == 0 || (m.loaded[kvevent.Host] == 0) != (seed == 0) || (m.loaded[kvevent.Disk] == 0) != (seed < 2) {
			t.Errorf("seed %d: %d parts copied, blocks loaded %v: the test proves less than it should", seed, m.copied, m.loaded)
		}
	}
}

// place is where a move ends below the device.
func place(m Move) Move { return Move{Tier: m.Tier, Slot: m.Slot} }

func (m *model) offload(p *Pool, tier kvevent.Tier) {
	move, ok := p.NextOffload(tier)
	if !ok {
		return
	}
	m.leases[move.Device]++
	m.below[place(move)] = m.content[move.Device]
	m.moves = append(m.moves, move)
}

func (m *model) offloaded(p *Pool, rng *rand.Rand) {
	i := rng.IntN(len(m.moves))
	move, ok := m.moves[i], rng.IntN(10) > 0
	m.moves = slices.Delete(m.moves, i, i+1)
	p.Offloaded(move, ok)
	if !ok {
		m.below[place(move)] = nil
	}
	m.drop([][]int32{{move.Device}}, 0, m.leases)
}

func (m *model) begin(t *testing.T, p *Pool, rng *rand.Rand, per int) {
	toks := make([]int32, 1+rng.IntN(18))
	for i := range toks {
		toks[i] = int32(rng.IntN(2)) // many shared prefixes
	}
	w := Want{Tokens: toks, Limit: rng.IntN(20), Total: len(toks), Spare: rng.IntN(3), Partial: rng.IntN(2) == 0}
	before := p.Stats()
	g, ok := p.Acquire(w)
	if !ok {
		if p.Stats() != before {
			t.Errorf("a failed Acquire left %+v, before %+v", p.Stats(), before)
		}
		return
	}
	at := g.Prefix
	for i, id := range g.Blocks {
		if i < at.Blocks() {
			if want := toks[:(i+1)*per]; !slices.Equal(m.content[id], want) {
				t.Errorf("block %d attached for %v holds %v", id, want, m.content[id])
			}
		} else if m.refs[id] > 0 || m.leases[id] > 0 {
			t.Errorf("block %d handed out though %d hold and %d lease it", id, m.refs[id], m.leases[id])
		} else {
			m.content[id] = toks[:min((i+1)*per, len(toks))]
		}
		m.refs[id]++
	}
	m.held = append(m.held, g.Blocks)
	m.fill(t, p, rng, &w, &g, per)
	for to := at.Blocks(); to <= len(toks)/per; to++ { // as prefill advances
		at = p.Publish(at, toks, g.Blocks, g.Columns, to)
	}
	m.tokens[&g.Blocks[0]], m.at[&g.Blocks[0]] = toks, at
}

// fill makes the copies of a grant.
func (m *model) fill(t *testing.T, p *Pool, rng *rand.Rand, w *Want, g *Grant, per int) {
	for i, move := range g.Loads {
		n := g.Prefix.Blocks() + i
		if want := w.Tokens[:(n+1)*per]; move.Device != g.Blocks[n] || !slices.Equal(m.below[place(move)], want) {
			t.Errorf("loaded for %v into %d: %+v holds %v", want, move.Device, move, m.below[place(move)])
		}
		m.loaded[move.Tier]++
	}
	good := len(g.Loads)
	if rng.IntN(10) == 0 { // what could not be loaded is computed
		good = rng.IntN(good + 1)
	}
	p.Loaded(g.Loads, good)
	if c := g.Copy; c.Tokens > 0 {
		n := g.Prefix.Blocks()
		if want := w.Tokens[:n*per+c.Tokens]; c.To != g.Blocks[n] || len(want) > w.Limit || !slices.Equal(m.content[c.From][:len(want)], want) {
			t.Errorf("part of %d tokens copied for %v from block %d, which holds %v", c.Tokens, want, c.From, m.content[c.From])
		}
		p.Release([]int32{c.From})
		m.copied++
	}
}

func (m *model) drop(list [][]int32, i int, counts map[int32]int) [][]int32 {
	for _, id := range list[i] {
		if counts[id]--; counts[id] == 0 {
			delete(counts, id)
		}
	}
	return slices.Delete(list, i, i+1)
}

func (m *model) compare(t *testing.T, p *Pool, step int) {
	leasedOnly := 0
	for id := range maps.Keys(m.leases) {
		if m.refs[id] == 0 {
			leasedOnly++
		}
	}
	if s := p.Stats(); s.Used != len(m.refs) || s.Leased != leasedOnly || s.Free+s.Used+s.Leased+s.Cached != s.Max {
		t.Errorf("step %d: %+v, the model has %d used, %d leased", step, s, len(m.refs), leasedOnly)
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	const blocks = 64
	p := New(1<<20, 32, 1, Events{})
	toks := tokens(blocks*32, 1)
	warm, at, _ := acquire(p, toks, len(toks), len(toks), 0)
	p.Publish(at, toks, warm, nil, blocks)
	for b.Loop() {
		got, _, _ := acquire(p, toks, len(toks), len(toks), 0)
		p.Release(got)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}

// BenchmarkOffloadAndLoad is the bookkeeping of a block that goes to the host and comes back.
func BenchmarkOffloadAndLoad(b *testing.B) {
	const blocks = 64
	p := New(2*blocks, 32, 1, Events{})
	p.AddTier(kvevent.Host, 1<<20, nil)
	sets := [][]int32{tokens(blocks*32, 1), tokens(blocks*32, 2), tokens(blocks*32, 3)}
	for i := 0; b.Loop(); i++ { // the device holds two of three, so that each is loaded when its turn comes
		toks := sets[i%3]
		g, _ := p.Acquire(Want{Tokens: toks, Limit: len(toks), Total: len(toks)})
		p.Loaded(g.Loads, len(g.Loads))
		p.Publish(g.Prefix, toks, g.Blocks, nil, blocks)
		p.Release(g.Blocks)
		for m, ok := p.NextOffload(kvevent.Host); ok; m, ok = p.NextOffload(kvevent.Host) {
			p.Offloaded(m, true)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}

// TestTheNextTurnCopiesTheEndOfTheLast is a conversation: the second prompt begins with all that the first one came to.
func TestTheNextTurnCopiesTheEndOfTheLast(t *testing.T) {
	told := 0
	p := New(8, 4, 1, Events{Stored: func(_, _ blockhash.Hash, _ []int32, _ kvevent.Tier) { told++ }, Removed: func(blockhash.Hash) { told-- }})
	p.AddTier(kvevent.Host, 8, nil)
	first := tokens(10, 1)
	blocks, at, _ := acquire(p, first, 0, 12, 0)
	at = p.Publish(at, first, blocks, nil, 2)
	p.PublishTail(at, first, blocks)
	p.Release(blocks)
	check(t, p, Stats{Max: 8, Free: 5, Cached: 3, Host: TierStats{Max: 8}})
	g, ok := p.Acquire(Want{Tokens: append(tokens(10, 1), 7, 7, 7), Limit: 12, Total: 13, Partial: true})
	if !ok || g.Prefix.Blocks() != 2 || g.Copy.Tokens != 2 || g.Copy.From != blocks[2] {
		t.Errorf("%+v, want two blocks and two tokens of block %d", g, blocks[2])
	}
	p.Release([]int32{g.Copy.From})
	p.Release(g.Blocks)
	for n := 0; ; n++ {
		m, ok := p.NextOffload(kvevent.Host)
		if !ok {
			if n != 2 {
				t.Errorf("%d blocks are offloaded, want the two full ones", n)
			}
			break
		}
		p.Offloaded(m, true)
	}
	if _, ok := p.Alloc(nil, 8); !ok || told != 2 {
		t.Errorf("%d blocks are told of, want the two that the host has", told)
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}
