// Package sched owns the decision what the next step runs: continuous batching with chunked prefill. It is pure: it
// knows sequences, slots and the KV pool, and no device, clock, channel or goroutine. One goroutine, the engine's,
// owns a Scheduler.
//
// It plans on submitted work, not on finished work, so that a step can be planned while the one before it still runs: a
// token that is being sampled counts as Pending, and blocks are given back only when no submitted step names them.
//
// A step takes decodes first, each one token, then prefill chunks with what is left of the token budget, both in the
// order of service (priority, then arrival). When a decode finds no block, the last sequence in that order is preempted:
// it gives its slot and blocks back, waits at its old place, and recomputes later; what it sampled is kept.
package sched

import (
	"slices"

	"meridian.internal/gpu/kv"
)

// Config bounds a step.
type Config struct {
	MaxBatchSize int // sequences with a slot
	MaxNumTokens int // query tokens of a step; at least MaxBatchSize, so that every decode fits
	// MicroBatches is how many steps are in flight at the same time and share the sequences that decode: each of them is in
	// one at a time, and a step takes its part of them. 0 or 1: a step takes all.
	MicroBatches int
	PrefixReuse  bool
	// OnAdmit is told when a sequence gets its slot and blocks; nil: nobody is.
	OnAdmit func(*Seq)
}

// Scheduler plans steps.
type Scheduler struct {
	cfg     Config
	pool    *kv.Pool
	windows []*kv.Pool // of pool
	waiting []*Seq     // in the order of service
	running []*Seq     // in the order of service
	slots   []int      // free ones
	order   uint64
	step    uint64 // number of the step being planned
	coming  int    // blocks that come back when steps in flight are done
	// The head of the queue found no room when so many blocks were available: it is not tried again before there are more.
	stuck      *Seq
	stuckAt    int
	stuckSpare int
	preempted  []*Seq
}

// New makes a scheduler over a pool that it shares with its owner.
func New(cfg Config, pool *kv.Pool) *Scheduler {
	s := &Scheduler{cfg: cfg, pool: pool, windows: pool.Windows(), slots: make([]int, cfg.MaxBatchSize)}
	for i := range s.slots {
		s.slots[i] = cfg.MaxBatchSize - 1 - i
	}
	return s
}

// Add queues a sequence.
func (s *Scheduler) Add(q *Seq) {
	s.order++
	q.order = s.order
	q.state = waiting
	s.waiting = insert(s.waiting, q)
}

// Waiting and Running are the sequences in the order of service. They are read only and valid until the next call.
func (s *Scheduler) Waiting() []*Seq { return s.waiting }

// Running are the sequences that hold a slot; see Waiting.
func (s *Scheduler) Running() []*Seq { return s.running }

// Ready lets a held sequence be scheduled, with so many of its known tokens, but not all, in KV.
func (s *Scheduler) Ready(q *Seq, computed int) {
	q.Held, q.Fixed = false, false
	q.Computed = computed
}

// Admit gives slots and blocks to waiting sequences as far as they reach, in order. Next does so too.
func (s *Scheduler) Admit() {
	for len(s.waiting) > 0 && len(s.slots) > 0 {
		q := s.waiting[0]
		if q.InFlight > 0 || !s.admit(q) {
			return
		}
		s.waiting = slices.Delete(s.waiting, 0, 1)
		s.running = insert(s.running, q)
		if s.cfg.OnAdmit != nil {
			s.cfg.OnAdmit(q)
		}
	}
}

func (s *Scheduler) admit(q *Seq) bool {
	spare := 0 // each running sequence may soon need a block; do not preempt it at once for a newcomer
	for _, r := range s.running {
		if !r.Fixed {
			spare++
		}
	}
	if s.stuck == q && s.available() <= s.stuckAt && spare >= s.stuckSpare {
		return false
	}
	w := kv.Want{Tokens: q.Tokens, Limit: min(q.Match, len(q.Tokens)-1), Total: len(q.Tokens), Spare: spare, Partial: !q.Held}
	if q.Held {
		w.Limit, w.Total, w.Next = min(q.Match, w.Total), w.Total+1, w.Total
	}
	if !s.cfg.PrefixReuse {
		w.Limit = 0
	}
	g, ok := s.pool.Acquire(w)
	if !ok {
		s.stuck, s.stuckAt, s.stuckSpare = q, s.available(), spare
		return false
	}
	s.stuck = nil
	q.Blocks, q.Columns, q.Prefix, q.Loads, q.Copy = g.Blocks, g.Columns, g.Prefix, g.Loads, g.Copy
	q.Cached = g.Prefix.Blocks()*s.pool.PerBlock() + g.Copy.Tokens
	q.Computed = q.Cached
	q.Slot = s.slots[len(s.slots)-1]
	s.slots = s.slots[:len(s.slots)-1]
	q.state, q.assigned = running, false
	return true
}

