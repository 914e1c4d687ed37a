package remote

import (
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// verb is what an order asks for.
type verb int

const (
	submit verb = iota + 1
	reserve
	lend
	cancel  // a sequence
	release // an export
	start   // a reservation
	keep    // a reservation
	give    // a reservation back
	sign    // of life: send something
	drain   // refuse new work
	audit   // count leaked blocks and verify the books
	profile // open a window
	cease   // end a window
	stop    // end the engine
	last    // make a row of what no row tells
	read    // KV of an export
	write   // KV of a reservation
)

// order goes from the node to the rank, in gob. Bytes of KV follow it.
type order struct {
	Call    int64 // the answer names it; 0: none is wanted
	Do      verb
	Of      int64 // handle of a sequence and all that belongs to it; new with submit, reserve and lend
	Request infer.Request
	Left    time.Duration // until the request's deadline; 0: it has none
	Tokens  []int32       // lend
	First   []infer.Token // start
	Span    infer.Span    // read, write
	Count   int           // keep: tokens; read: bytes
	Iter    int64         // last
	JSON    []byte        // profile: rows.ProfileRequest, whose zeros and nulls gob does not tell apart
	Payload int           // bytes that follow
}

// item goes from the rank to the node: an answer, or something that happened. Several travel together.
type item struct {
	Call  int64  // that it answers; 0: none
	Fault *fault // of the call
	Of    int64  // handle

	// Answers.
	Count  int          // tokens of a reservation or what was lent; leaked blocks
	Held   int          // tokens that a reservation found here
	Report infer.Report // of a reservation
	JSON   []byte       // rows.ProfileWindow
	Rows   []rows.Row
	Carry  bool // there are counts that no row tells
	Iter   int64
	Books  *fault // what is wrong with them

	// What happened to a sequence.
	Tokens []infer.Token
	Done   *done
	Spans  []infer.Span // of its export
	End    *fault       // of its export

	KV      *kvevent.Event
	Drained bool
	Ended   bool // the engine has, by itself
}

// packet is what the rank sends: items in order, and how things are now.
type packet struct {
	Hello   *Hello // the first one has it
	Load    infer.Load
	Queued  int
	Taken   int64            // requests that the rank was given, as of Load
	Cards   []clock.Estimate // of the clocks of its cards to its own, with a hello and with ends of sequences
	Items   []item
	Payload int // bytes that follow, of the answer to a read
}

// Hello is what a rank says of itself when it is ready.
type Hello struct {
	Info      backend.Info
	ClockAddr string // where the clock of its stamps answers
}

// done is infer.Done without what gob does not carry: errors, and pointers to zero.
type done struct {
	Reason infer.FinishReason
	Stop   bool // StopToken is set
	Token  int32
	Fault  *fault
	Report infer.Report
	Energy bool // Report.EnergyJ is set
}

func doneOf(d *infer.Done) *done {
	if d == nil {
		return nil
	}
	out := &done{Reason: d.Reason, Fault: faultOf(d.Err), Report: d.Report, Energy: d.Report.EnergyJ != nil}
	if d.StopToken != nil {
		out.Stop, out.Token = true, *d.StopToken
	}
	return out
}

// done gives it back, as that of a rank.
func (d *done) done(rank int) *infer.Done {
	out := &infer.Done{Reason: d.Reason, Err: d.Fault.error(), Report: d.Report}
	out.Report.Rank = &rank
	if d.Stop {
		out.StopToken = &d.Token
	}
	if d.Energy && out.Report.EnergyJ == nil {
		out.Report.EnergyJ = new(float64)
	}
	return out
}
