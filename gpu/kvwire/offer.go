package kvwire

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"meridian.internal/shared/infer"
)

// Ends of an offer.
var (
	// ErrUnclaimed is the end of an offer whose deadline passed before any receiver asked for it.
	ErrUnclaimed = errors.New("kvwire: no receiver asked for the KV in time")
	// ErrReceiverLost is the end of an offer whose receiver went away before it acknowledged.
	ErrReceiverLost = errors.New("kvwire: the receiver went away")
	// ErrWithdrawn is the end of an offer that its own side gave up.
	ErrWithdrawn = errors.New("kvwire: withdrawn by the sender")
	// ErrDuplicate is returned when an id is already on offer or already asked for.
	ErrDuplicate = errors.New("kvwire: request id is already in use")
	// ErrClosed is returned when the server has ended.
	ErrClosed = errors.New("kvwire: closed")
)

// Export is the KV of one prompt, written while prefill runs. *engine.Export is one.
type Export interface {
	NextSpan(ctx context.Context) (infer.Span, error)            // io.EOF after the last
	Read(ctx context.Context, span infer.Span, dst []byte) error // canonical layout, block by block
	Blocks(span infer.Span) ([]int32, error)                     // that hold the span's tokens
	Release()                                                    // idempotent
}

// Report is what one transfer did, seen from one side. Stamps are of the process's steady clock; 0: not reached.
type Report struct {
	Peer        string
	Bytes       int64 // KV bytes, headers not counted
	Frames      int64
	Tokens      int // whose KV travelled
	TokensHeld  int // that the receiver already had
	RequestedNS int64
	StartNS     int64 // first KV byte read, or about to be written
	LastByteNS  int64
	InstalledNS int64 // receiver: the last bytes are in KV; sender: acknowledged
	WireNS      int64 // inside socket reads or writes of KV frames
	InstallNS   int64 // inside KV copies
}

// Offer is one prompt's KV under lease. It ends once: acknowledged, or with the reason why not.
type Offer struct {
	id     int64
	server *Server
	export Export
	ready  chan struct{} // closed when trailer or fault is set
	done   chan struct{} // closed when it ended and the export is released

	mu      sync.Mutex // guards what follows; short reads and writes only
	trailer Trailer
	fault   error
	isReady bool
	claimed bool
	ended   bool
	timer   *time.Timer             // runs from Ready until claimed
	stop    context.CancelCauseFunc // ends the claim or transfer in flight, which then ends the offer; nil: there is none
	report  Report
	end     error
}

// ID is the request id of the offer.
func (o *Offer) ID() int64 { return o.id }

// Done is closed when the offer has ended.
func (o *Offer) Done() <-chan struct{} { return o.done }

// Result is valid after Done: the report, and nil if the receiver acknowledged.
func (o *Offer) Result() (Report, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.report, o.end
}

// Ready gives the trailer: prefill is done. From now on a receiver has the lease time to ask.
func (o *Offer) Ready(t Trailer) { o.settle(t, nil) }

// Fail tells a receiver that there will be no KV, and ends the offer when nobody has asked.
func (o *Offer) Fail(err error) {
	o.settle(Trailer{}, err)
	o.mu.Lock()
	claimed := o.claimed
	o.mu.Unlock()
	if !claimed {
		o.finish(err)
	}
}

// Withdraw ends the offer, also under a receiver; the frame in flight ends first.
func (o *Offer) Withdraw() {
	o.settle(Trailer{}, ErrWithdrawn)
	o.mu.Lock()
	claimed := o.claimed
	if claimed {
		o.stop(ErrWithdrawn) // the session finishes the offer once nothing reads the export
	}
	o.mu.Unlock()
	if !claimed {
		o.finish(ErrWithdrawn)
	}
}

func (o *Offer) settle(t Trailer, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.isReady {
		return
	}
	o.isReady, o.trailer, o.fault = true, t, err
	close(o.ready)
	if err == nil && !o.claimed && !o.ended {
		o.timer = time.AfterFunc(o.server.lease, func() { o.expire() })
	}
}

func (o *Offer) expire() {
	o.mu.Lock()
	claimed := o.claimed
	o.mu.Unlock()
	if !claimed {
		o.finish(fmt.Errorf("%w: request %d, lease of %s", ErrUnclaimed, o.id, o.server.lease))
	}
}

// claim binds the offer to a session. False: it has ended or another has it.
func (o *Offer) claim(stop context.CancelCauseFunc) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended || o.claimed {
		return false
	}
	o.claimed, o.stop = true, stop
	if o.timer != nil {
		o.timer.Stop()
	}
	return true
}

// rebind hands a claimed offer from its claim to its transfer.
func (o *Offer) rebind(stop context.CancelCauseFunc) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stop = stop
}

// wait gives the trailer once prefill is done.
func (o *Offer) wait(ctx context.Context) (Trailer, error) {
	select {
	case <-o.ready:
	case <-ctx.Done():
		return Trailer{}, context.Cause(ctx)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.trailer, o.fault
}

// finish ends the offer once and releases the export. Nothing may be reading the export.
func (o *Offer) finish(err error) {
	o.mu.Lock()
	if o.ended {
		o.mu.Unlock()
		return
	}
	o.ended, o.end = true, err
	if o.timer != nil {
		o.timer.Stop()
	}
	o.mu.Unlock()
	o.server.forget(o)
	o.export.Release()
	close(o.done)
}

func (o *Offer) note(f func(*Report)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f(&o.report)
}
