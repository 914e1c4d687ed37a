package node

import (
	"encoding/json"
	"fmt"
	"time"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

const (
	// ReportEvery is how often a node tells its load when nothing changes.
	ReportEvery = 500 * time.Millisecond
	// LookEvery is how often a node looks whether its load has changed, and then tells it.
	LookEvery = 20 * time.Millisecond
)

// Report is a node's word on its load, published on bus.LoadSubject every ReportEvery and when the load has changed.
// Nothing keeps it: the next one replaces it.
type Report struct {
	Role    Role         `json:"role"`
	Name    string       `json:"name"`
	ClockID clock.ID     `json:"clock_id"` // names the instance
	Seq     int64        `json:"seq"`      // rises with each report of the instance, from 1
	Load    infer.Load   `json:"load"`
	Ranks   []infer.Load `json:"ranks,omitempty"` // of each data-parallel rank; absent: there is one
	KVEpoch int64        `json:"kv_epoch"`        // of the node's KV events; 0: it publishes none
	KVSeq   int64        `json:"kv_seq"`          // newest event that was published before this report; 0: none yet
}

// Check says what is wrong with a report.
func (r Report) Check() error {
	switch {
	case r.Role != RoleCtx && r.Role != RoleGen:
		return fmt.Errorf("%w: load report with role %q, want ctx or gen", ErrBadInfo, r.Role)
	case r.Name == "" || len(r.Name) > maxNameLen:
		return fmt.Errorf("%w: load report with name %q, want 1 to %d bytes", ErrBadInfo, r.Name, maxNameLen)
	case r.Seq < 1 || r.KVSeq < 0:
		return fmt.Errorf("%w: load report of %s with seq %d and kv_seq %d, want 1 or more and 0 or more", ErrBadInfo, r.Name, r.Seq, r.KVSeq)
	}
	if len(r.Ranks) > infer.MaxRanks {
		return fmt.Errorf("%w: load report of %s with %d ranks, want at most %d", ErrBadInfo, r.Name, len(r.Ranks), infer.MaxRanks)
	}
	for _, l := range append([]infer.Load{r.Load}, r.Ranks...) {
		for _, n := range []int{l.Running, l.Waiting, l.WaitingTokens, l.KVUsedBlocks, l.KVMaxBlocks} {
			if n < 0 || n > maxCount {
				return fmt.Errorf("%w: load report of %s with a count of %d, want 0 to %d", ErrBadInfo, r.Name, n, maxCount)
			}
		}
	}
	return nil
}

// maxCount bounds what a load may count; sums of all nodes stay far from overflow.
const maxCount = 1 << 40

// ParseReport reads and checks a report.
func ParseReport(b []byte) (Report, error) {
	var r Report
	if err := json.Unmarshal(b, &r); err != nil {
		return Report{}, fmt.Errorf("%w: load report: %w", ErrBadInfo, err)
	}
	return r, r.Check()
}
