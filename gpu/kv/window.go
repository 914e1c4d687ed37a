package kv

import (
	"slices"

	"meridian.internal/shared/blockhash"
)

// window is the pool of layers whose queries see only the last tokens. A prefix is proved by the pool that it belongs to: there
// a content's parent is a content of that pool, so that a window can lose the beginning of a prefix and still know its end.
type window struct {
	*Pool
	tokens int // that a query sees, itself included
	ahead  int // tokens that steps in flight may be ahead of those that are done
}

// Column is a sequence's block table in a window. It has an entry for each block of the sequence, but blocks are held only
// where the sequence still writes or sees them: [from, to), which goes forward as the sequence is computed (Slide), and
// [tail, end), which its last known tokens leave behind. Entries elsewhere name nothing.
type Column struct {
	Blocks         []int32
	Copy           int32 // the block that the part of Grant.Copy comes from in this window
	Taken          int   // blocks handed out empty for it so far
	Attached       int   // blocks that held their content already
	Counted        int   // of Taken and Attached, by whoever keeps statistics
	from, to, tail int
	owed           int // blocks ahead that were not to be had yet
}

// FirstBlock is the first block that layers with a window keep of a sequence of so many tokens: its next query sees window-1
// tokens before itself, and so does that of whoever attaches its full blocks later.
func FirstBlock(window, tokens, perBlock int) int {
	return max(tokens/perBlock*perBlock-window+1, 0) / perBlock
}

// AddWindow gives layers with a window so many blocks. It must be called before the pool is used. Ahead is how many tokens the
// steps in flight may hold.
func (p *Pool) AddWindow(tokens, blocks, ahead int) {
	w := &window{Pool: New(blocks, p.perBlock, p.root, Events{}), tokens: tokens, ahead: ahead}
	w.group, w.of = len(p.windows)+1, p
	p.windows, p.windowPools = append(p.windows, w), append(p.windowPools, w.Pool)
}

// Windows are the pools of the windows, in the order of AddWindow.
func (p *Pool) Windows() []*Pool { return p.windowPools }

// Group is the pool itself for 0, that of window number i for i+1.
func (p *Pool) Group(group int) *Pool {
	if group == 0 {
		return p
	}
	return p.windows[group-1].Pool
}

// rolling is how many blocks a column holds ahead of those that it leaves behind: enough for all steps in flight.
func rolling(window, ahead, perBlock int) int { return (window+ahead+perBlock-1)/perBlock + 2 }

// MostHeld is the most blocks of a window that a sequence of so many tokens holds at once, when the steps in flight hold at
// most so many ahead.
func MostHeld(window, ahead, perBlock, tokens int) int {
	return min((tokens+perBlock-1)/perBlock, rolling(window, ahead, perBlock)+(window+perBlock-1)/perBlock+2)
}

// link is a block of a prefix that is known.
type link struct {
	hash   blockhash.Hash
	parent uint64
}

// reusable gives the known blocks of a prefix as far as the windows, too, have what is seen from there.
func (p *Pool) reusable(want *Want) []link {
	links := p.known(want.Tokens, want.Limit)
	run, best := make([]int, len(p.windows)), 0
	for n := 1; n <= len(links); n++ {
		good := true
		for i, w := range p.windows {
			if run[i]++; !w.has(links[n-1], p.blockTokens(want.Tokens, n-1)) {
				run[i] = 0
			}
			good = good && run[i] >= n-FirstBlock(w.tokens, max(n*p.perBlock, want.Next), p.perBlock)
		}
		if good {
			best = n
		}
	}
	return links[:best]
}

// known walks a prefix as Acquire does: blocks of the device first, then those of the tiers below.
func (p *Pool) known(tokens []int32, limit int) []link {
	at := Prefix{hash: p.root}
	var links []link
	device := true
	for want := min(limit, len(tokens)) / p.perBlock; at.n < want; at.n++ {
		part := p.blockTokens(tokens, at.n)
		l := link{blockhash.Chain(at.hash, part), at.serial}
		if device {
			var id int32
			if id, device = p.find(l.hash, at.serial, part); device {
				at.serial = p.blocks[id].serial
			}
		}
		if !device {
			t, slot := p.findBelow(l.hash, at.serial, part)
			if t == nil {
				break
			}
			at.serial = t.slots[slot].serial
		}
		at.hash = l.hash
		links = append(links, l)
	}
	return links
}