// available is the number of blocks that can be handed out, of whatever layers.
func (s *Scheduler) available() int {
	n := s.pool.Available()
	for _, w := range s.windows {
		n += w.Available()
	}
	return n
}

// Due tells whether there is something to plan, if there is room for it.
func (s *Scheduler) Due() bool {
	if len(s.waiting) > 0 && len(s.slots) > 0 {
		return true
	}
	for _, q := range s.running {
		if s.due(q) > 0 {
			return true
		}
	}
	return false
}

// Next plans a step and counts it as submitted: each item's sequence is in flight until Complete. It appends to dst, and
// returns the sequences that it preempted, valid until the next call.
func (s *Scheduler) Next(dst []Item) (items []Item, preempted []*Seq) {
	s.Admit()
	s.preempted = s.preempted[:0]
	s.step++
	budget := s.cfg.MaxNumTokens
	share := s.share()
	for i := 0; i < len(s.running); { // preemption takes sequences from the end
		q := s.running[i]
		if s.due(q) == 1 && min(budget, share) > 0 && s.grow(q, q.Computed+1, true) {
			dst = append(dst, s.take(q, 1))
			budget--
			share--
		}
		if q.state == running {
			i++
		}
	}
	for _, q := range s.running {
		n := min(s.due(q), budget)
		if n == 1 && share == 0 && s.cfg.MicroBatches > 1 && s.due(q) == 1 {
			continue // another step takes it
		}
		if n > 0 && q.step != s.step && s.grow(q, q.Computed+n, false) {
			dst = append(dst, s.take(q, n))
			budget -= n
		}
	}
	return dst, s.preempted
}

// share is how many sequences that decode a step may take.
func (s *Scheduler) share() int {
	if s.cfg.MicroBatches < 2 {
		return len(s.running)
	}
	n := 0
	for _, q := range s.running {
		if !q.Held {
			n++
		}
	}
	return (n + s.cfg.MicroBatches - 1) / s.cfg.MicroBatches
}

// due is the number of tokens of the sequence that wait for a step.
func (s *Scheduler) due(q *Seq) int {
	if q.Held || len(q.Loads) > 0 || q.Len() >= q.Limit || q.Pending > 0 && s.cfg.MicroBatches > 1 {
		return 0
	}
	return q.Len() - q.Computed
}

// take plans n tokens of the sequence.
func (s *Scheduler) take(q *Seq, n int) Item {
	it := Item{Seq: q, KVLen: q.Computed, Tokens: n, Sample: q.Computed+n == q.Len(), First: !q.assigned}
	if it.First {
		q.copying = q.Copy.Tokens > 0
	}
	q.assigned, q.step = true, s.step
	q.Computed += n
	q.InFlight++
	if it.Sample {
		q.Pending++
	}
	return it
}

// grow makes the block tables reach to so many tokens.
func (s *Scheduler) grow(q *Seq, tokens int, preempt bool) bool {
	blocks := s.pool.Blocks(tokens)
	for {
		need, ok := blocks-len(q.Blocks), true
		if need > 0 {
			q.Blocks, ok = s.pool.Alloc(q.Blocks, need)
		}
		if ok && s.pool.GrowColumns(q.Columns, blocks) {
			return true
		}
		// Blocks may come back with the steps in flight. Those of windows are not counted apart: they come with the others.
		if !preempt || !ok && s.pool.Available()+s.coming >= need || ok && s.coming > 0 {
			return false
		}
		victim := s.victim()
		if victim == nil {
			return false
		}
		s.preempt(victim)
		if victim == q {
			return false
		}
	}
}

// victim is the last sequence in the order of service that may be preempted. Decodes are planned in that order, so it is
// never one that the step holds already, unless it is the one that asks.
func (s *Scheduler) victim() *Seq {
	for i := len(s.running) - 1; i >= 0; i-- {
		if q := s.running[i]; !q.Fixed && !q.Held && len(q.Loads) == 0 {
			return q
		}
	}
	return nil
}

func (s *Scheduler) preempt(q *Seq) {
	s.leave(q)
	q.state = waiting
	s.waiting = insert(s.waiting, q)
	s.preempted = append(s.preempted, q)
}

