package clock

import (
	"encoding/json"
	"errors"
	"fmt"
)

// ErrBadEstimate is returned when a text is no published estimate.
var ErrBadEstimate = errors.New("clock: bad estimate")

// Published is an estimate as clocksync publishes it: in the bucket of the newest (key "<router>.<node>") and in the log.
type Published struct {
	Router string `json:"router,omitempty"` // whose clock is the reference; absent: the clock of By itself
	Node   string `json:"node"`             // whose clock is the local one
	By     string `json:"by"`               // the clocksync that measured it
	Estimate
	Lower *Constraint `json:"lower,omitempty"` // what the newest burst proved; only where By's clock is the reference
	Upper *Constraint `json:"upper,omitempty"`
}

// Constraint is a one-sided proof: at local time AtNS the offset is at least, or at most, NS.
type Constraint struct {
	AtNS int64 `json:"at_ns"`
	NS   int64 `json:"ns"`
}

// ParsePublished reads a published estimate.
func ParsePublished(b []byte) (Published, error) {
	var p Published
	if err := json.Unmarshal(b, &p); err != nil {
		return Published{}, fmt.Errorf("%w: %w", ErrBadEstimate, err)
	}
	if p.Node == "" {
		return Published{}, fmt.Errorf("%w: no node", ErrBadEstimate)
	}
	for _, id := range []ID{p.Reference, p.Local} {
		if _, err := ParseID(string(id)); err != nil {
			return Published{}, fmt.Errorf("%w of %s: %w", ErrBadEstimate, p.Node, err)
		}
	}
	if p.LowerNS > p.UpperNS || p.OffsetNS < p.LowerNS || p.OffsetNS > p.UpperNS || p.SkewErrPPB < 0 || p.EtaPPBPerS < 0 {
		return Published{}, fmt.Errorf("%w of %s: offset %d outside [%d, %d], or a negative growth", ErrBadEstimate, p.Node, p.OffsetNS, p.LowerNS, p.UpperNS)
	}
	return p, nil
}