// blockTokens are those of block n of a sequence.
func (p *Pool) blockTokens(tokens []int32, n int) []int32 {
	return tokens[n*p.perBlock : (n+1)*p.perBlock]
}

func (w *window) has(l link, tokens []int32) bool {
	_, ok := w.find(l.hash, l.parent, tokens)
	if !ok {
		t, _ := w.findBelow(l.hash, l.parent, tokens)
		ok = t != nil
	}
	return ok
}

// columns holds the blocks that a sequence needs in each window when the prefix of the links is attached, and says which must be
// loaded. If a window has not enough it changes nothing and returns false.
func (p *Pool) columns(want *Want, links []link) (columns []Column, loads []Move, ok bool) {
	columns = make([]Column, len(p.windows))
	from := make([]int, len(p.windows)) // in loads, of each window
	for i, w := range p.windows {
		from[i] = len(loads)
		columns[i] = w.column(want, len(links))
		loads = w.attach(&columns[i], want, links, loads)
		if w.Available() < w.need(&columns[i], len(links))+want.Spare {
			for j := range i + 1 {
				p.windows[j].detach(&columns[j])
			}
			for _, m := range loads {
				p.Group(m.Group).tier(m.Tier).unpin(m.Slot)
			}
			return nil, nil, false
		}
	}
	for i, w := range p.windows {
		end := len(loads)
		if i+1 < len(from) {
			end = from[i+1]
		}
		w.take(&columns[i], want, len(links), loads[from[i]:end])
	}
	return columns, loads, true
}

// column is the empty block table of a sequence of which the first n blocks are here.
func (w *window) column(want *Want, n int) Column {
	c := Column{
		Blocks: slices.Repeat([]int32{none}, w.Blocks(want.Total)), Copy: none,
		from: FirstBlock(w.tokens, max(n*w.perBlock, want.Next), w.perBlock),
		tail: FirstBlock(w.tokens, max(len(want.Tokens), want.Next), w.perBlock),
	}
	c.to = min(max(c.from+rolling(w.tokens, w.ahead, w.perBlock), n), c.tail)
	return c
}

// attach holds what is on the device of the links that the column sees, and pins what a tier below has, which it appends to
// loads.
func (w *window) attach(c *Column, want *Want, links []link, loads []Move) []Move {
	for i := c.from; i < len(links); i++ {
		part := w.blockTokens(want.Tokens, i)
		if id, ok := w.find(links[i].hash, links[i].parent, part); ok {
			w.hold(id)
			c.Blocks[i] = id
			c.Attached++
			continue
		}
		t, slot := w.findBelow(links[i].hash, links[i].parent, part)
		t.pin(slot)
		loads = append(loads, Move{Group: w.group, Tier: t.tier, Slot: slot})
	}
	return loads
}

// need is how many blocks the column takes beside those that are attached; the first n blocks of its sequence are here.
func (w *window) need(c *Column, n int) int {
	return max(c.to, n) + len(c.Blocks) - max(c.tail, n) - max(n, c.from) + max(n-c.from, 0) - c.Attached
}

// detach takes back what attach has held.
func (w *window) detach(c *Column) {
	for _, id := range c.Blocks {
		if id != none {
			w.Release([]int32{id})
		}
	}
}

// take fills the column with empty blocks where it writes or loads.
func (w *window) take(c *Column, want *Want, n int, loads []Move) {
	for i := c.from; i < len(c.Blocks); i++ {
		switch {
		case i < n && c.Blocks[i] == none:
			w.fill(c, i)
			m := &loads[0]
			m.Device = c.Blocks[i]
			w.tier(m.Tier).moved.Loaded++
			w.totals.Loaded++
			loads = loads[1:]
		case i >= n && (i < c.to || i >= c.tail):
			w.fill(c, i)
		}
	}
	w.totals.Reused += int64(c.Attached)
	w.totals.Missed += int64(max(min(want.Limit, len(want.Tokens))/w.perBlock-max(n, c.from), 0))
}

