package sched

import "meridian.internal/gpu/kv"

// Seq is one sequence as the scheduler sees it. The caller fills the first group before Add and appends to Tokens as
// tokens become known; the scheduler owns the rest, which the caller may read.
type Seq struct {
	Priority int     // higher goes first
	Pin      bool    // what it leaves in the pool stays before what is not pinned
	Tokens   []int32 // known tokens, prompt first; at least one
	Limit    int     // tokens in all, known and sampled, after which nothing more is scheduled
	Match    int     // at most this many tokens may come from cached blocks
	Held     bool    // gets slot and blocks (room for one token more), but is not scheduled until Ready
	Fixed    bool    // never preempted: a transfer depends on its blocks
	Data     any     // the caller's

	Slot     int         // valid while running
	Blocks   []int32     // block table; grows at its end, old slices of it stay valid
	Columns  []kv.Column // block tables of the windows, if there are any
	Computed int         // tokens in KV once all submitted steps have run
	Pending  int         // tokens that submitted steps sample and that are not known yet
	InFlight int         // submitted steps and copies that name the blocks
	Prefix   kv.Prefix
	Cached   int       // tokens that the last admission found here, in any tier
	Loads    []kv.Move // copies from tiers below the device that must end (Loaded) before the sequence is scheduled
	Copy     kv.Copy   // copy inside the device that comes before its first step

	order    uint64
	step     uint64 // the last step that was planned with it
	state    state
	assigned bool
	copying  bool // a submitted step makes the Copy
	written  int  // first tokens that are known and in KV
	dropped  bool // ended or preempted while in flight: the blocks go when InFlight is 0
}

type state int

const (
	waiting state = iota
	running
	ended
)

// Len is the number of tokens known or being sampled.
func (q *Seq) Len() int { return len(q.Tokens) + q.Pending }

// Tables are the block tables of all layers: that of those that see everything, then those of the windows.
func (q *Seq) Tables() [][]int32 {
	tables := make([][]int32, 0, 1+len(q.Columns))
	tables = append(tables, q.Blocks)
	for i := range q.Columns {
		tables = append(tables, q.Columns[i].Blocks)
	}
	return tables
}

// Running tells whether the sequence holds a slot.
func (q *Seq) Running() bool { return q.state == running }

// before is the order of service: priority, then arrival.
func (q *Seq) before(o *Seq) bool {
	return q.Priority > o.Priority || (q.Priority == o.Priority && q.order < o.order)
}

// Item is one sequence's part of a step.
type Item struct {
	Seq    *Seq
	KVLen  int  // tokens in KV before the step
	Tokens int  // query tokens
	Sample bool // the last query token's logits give a token
	First  bool // first item since the sequence got its slot: its Copy comes before it
}
