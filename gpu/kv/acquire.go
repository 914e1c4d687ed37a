package kv

// Want is what a sequence needs.
type Want struct {
	Tokens  []int32 // known ones, from the start
	Limit   int     // at most so many of them may come from what is here already
	Total   int     // tokens to make room for
	Next    int     // the position of the first query, where it is not the first token that is not here: others come from elsewhere
	Spare   int     // blocks that must be available beside
	Partial bool    // a part of a block may be copied
}

// Grant is what a sequence got: a block table, and how to fill the beginning of it.
type Grant struct {
	Blocks  []int32 // each held once
	Columns []Column
	Prefix  Prefix // the first blocks hold their content already
	// Loads bring the content of the next ones from tiers below, then that of blocks of the windows; the owner copies, calls
	// Loaded, and may then publish them.
	Loads []Move
	Copy  Copy // the one after these, if there are no Loads, gets a part
}

// Copy is a part of a block that is copied inside the device. From is held once more until the owner releases it. No Tokens: no
// copy.
type Copy struct {
	From, To int32
	Tokens   int
}

// Acquire holds the blocks that a sequence needs. If not enough are available it changes nothing and returns false.
func (p *Pool) Acquire(w Want) (Grant, bool) {
	totals, n := p.totals, p.Blocks(w.Total)
	limit, links := w.Limit, []link(nil)
	if p.windows != nil {
		links = p.reusable(&w)
		limit = min(limit, len(links)*p.perBlock)
		p.totals.Missed += int64(min(w.Limit, len(w.Tokens))/p.perBlock - len(links))
	}
	var g Grant
	g.Blocks, g.Prefix = p.Match(make([]int32, 0, n), w.Tokens, limit)
	loads, end := p.matchBelow(g.Prefix, w.Tokens, limit)
	need := n - len(g.Blocks)
	ok := p.Available() >= need+w.Spare
	var more []Move
	if ok && p.windows != nil {
		g.Columns, more, ok = p.columns(&w, links)
	}
	if !ok {
		p.Release(g.Blocks)
		for _, m := range loads {
			p.tier(m.Tier).unpin(m.Slot)
		}
		p.totals = totals
		return Grant{}, false
	}
	if w.Partial && len(loads)+len(more) == 0 {
		g.Copy = p.part(end, w, p.Available()-need-w.Spare)
	}
	g.Blocks, _ = p.Alloc(g.Blocks, need)
	if g.Copy.Tokens > 0 {
		g.Copy.To = g.Blocks[end.n]
		p.holdCopies(g.Columns, g.Copy, min(w.Limit, len(w.Tokens)) >= (end.n+1)*p.perBlock)
	}
	for i := range loads {
		loads[i].Device = g.Blocks[g.Prefix.n+i]
		p.tier(loads[i].Tier).moved.Loaded++
	}
	g.Loads = append(loads, more...)
	p.totals.Loaded += int64(len(loads))
	p.totals.Missed -= int64(len(loads))
	return g, true
}

// maxSiblings bounds the search for a part: a prefix that is shared by all can have any number of continuations.
const maxSiblings = 64

// part finds, among the blocks that follow a prefix, the one that has most of the next tokens at its beginning, and holds it.
func (p *Pool) part(at Prefix, w Want, available int) Copy {
	from := at.n * p.perBlock
	rest := w.Tokens[from:max(from, min(w.Limit, len(w.Tokens), from+p.perBlock))]
	family := p.children[at.serial]
	best := Copy{}
	for _, id := range family[max(0, len(family)-maxSiblings):] {
		if n := common(p.blocks[id].tokens, rest); n > best.Tokens && p.copies(id, w.Spare) {
			best = Copy{From: id, Tokens: n}
		}
	}
	if best.Tokens == 0 {
		return best
	}
	if p.unheld(best.From) && available < 1 {
		return Copy{} // holding it would take the last block
	}
	p.hold(best.From)
	p.totals.Partial++
	if len(rest) == p.perBlock {
		p.totals.Missed--
	}
	return best
}

// unheld tells whether to hold a named block makes one less available.
func (p *Pool) unheld(id int32) bool { return p.blocks[id].refs == 0 && p.blocks[id].leases == 0 }

// common is the number of equal tokens at the beginning.
func common(a, b []int32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