// fill takes a block for an entry.
func (w *window) fill(c *Column, i int) bool {
	var one [1]int32
	got, ok := w.Alloc(one[:0], 1)
	if ok {
		c.Blocks[i] = got[0]
		c.Taken++
	}
	return ok
}

// advance takes the blocks that the column may have ahead. A block that it has let go of is another's, free or cached, unless a
// transfer still leases it: then there may be too few until that ends.
func (w *window) advance(c *Column) {
	for ; c.owed > 0 && c.to < c.tail && w.fill(c, c.to); c.owed-- {
		c.to++
	}
}

// Held calls f with the parts of the table whose blocks are held, the end of it first.
func (c *Column) Held(f func([]int32)) {
	if from := max(c.tail, c.from); from < len(c.Blocks) {
		f(c.Blocks[from:])
	}
	if c.from < c.to {
		f(c.Blocks[c.from:c.to])
	}
}

// ReleaseColumns lets go of all that columns hold; they are of no use after.
func (p *Pool) ReleaseColumns(columns []Column) {
	for i := range columns {
		columns[i].Held(p.windows[i].Release)
	}
}

// Slide says that so many tokens are computed and no step in flight begins before them: blocks that nobody sees any more are let
// go of, and the room goes to those that are still to be written.
func (p *Pool) Slide(columns []Column, tokens int) {
	for i := range columns {
		w, c := p.windows[i], &columns[i]
		for first := FirstBlock(w.tokens, tokens, p.perBlock); c.from < first && c.Blocks[c.from] != none; c.from++ {
			w.Release(c.Blocks[c.from : c.from+1])
			if c.to < c.tail {
				c.owed++
				w.advance(c)
			}
		}
	}
}

// GrowColumns makes columns reach to so many blocks; false if a window has not enough, or a block of them is held only after
// steps in flight are done.
func (p *Pool) GrowColumns(columns []Column, blocks int) bool {
	for i := range columns {
		w, c := p.windows[i], &columns[i]
		if w.advance(c); blocks > c.to && c.to < c.tail {
			return false
		}
		need := blocks - len(c.Blocks)
		if need <= 0 {
			continue
		}
		var ok bool
		if c.Blocks, ok = w.Alloc(c.Blocks, need); !ok {
			return false
		}
		c.Taken += need
	}
	return true
}

// Kept is the part of a column that stays held until its sequence ends.
func (c *Column) Kept() []int32 { return c.Blocks[c.tail:] }

// nameColumns names a block of a sequence in all windows in which it is held; at is the prefix before it.
func (p *Pool) nameColumns(columns []Column, at Prefix, hash blockhash.Hash, tokens []int32) {
	for i := range columns {
		if c := &columns[i]; at.n >= c.from && (at.n < c.to || at.n >= c.tail) {
			p.windows[i].name(c.Blocks[at.n], at, hash, tokens)
		}
	}
}

// copies tells whether a block of the pool can be copied from in all windows, too, with so many blocks to spare.
func (p *Pool) copies(id int32, spare int) bool {
	b := &p.blocks[id]
	for _, w := range p.windows {
		if _, ok := w.find(b.hash, b.parent, b.tokens); !ok || w.Available() <= spare {
			return false
		}
	}
	return true
}

// holdCopies holds in all windows what a part is copied from; full: of a block that was asked for as a whole.
func (p *Pool) holdCopies(columns []Column, c Copy, full bool) {
	b := &p.blocks[c.From]
	for i, w := range p.windows {
		columns[i].Copy, _ = w.find(b.hash, b.parent, b.tokens)
		w.hold(columns[i].Copy)
		w.totals.Partial++
		if full {
			w.totals.Missed--
		}
	}
}

// ReleaseCopies lets go of what holdCopies has held.
func (p *Pool) ReleaseCopies(columns []Column) {
	for i := range columns {
		if c := &columns[i]; c.Copy != none {
			p.windows[i].Release([]int32{c.Copy})
			c.Copy = none
		}
	}
}
