package clock

import (
	"errors"
	"fmt"
	"math"
	"sync"
)

// Sentinels of Push.
var (
	// ErrInvalid is returned when a push holds no usable offset: NaN, infinite, absurd, contradictory.
	ErrInvalid = errors.New("clock: invalid offset")
	// ErrStale is returned when a push is not newer than the one that is applied.
	ErrStale = errors.New("clock: stale offset")
	// ErrForeignEpoch is returned when a push was meant for another clock.
	ErrForeignEpoch = errors.New("clock: foreign epoch")
)

// maxOffsetS is 31 years: steady clocks count from a boot, so nothing real is further away.
const maxOffsetS = 1e9

// Push is the body of POST /steady_clock_offset. TensorRT-LLM knows Offset alone: the seconds that the node adds to its
// stamps. The rest is ours and optional.
type Push struct {
	Offset      *float64 `json:"offset,omitempty"`    // seconds
	OffsetNS    *int64   `json:"offset_ns,omitempty"` // the same, exact
	AtNS        int64    `json:"at_ns,omitempty"`     // node time that the offset is aimed at
	SkewPPB     int64    `json:"skew_ppb,omitempty"`
	BoundNS     *int64   `json:"bound_ns,omitempty"`
	VoidAfterNS int64    `json:"void_after_ns,omitempty"` // node time after which nothing is to be trusted
	Epoch       string   `json:"epoch,omitempty"`         // the node's epoch that it was measured against, or its clock id
	Seq         int64    `json:"seq,omitempty"`
	Reference   ID       `json:"reference,omitempty"` // the clock that the offset leads to
}

// PushState is what a node says of the offset that it applies.
type PushState struct {
	Applied     bool   `json:"applied"`
	OffsetNS    *int64 `json:"offset_ns"` // null: none was ever pushed
	AtNS        int64  `json:"at_ns,omitempty"`
	SkewPPB     int64  `json:"skew_ppb"`
	BoundNS     *int64 `json:"bound_ns"` // null: who pushed it did not say
	VoidAfterNS int64  `json:"void_after_ns,omitempty"`
	Epoch       string `json:"epoch,omitempty"`
	Seq         int64  `json:"seq,omitempty"`
	Reference   ID     `json:"reference,omitempty"`
	ReceivedNS  int64  `json:"received_ns,omitempty"`
	Accepted    int64  `json:"accepted"`
	Refused     int64  `json:"refused"`
}

// Adjusted keeps the offset that was pushed to a process. It never changes the steady clock: records keep raw stamps.
type Adjusted struct {
	steady *Steady

	mu    sync.Mutex // guards what follows; short reads and writes only
	state PushState
}

// NewAdjusted returns an Adjusted that nothing was pushed to.
func NewAdjusted(s *Steady) *Adjusted { return &Adjusted{steady: s} }

// Push replaces the offset. A refused push changes nothing but the count of refusals.
func (a *Adjusted) Push(p Push) error {
	id, now := a.steady.ID(), a.steady.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	ns, err := a.check(p, id)
	if err != nil {
		a.state.Refused++
		return err
	}
	at := p.AtNS
	if at == 0 {
		at = now
	}
	a.state = PushState{
		Applied: true, OffsetNS: &ns, AtNS: at, SkewPPB: p.SkewPPB, BoundNS: p.BoundNS, VoidAfterNS: p.VoidAfterNS,
		Epoch: id.Epoch(), Seq: p.Seq, Reference: p.Reference, ReceivedNS: now,
		Accepted: a.state.Accepted + 1, Refused: a.state.Refused,
	}
	return nil
}

func (a *Adjusted) check(p Push, id ID) (int64, error) {
	ns, err := p.nanoseconds()
	if err != nil {
		return 0, err
	}
	if p.Epoch != "" && p.Epoch != id.Epoch() && p.Epoch != string(id) {
		return 0, fmt.Errorf("%w: the push is for %q, this clock is %q", ErrForeignEpoch, p.Epoch, id)
	}
	// A number orders the pushes of one sender about one reference; a push without number is TensorRT-LLM's, which
	// always replaces.
	if p.Seq != 0 && a.state.Epoch == id.Epoch() && p.Seq <= a.state.Seq && p.Reference == a.state.Reference {
		return 0, fmt.Errorf("%w: seq %d, already at %d", ErrStale, p.Seq, a.state.Seq)
	}
	return ns, nil
}

// nanoseconds checks the numbers of a push and returns its offset.
func (p Push) nanoseconds() (int64, error) {
	if p.Offset == nil && p.OffsetNS == nil {
		return 0, fmt.Errorf("%w: neither offset (seconds) nor offset_ns is given", ErrInvalid)
	}
	if p.BoundNS != nil && *p.BoundNS < 0 {
		return 0, fmt.Errorf("%w: bound_ns %d is negative", ErrInvalid, *p.BoundNS)
	}
	if p.SkewPPB < -maxPushSkewPPB || p.SkewPPB > maxPushSkewPPB {
		return 0, fmt.Errorf("%w: skew_ppb %d is beyond ±%d", ErrInvalid, p.SkewPPB, maxPushSkewPPB)
	}
	if p.AtNS < 0 || p.VoidAfterNS < 0 || p.Seq < 0 {
		return 0, fmt.Errorf("%w: at_ns %d, void_after_ns %d and seq %d must not be negative", ErrInvalid, p.AtNS, p.VoidAfterNS, p.Seq)
	}
	var s float64
	if p.Offset != nil {
		s = *p.Offset
		if math.IsNaN(s) || math.Abs(s) > maxOffsetS {
			return 0, fmt.Errorf("%w: offset %v s is not a number within ±%g s", ErrInvalid, s, float64(maxOffsetS))
		}
	}
	if p.OffsetNS == nil {
		return int64(math.Round(s * 1e9)), nil
	}
	ns := *p.OffsetNS
	if math.Abs(float64(ns)) > maxOffsetS*1e9 {
		return 0, fmt.Errorf("%w: offset_ns %d is beyond ±%g s", ErrInvalid, ns, float64(maxOffsetS))
	}
	if p.Offset != nil && math.Abs(float64(ns)*1e-9-s) > 1e-3 {
		return 0, fmt.Errorf("%w: offset %v s and offset_ns %d differ by more than 1 ms", ErrInvalid, s, ns)
	}
	return ns, nil
}

// maxPushSkewPPB is 10 %: twice the fastest slew that an NTP daemon is known to use.
const maxPushSkewPPB = 100_000_000

// State returns what is applied now.
func (a *Adjusted) State() PushState {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state
}

// Offset returns what to add to the stamp at. Not ok: nothing was pushed, it is void by now, or the clock is another than
// the one it was measured against.
func (a *Adjusted) Offset(at int64) (ns int64, ok bool) {
	st := a.State()
	if !st.Applied || (st.VoidAfterNS != 0 && at > st.VoidAfterNS) || st.Epoch != a.steady.ID().Epoch() {
		return 0, false
	}
	return *st.OffsetNS + int64(float64(at-st.AtNS)*float64(st.SkewPPB)*1e-9), true
}
