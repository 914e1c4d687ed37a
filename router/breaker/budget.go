package breaker

import "time"

const (
	// earn is what a request adds to the budget: in the long run one request in five may be tried again, so that retries
	// never multiply an overload.
	earn = 0.2
	// drip is what a second adds, so that a quiet router can retry too.
	drip = 1.0
	// most is what the budget holds: the retries of a burst.
	most = 50.0
)

// Budget bounds retries over time: a token bucket that requests and seconds fill. The zero value is empty at time 0; New
// begins full.
type Budget struct {
	tokens float64
	lastNS int64
}

// NewBudget begins full.
func NewBudget(nowNS int64) *Budget { return &Budget{most, nowNS} }

func (b *Budget) fill(nowNS int64) {
	if nowNS > b.lastNS {
		b.tokens = min(b.tokens+drip*float64(nowNS-b.lastNS)/1e9, most)
		b.lastNS = nowNS
	}
}

// Request adds what a request earns.
func (b *Budget) Request(nowNS int64) {
	b.fill(nowNS)
	b.tokens = min(b.tokens+earn, most)
}

// Take spends one retry; false when there is none left.
func (b *Budget) Take(nowNS int64) bool {
	b.fill(nowNS)
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// Left is how many retries may follow now.
func (b *Budget) Left(nowNS int64) float64 {
	b.fill(nowNS)
	return b.tokens
}

const (
	firstBackoff = 10 * time.Millisecond
	maxBackoff   = time.Second
)

// Backoff is the wait before the n-th retry in a row (from 0): the share u, drawn from [0, 1), of 10 ms x 4^n, so that the
// requests of a node that died do not come back at one moment.
func Backoff(n int, u float64) time.Duration {
	limit := min(firstBackoff<<(2*min(n, 4)), maxBackoff)
	return time.Duration(u * float64(limit))
}
