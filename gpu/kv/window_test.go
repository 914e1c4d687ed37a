package kv

import (
	"math/rand/v2"
	"slices"
	"testing"

	"meridian.internal/shared/kvevent"
)

func TestFirstBlockIsTheFirstThatIsSeen(t *testing.T) {
	for _, tt := range []struct{ window, tokens, want int }{
		{4, 0, 0}, {4, 3, 0}, {4, 6, 1}, {4, 8, 1}, {4, 9, 2}, {4, 100, 32}, {1, 8, 2}, {1, 9, 3}, {1000, 999, 0},
	} {
		if got := FirstBlock(tt.window, tt.tokens, 3); got != tt.want {
			t.Errorf("window %d, %d tokens: block %d, want %d", tt.window, tt.tokens, got, tt.want)
		}
	}
}

// windowed is a pool with two windows.
func windowed(blocks int) *Pool {
	p := New(blocks, 3, 1, Events{})
	p.AddWindow(7, blocks, 6)
	p.AddWindow(2, blocks, 6)
	return p
}

// computed acquires, computes and gives back a whole sequence, whose blocks stay cached.
func computed(t *testing.T, p *Pool, toks []int32) {
	t.Helper()
	g, ok := p.Acquire(Want{Tokens: toks, Limit: len(toks), Total: len(toks)})
	if !ok {
		t.Fatalf("no room for %d tokens", len(toks))
	}
	at := g.Prefix
	for done := at.Blocks() * 3; done < len(toks); {
		done = min(done+3, len(toks))
		at = p.Publish(at, toks, g.Blocks, g.Columns, done/3)
		p.Slide(g.Columns, done)
	}
	p.Release(g.Blocks)
	p.ReleaseColumns(g.Columns)
}

