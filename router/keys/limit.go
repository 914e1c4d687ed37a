package keys

import (
	"fmt"
	"math"
	"sync"
	"time"
)

// Refused is returned when a limit of a key is used up; After tells when a retry may pass.
type Refused struct {
	Limit string // requests_per_minute, tokens_per_minute or max_running
	Max   int
	After time.Duration
}

// Error names the limit.
func (r *Refused) Error() string {
	return fmt.Sprintf("this key's %s of %d is used up", r.Limit, r.Max)
}

// Principal is who a request comes from. Safe for concurrent use.
type Principal struct {
	mu       sync.Mutex // guards what follows; short reads and writes only
	key      Key
	running  int
	requests bucket
	tokens   bucket
}

// ID is the key's id: fit for logs, records and metric labels.
func (p *Principal) ID() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.key.ID
}

// MayUse tells whether the key may use a model.
func (p *Principal) MayUse(model string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.key.Models) == 0 {
		return true
	}
	for _, m := range p.key.Models {
		if m == model {
			return true
		}
	}
	return false
}

// Priority lowers what a request asks for to what its key may ask for.
func (p *Principal) Priority(asked int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.key.MaxPriority == nil {
		return asked
	}
	return min(asked, *p.key.MaxPriority)
}

// MayPin says whether what requests leave in the caches may stay before what others leave: that is more than any priority up to 0.
func (p *Principal) MayPin() bool { return p.Priority(1) > 0 }

// retryRunning is what a client is told that has as many requests running as it may: nobody knows when one ends.
const retryRunning = time.Second

// Begin counts a request against the limits, or returns a *Refused. After nil the caller must call End once.
func (p *Principal) Begin(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &p.key
	if k.MaxRunning > 0 && p.running >= k.MaxRunning {
		return &Refused{"max_running", k.MaxRunning, retryRunning}
	}
	if wait := p.tokens.wait(now, k.TokensPerMinute, 1); wait > 0 {
		return &Refused{"tokens_per_minute", k.TokensPerMinute, wait}
	}
	if wait := p.requests.wait(now, k.RequestsPerMinute, 1); wait > 0 {
		return &Refused{"requests_per_minute", k.RequestsPerMinute, wait}
	}
	p.requests.take(1)
	p.running++
	return nil
}

// End ends what Begin began, and counts the tokens that the request cost.
func (p *Principal) End(now time.Time, tokens int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	p.tokens.wait(now, p.key.TokensPerMinute, 1) // brings the balance up to now
	p.tokens.take(tokens)
}

// bucket is a token bucket that holds one minute's worth. Its zero value is full.
type bucket struct {
	used float64   // of what it holds; may exceed it: a debt
	at   time.Time // of used
}

// wait brings the bucket up to now and returns how long it takes until n can be taken; 0: now, or there is no limit.
func (b *bucket) wait(now time.Time, perMinute int, n float64) time.Duration {
	if perMinute <= 0 {
		b.used, b.at = 0, now
		return 0
	}
	rate := float64(perMinute) / 60 // per second
	b.used = max(0, b.used-rate*max(0, now.Sub(b.at).Seconds()))
	b.at = now
	lack := b.used + n - float64(perMinute)
	if lack <= 0 {
		return 0
	}
	return time.Duration(math.Ceil(lack / rate * float64(time.Second)))
}

func (b *bucket) take(n int) { b.used += float64(max(0, n)) }