// Finish ends a sequence, wherever it is. Its blocks go when the last step that names them is done.
func (s *Scheduler) Finish(q *Seq) {
	switch q.state {
	case running:
		s.leave(q)
	case waiting:
		s.waiting = remove(s.waiting, q)
	}
	q.state = ended
}

// leave takes slot and blocks from a running sequence.
func (s *Scheduler) leave(q *Seq) {
	s.running = remove(s.running, q)
	s.slots = append(s.slots, q.Slot)
	q.dropped = true
	s.coming += len(q.Blocks)
	if q.InFlight == 0 {
		s.drop(q)
	}
}

func (s *Scheduler) drop(q *Seq) {
	s.coming -= len(q.Blocks)
	if s.cfg.PrefixReuse && len(q.Columns) == 0 { // the next turn of a conversation goes on in the middle of a block
		s.pool.PublishTail(q.Prefix, q.Tokens[:q.written], q.Blocks)
	}
	s.pool.Prefer(q.Blocks, q.Priority, q.Pin)
	s.pool.Release(q.Blocks)
	s.dropCopy(q)
	s.pool.PreferColumns(q.Columns, q.Priority, q.Pin)
	s.pool.ReleaseColumns(q.Columns)
	q.Blocks, q.Columns, q.Prefix, q.Computed, q.Cached, q.written, q.dropped = nil, nil, kv.Prefix{}, 0, 0, 0, false
}

// dropCopy lets go of the block that a part was copied from.
func (s *Scheduler) dropCopy(q *Seq) {
	if q.Copy.Tokens > 0 {
		s.pool.Release([]int32{q.Copy.From})
		s.pool.ReleaseCopies(q.Columns)
		q.Copy, q.copying = kv.Copy{}, false
	}
}

// Loaded says that the Loads of a sequence, which Enter has counted, have ended: the first good ones brought their blocks, what
// the others should have brought must be computed. It completes the copy. False: the sequence waits again, since what its
// windows hold fits only the whole prefix.
func (s *Scheduler) Loaded(q *Seq, good int) bool {
	s.pool.Loaded(q.Loads, good)
	if good < len(q.Loads) && !q.dropped && len(q.Columns) > 0 {
		q.Loads, q.Match = nil, 0
		s.leave(q)
		q.state = waiting
		s.waiting = insert(s.waiting, q)
		s.Complete(q)
		return false
	}
	n, at := q.Prefix.Blocks(), q.Prefix
	for _, m := range q.Loads[:good] {
		if m.Group == 0 {
			n++
		} else {
			at = kv.Prefix{} // windows got blocks of what the others had already: these are named, too
		}
	}
	q.Loads = nil
	if good > 0 && !q.dropped {
		q.Prefix = s.pool.Publish(at, q.Tokens, q.Blocks, q.Columns, n)
		q.Cached = n * s.pool.PerBlock()
		q.Computed = q.Cached
	}
	s.Complete(q)
	return true
}

// Enter counts a copy that names the blocks of a sequence, until Complete.
func (s *Scheduler) Enter(q *Seq) { q.InFlight++ }

// Complete says that a submitted step, or a copy, that named the blocks of a sequence is done.
func (s *Scheduler) Complete(q *Seq) {
	q.InFlight--
	if q.copying {
		s.dropCopy(q) // steps end in their order: it was the first
	}
	if q.InFlight == 0 && q.dropped {
		s.drop(q)
	}
}

// Publish makes the full blocks of the first tokens of a sequence findable: they are written. All these tokens must be
// known. It must come before the Complete of the step that wrote them.
func (s *Scheduler) Publish(q *Seq, tokens int) {
	q.written = tokens
	if n := tokens / s.pool.PerBlock(); s.cfg.PrefixReuse && n > q.Prefix.Blocks() {
		q.Prefix = s.pool.Publish(q.Prefix, q.Tokens, q.Blocks, q.Columns, n)
	}
}

// Slide says that the first tokens of a sequence are written, and no step in flight begins before them. It must come between the
// Publish and the Complete of the step that wrote them.
func (s *Scheduler) Slide(q *Seq, tokens int) {
	if !q.dropped {
		s.pool.Slide(q.Columns, tokens)
	}
}

func insert(list []*Seq, q *Seq) []*Seq {
	at, _ := slices.BinarySearchFunc(list, q, func(a, b *Seq) int {
		if a.before(b) {
			return -1
		}
		return 1
	})
	return slices.Insert(list, at, q)
}

func remove(list []*Seq, q *Seq) []*Seq {
	if i := slices.Index(list, q); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}