func TestAPrefixIsOfUseOnlyIfTheWindowsHaveItsEnd(t *testing.T) {
	p := windowed(40)
	toks := tokens(60, 1)
	computed(t, p, toks)
	attached := func(limit int) (blocks, seen int) {
		g, ok := p.Acquire(Want{Tokens: toks, Limit: limit, Total: len(toks)})
		if !ok {
			t.Fatal("no room")
		}
		blocks, seen = g.Prefix.Blocks(), g.Columns[0].Attached
		p.Release(g.Blocks)
		p.ReleaseColumns(g.Columns)
		return blocks, seen
	}
	if n, seen := attached(57); n != 19 || seen != 2 {
		t.Errorf("%d blocks attached, %d of the window of 7; want 19 and the last 2", n, seen)
	}
	w := p.windows[0]
	at := Prefix{hash: p.root}
	for i, l := range p.known(toks, 57) {
		if id, ok := w.find(l.hash, l.parent, toks[3*i:3*i+3]); ok && i >= 12 {
			w.forget(id)
		}
		at.n++
	}
	if n, _ := attached(57); n != 12 {
		t.Errorf("%d blocks attached though the window has nothing from block 12 on", n)
	}
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

func TestALongPromptHoldsOnlyItsWindow(t *testing.T) {
	p := windowed(100)
	toks := tokens(270, 1)
	g, _ := p.Acquire(Want{Tokens: toks, Limit: 0, Total: len(toks)})
	most := MostHeld(7, 6, 3, 270)
	for done := 0; done < 270; done += 3 {
		if used := p.windows[0].Stats().Used; used > most {
			t.Fatalf("after %d tokens %d blocks of a window of 7 are held, at most %d may", done, used, most)
		}
		if !p.GrowColumns(g.Columns, done/3+1) {
			t.Fatalf("the next block is not held after %d tokens", done)
		}
		p.Slide(g.Columns, done+3)
	}
	if used := p.windows[0].Stats().Used; used != 2 || p.Stats().Used != 90 {
		t.Errorf("%d blocks of the window are held at the end, %d of the others; want 2 and 90", used, p.Stats().Used)
	}
}

// windowModel says by hand what each block of each pool holds, as the whole prefix up to its end.
type windowModel struct {
	t       *testing.T
	p       *Pool
	rng     *rand.Rand
	content []map[int32][]int32 // of the pool, then of its windows
	live    []*windowSeq
	leases  [][][]int32 // of each lease: blocks of each pool
	host    []map[int32][]int32
	moves   []Move // to the host, in flight
	loaded  int
	reused  int
	seen    int
	copied  int
}

type windowSeq struct {
	toks []int32
	g    Grant
	at   Prefix
	done int
}

const windowPer = 3

func (m *windowModel) pools() []*Pool { return append([]*Pool{m.p}, m.p.Windows()...) }

// tables are the block tables of a sequence.
func (s *windowSeq) tables() [][]int32 {
	tables := [][]int32{s.g.Blocks}
	for i := range s.g.Columns {
		tables = append(tables, s.g.Columns[i].Blocks)
	}
	return tables
}

// first is the first token that the next query of the sequence sees in each pool.
func (m *windowModel) first(at int) []int {
	first := []int{0}
	for _, w := range m.p.windows {
		first = append(first, max(at-w.tokens+1, 0))
	}
	return first
}

// seesItsOwn checks that all that the next query sees is the sequence's own.
func (m *windowModel) seesItsOwn(s *windowSeq) {
	for i, table := range s.tables() {
		for pos := m.first(s.done)[i]; pos < s.done; pos++ {
			id := table[pos/windowPer]
			if id < 0 || len(m.content[i][id]) <= pos || !slices.Equal(m.content[i][id][:pos+1], s.toks[:pos+1]) {
				m.t.Fatalf("pool %d: position %d of %v is in block %d, which holds %v", i, pos, s.toks, id, m.content[i][id])
			}
			m.seen++
		}
	}
}

func (m *windowModel) begin() {
	toks := make([]int32, 1+m.rng.IntN(40))
	for i := range toks {
		toks[i] = int32(m.rng.IntN(20) / 19) // many shared prefixes
	}
	w := Want{Tokens: toks, Limit: m.rng.IntN(len(toks)), Total: len(toks), Spare: m.rng.IntN(3), Partial: m.rng.IntN(2) == 0}
	held := m.rng.IntN(4) == 0
	if held {
		w.Limit, w.Total, w.Next, w.Partial = len(toks), len(toks)+1, len(toks), false
	}
	before := m.stats()
	g, ok := m.p.Acquire(w)
	if !ok {
		if after := m.stats(); !slices.Equal(before, after) {
			m.t.Fatalf("a failed Acquire left %+v, before %+v", after, before)
		}
		return
	}
	s := &windowSeq{toks: toks, g: g, at: g.Prefix, done: g.Prefix.Blocks() * windowPer}
	if len(g.Loads) > 0 && !m.load(s) {
		return
	}
	m.reused += s.done
	if c := g.Copy; c.Tokens > 0 {
		m.copyPart(s)
	}
	if held { // the rest comes from elsewhere, as far as the windows keep it
		first := []int{s.done}
		for _, win := range m.p.windows {
			first = append(first, max(s.done, FirstBlock(win.tokens, len(toks), windowPer)*windowPer))
		}
		s.done = len(toks)
		m.write(s, first)
		s.at = m.p.Publish(s.at, toks, g.Blocks, g.Columns, len(toks)/windowPer)
	}
	m.seesItsOwn(s)
	m.live = append(m.live, s)
}

// load brings what the host keeps, or fails in the middle: then the sequence lets go of everything.
func (m *windowModel) load(s *windowSeq) bool {
	good := len(s.g.Loads)
	if m.rng.IntN(10) == 0 {
		good = m.rng.IntN(good)
	}
	n := s.at.Blocks()
	for _, move := range s.g.Loads[:good] {
		m.content[move.Group][move.Device] = m.host[move.Group][move.Slot]
		if move.Group == 0 {
			n++
		}
	}
	m.p.Loaded(s.g.Loads, good)
	if good < len(s.g.Loads) {
		m.p.Release(s.g.Blocks)
		m.p.ReleaseColumns(s.g.Columns)
		return false
	}
	s.at, s.done = m.p.Publish(Prefix{}, s.toks, s.g.Blocks, s.g.Columns, n), n*windowPer
	m.loaded += good
	return true
}

// offload begins or ends a move to the host.
func (m *windowModel) offload() {
	if m.rng.IntN(2) == 0 {
		g := m.rng.IntN(len(m.content))
		if move, ok := m.p.Group(g).NextOffload(kvevent.Host); ok {
			m.host[g][move.Slot] = m.content[g][move.Device]
			m.moves = append(m.moves, move)
		}
		return
	}
	if len(m.moves) > 0 {
		move := m.moves[0]
		m.moves = m.moves[1:]
		m.p.Group(move.Group).Offloaded(move, m.rng.IntN(10) > 0)
	}
}

func (m *windowModel) copyPart(s *windowSeq) {
	n := s.g.Prefix.Blocks()
	from := []int32{s.g.Copy.From}
	for i := range s.g.Columns {
		from = append(from, s.g.Columns[i].Copy)
	}
	for i, table := range s.tables() {
		m.content[i][table[n]] = slices.Clone(m.content[i][from[i]])
	}
	m.p.Release(from[:1])
	m.p.ReleaseCopies(s.g.Columns)
	s.done += s.g.Copy.Tokens
	m.copied++
}

// write puts the tokens from first on, of each pool, up to s.done into the blocks.
func (m *windowModel) write(s *windowSeq, first []int) {
	for i, table := range s.tables() {
		for pos := first[i]; pos < s.done; pos++ {
			if table[pos/windowPer] < 0 {
				m.t.Fatalf("pool %d has no block for position %d", i, pos)
			}
			m.content[i][table[pos/windowPer]] = s.toks[:pos+1]
		}
	}
}

// step computes some tokens, known ones or one more.
func (m *windowModel) step(s *windowSeq) {
	n := 1 + m.rng.IntN(5)
	if s.done == len(s.toks) {
		s.toks, n = append(slices.Clone(s.toks), int32(m.rng.IntN(2))), 1
	}
	n = min(n, len(s.toks)-s.done)
	blocks := m.p.Blocks(s.done + n)
	if need := blocks - len(s.g.Blocks); need > 0 {
		var ok bool
		if s.g.Blocks, ok = m.p.Alloc(s.g.Blocks, need); !ok {
			s.toks = s.toks[:s.done]
			return
		}
	}
	if !m.p.GrowColumns(s.g.Columns, blocks) {
		if s.done+n < len(s.toks) {
			m.t.Fatalf("a window has no block for the prompt at %d", s.done)
		}
		s.toks = s.toks[:s.done]
		return
	}
	from := slices.Repeat([]int{s.done}, 1+len(s.g.Columns))
	s.done += n
	m.write(s, from)
	s.at = m.p.Publish(s.at, s.toks, s.g.Blocks, s.g.Columns, s.done/windowPer)
	m.p.Slide(s.g.Columns, s.done)
	m.seesItsOwn(s)
}

// lease keeps what the columns keep at their end, while the sequence lives and after.
func (m *windowModel) lease(s *windowSeq) {
	if s.done < len(s.toks) { // as of the admission, before anything slid beyond it
		lease := [][]int32{slices.Clone(s.g.Blocks)}
		for i := range s.g.Columns {
			lease = append(lease, slices.Clone(s.g.Columns[i].Kept()))
		}
		for i, p := range m.pools() {
			p.Lease(lease[i])
		}
		m.leases = append(m.leases, lease)
	}
}

func (m *windowModel) stats() []Stats {
	var out []Stats
	for _, p := range m.pools() {
		out = append(out, p.Stats())
	}
	return out
}

// compare counts the held blocks by hand.
func (m *windowModel) compare() {
	for i, p := range m.pools() {
		held := map[int32]bool{}
		for _, s := range m.live {
			if i == 0 {
				for _, id := range s.g.Blocks {
					held[id] = true
				}
				continue
			}
			s.g.Columns[i-1].Held(func(blocks []int32) {
				for _, id := range blocks {
					held[id] = true
				}
			})
		}
		if s := p.Stats(); s.Used != len(held) || s.Free+s.Used+s.Leased+s.Cached != s.Max || s.Allocated-s.Freed != int64(s.Max-s.Free) {
			m.t.Fatalf("pool %d: %+v; the model holds %d", i, s, len(held))
		}
	}
}

// TestRandomSequencesInWindows drives pools with windows a million times as sequences do, and compares what each query would see
// with a plain model.
func TestRandomSequencesInWindows(t *testing.T) {
	steps := 250_000
	if testing.Short() {
		steps = 20_000
	}
	for seed := range uint64(4) {
		m := windowModel{t: t, p: windowed(60), rng: rand.New(rand.NewPCG(seed, 3))}
		for _, p := range m.pools() {
			m.content, m.host = append(m.content, map[int32][]int32{}), append(m.host, map[int32][]int32{})
			if seed > 0 {
				p.AddTier(kvevent.Host, 30, nil)
			}
		}
		for i := range steps {
			switch op := m.rng.IntN(12); {
			case op < 2 || len(m.live) == 0:
				m.begin()
			case op < 4:
				m.offload()
			case op < 10:
				m.step(m.live[m.rng.IntN(len(m.live))])
			case op < 11:
				m.lease(m.live[m.rng.IntN(len(m.live))])
			default:
				j := m.rng.IntN(len(m.live))
				s := m.live[j]
				m.p.Release(s.g.Blocks)
				m.p.ReleaseColumns(s.g.Columns)
				m.live = slices.Delete(m.live, j, j+1)
			}
			for len(m.leases) > 2 {
				for k, p := range m.pools() {
					p.Unlease(m.leases[0][k])
				}
				m.leases = m.leases[1:]
			}
			m.compare()
			if i%100 == 0 {
				if err := m.p.Check(); err != nil {
					t.Fatalf("seed %d, step %d: %v", seed, i, err)
				}
			}
		}
		t.Logf("%d tokens reused, %d looked at, %d parts copied, %d blocks loaded", m.reused, m.seen, m.copied, m.loaded)
		if m.reused == 0 || m.copied == 0 || (m.loaded == 0) != (seed == 0) {
			t.Error("the test proves less than it should")
		}
	}
}

// BenchmarkAMillionBlocks is what a block costs when a sequence comes, is named and goes, in pools whose million blocks all hold
// something: of 16,384 prompts of 64 blocks a random one is here, or takes the place of another. It is the same with a window.
func BenchmarkAMillionBlocks(b *testing.B) {
	const blocks, prompts, per = 64, 1 << 14, 32
	for _, bb := range []struct {
		name   string
		known  int // prompts that take turns
		window int
	}{{"here", prompts, 0}, {"evicting", 2 * prompts, 0}, {"here, with a window", prompts, 512}} {
		b.Run(bb.name, func(b *testing.B) {
			p := New(blocks*prompts, per, 1, Events{})
			if bb.window > 0 {
				p.AddWindow(bb.window, blocks*prompts, 4096)
			}
			toks := make([]int32, blocks*per)
			run := func(prompt int) {
				for i := range toks {
					toks[i] = int32(prompt + i)
				}
				g, ok := p.Acquire(Want{Tokens: toks, Limit: len(toks), Total: len(toks)})
				if !ok {
					b.Fatal("no room")
				}
				p.Publish(g.Prefix, toks, g.Blocks, g.Columns, blocks)
				p.Release(g.Blocks)
				p.ReleaseColumns(g.Columns)
			}
			for i := range prompts {
				run(i)
			}
			rng := rand.New(rand.NewPCG(1, 1))
			b.ReportAllocs()
			for b.Loop() {
				run(rng.IntN(bb.known))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
		})
	}
}

// BenchmarkSlide is what a decoded token costs in a window: a look, until a block goes out of sight.
func BenchmarkSlide(b *testing.B) {
	const context = 1 << 17
	p := New(1<<12, 32, 1, Events{})
	p.AddWindow(512, 1<<12, 4096)
	toks := tokens(32, 1)
	n, g := context, Grant{}
	b.ReportAllocs()
	for b.Loop() {
		if n == context {
			p.Release(g.Blocks)
			p.ReleaseColumns(g.Columns)
			g, _ = p.Acquire(Want{Tokens: toks, Total: len(toks)})
			n = len(toks)
		}
		n++
		if !p.GrowColumns(g.Columns, p.Blocks(n)) {
			b.Fatal("no room")
		}
		p.Slide(g.Columns, n)
	}
}
