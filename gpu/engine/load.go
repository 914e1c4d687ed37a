package engine

import (
	"fmt"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
)

// Load is the engine's load as of its last step or command. Any goroutine may call it.
func (e *Engine) Load() infer.Load {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.load
}

// Queued is the number of accepted requests that never had a slot, as of now.
func (e *Engine) Queued() int { return int(e.queued.Load()) }

func (e *Engine) publishLoad() {
	stats := e.pool.Stats()
	l := infer.Load{
		Running: len(e.sched.Running()), Waiting: len(e.sched.Waiting()), Iter: e.iter,
		KVUsedBlocks: stats.Used + stats.Leased, KVMaxBlocks: stats.Max,
	}
	for _, q := range e.sched.Waiting() {
		l.WaitingTokens += len(q.Tokens)
	}
	for _, q := range e.sched.Running() {
		if !q.Held {
			l.WaitingTokens += max(q.Data.(*Sequence).target-q.Computed, 0)
		}
	}
	e.mu.Lock()
	last := e.load
	e.load = l
	e.mu.Unlock()
	if last.Iter = l.Iter; e.cfg.OnLoad != nil && last != l {
		e.cfg.OnLoad()
	}
}

// LeakedBlocks counts KV blocks that are held though no sequence, reservation or export that lives holds them. It is
// always 0. Call it while Run runs or after.
func (e *Engine) LeakedBlocks() int {
	n := 0
	e.query(func() {
		o := newOwned(&e.info)
		for _, list := range [][]*sched.Seq{e.sched.Running(), e.sched.Waiting()} { // of waiting ones those preempted with a step in flight
			for _, q := range list {
				o.sequence(q)
			}
		}
		for _, f := range e.flights {
			for _, it := range f.items {
				o.sequence(it.Seq)
			}
		}
		for x := range e.exports {
			o.mark(0, x.tables[0])
			for i := range x.columns {
				o.mark(i+1, x.columns[i].Kept())
			}
		}
		for m := range e.tiers.out {
			o.mark(m.Group, []int32{m.Device})
		}
		for s := range e.tiers.in {
			o.sequence(&s.q)
		}
		n = e.pool.Unowned(o[0])
		for i, w := range e.windows {
			n += w.Unowned(o[i+1])
		}
	})
	return n
}

// owned marks the blocks of each group of layers that have an owner.
type owned [][]bool

func newOwned(info *backend.Info) owned {
	o := owned{make([]bool, info.KVBlocks)}
	for _, w := range info.Windows {
		o = append(o, make([]bool, w.Blocks))
	}
	return o
}

func (o owned) mark(group int, blocks []int32) {
	for _, b := range blocks {
		o[group][b] = true
	}
}

func (o owned) sequence(q *sched.Seq) {
	o.mark(0, q.Blocks)
	if q.Copy.Tokens > 0 {
		o.mark(0, []int32{q.Copy.From})
	}
	for i := range q.Columns {
		c := &q.Columns[i]
		c.Held(func(blocks []int32) { o.mark(i+1, blocks) })
		if q.Copy.Tokens > 0 {
			o.mark(i+1, []int32{c.Copy})
		}
	}
}

// Check verifies the books: the states of all KV blocks, and that none leaked.
func (e *Engine) Check() error {
	var err error
	e.query(func() { err = e.pool.Check() })
	if err != nil {
		return err
	}
	if n := e.LeakedBlocks(); n > 0 {
		return fmt.Errorf("engine: %d KV blocks have leaked", n)
	}
	return nil
}

// poolEvents turns the pool's changes into events.
func (e *Engine) poolEvents() kv.Events {
	if e.cfg.KVEvents == nil {
		return kv.Events{}
	}
	emit := func(ev kvevent.Event) {
		e.eventSeq++
		ev.Seq, ev.Epoch = e.eventSeq, e.cfg.Epoch
		e.cfg.KVEvents(ev)
	}
	return kv.Events{
		Stored: func(parent, hash blockhash.Hash, tokens []int32, in kvevent.Tier) {
			emit(kvevent.Event{Type: kvevent.Stored, Parent: &parent, Blocks: []kvevent.Block{{Hash: hash, Tier: in, Tokens: tokens}}})
		},
		Moved: func(hash blockhash.Hash, from, to kvevent.Tier) {
			emit(kvevent.Event{Type: kvevent.Moved, Moved: &kvevent.Move{Hash: hash, From: from, To: to}})
		},
		Removed: func(hash blockhash.Hash) {
			emit(kvevent.Event{Type: kvevent.Removed, Removed: []blockhash.Hash{hash}})
		},
	}
}

// noteDeadline makes the loop wake up in time for a deadline; 0 is none.
func (e *Engine) noteDeadline(at int64) {
	if at != 0 && (e.deadline == 0 || at < e.deadline) {
		e.deadline = at
	}
}

// expire ends what is past its deadline. It looks at everything only when the earliest deadline has come.
func (e *Engine) expire() {
	now := e.cfg.Now()
	if e.deadline == 0 || now < e.deadline {
		return
	}
	e.deadline, e.step.barren = 0, false
	var late []*Sequence
	for _, list := range [][]*sched.Seq{e.sched.Waiting(), e.sched.Running()} {
		for _, q := range list {
			s := q.Data.(*Sequence)
			if at := s.deadline(); at != 0 && at <= now {
				late = append(late, s)
			} else {
				e.noteDeadline(at)
			}
		}
	}
	for _, s := range late {
		e.endLate(s)
	}
	for x := range e.exports {
		if x.deadlineNS != 0 && x.deadlineNS <= now {
			e.cfg.Logger.Warn("kv export expired", "request_id", x.s.req.ID)
			x.fail(ErrDeadline)
			e.unlease(x)
		} else {
			e.noteDeadline(x.deadlineNS)
		}
	}
}

// deadline is the earlier of the request's and, until it starts, its reservation's; 0 for none.
func (s *Sequence) deadline() int64 {
	at := s.req.DeadlineNS
	if s.q.Held && s.hold != nil && (at == 0 || s.hold.deadlineNS < at) {
		at = s.hold.deadlineNS
	}
	return at
}

// endLate ends a sequence whose deadline has passed.
func (e *Engine) endLate(s *Sequence) {
	done := infer.Done{Reason: infer.FinishExpired, Err: ErrDeadline}
	if s.q.Held && s.hold != nil {
		e.release(s.hold, done)
		return
	}
	e.end(s, done, nil)
}
