package track

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/kernel"
	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/probe"
	"meridian.internal/shared/clock"
)

const (
	joinBurst         = 16
	maxEstimators     = 6  // epochs kept per peer
	maxSeen           = 64 // processes remembered per peer
	transportIdentity = "identity"
	identityEvery     = 5 * time.Second // a proven identity is still held against bursts
	retryProof        = 16              // bursts until a failed proof is tried again
	conflictFor       = 60 * time.Second
	firstRetry        = 100 * time.Millisecond
	lastRetry         = 2 * time.Second
	passiveLook       = time.Hour // a passive peer that becomes active is poked
)

// peer is one followed clock. run's goroutine probes.
type peer struct {
	opts  *Options
	slots slots
	poke  chan struct{}

	past  *History     // set before run, then only read
	batch *probe.Batch // likewise; may be nil
	start time.Time    // likewise: of the raster

	mu        sync.Mutex // guards what follows; held for microseconds
	info      Peer
	ests      []*estimate.Estimator // one per pair of epochs, newest last
	seen      []clock.ID            // processes that were met under this name, newest last
	identity  *kernel.Proof
	proofFor  clock.ID // the peer that identity was tried for
	proofWait int
	transport string
	lastAt    int64 // our ns of the newest burst; 0: none
	failures  int   // bursts without reply in a row
	seq       int64
	conflict  int64 // our ns until which the name counts as contested
	st        Status
}

func newPeer(info Peer, o *Options, slots slots) *peer {
	return &peer{info: info, opts: o, slots: slots, poke: make(chan struct{}, 1)}
}

func (p *peer) setInfo(i Peer) {
	p.mu.Lock()
	p.info = i
	p.mu.Unlock()
}

// hurry makes the next burst start now.
func (p *peer) hurry() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// inherit takes over what a peer of the same name knew, when only its addresses changed.
func (p *peer) inherit(gone []*peer) {
	for i := len(gone) - 1; i >= 0; i-- {
		o := gone[i]
		o.mu.Lock()
		same := o.info.Name == p.info.Name && len(o.ests) > 0 && o.info.ClockID.Epoch() == p.info.ClockID.Epoch()
		if same {
			p.ests, p.seen, p.seq, p.st, o.ests = o.ests, o.seen, o.seq, o.st, nil
		}
		o.mu.Unlock()
		if same {
			return
		}
	}
}

func (p *peer) run(ctx context.Context) {
	info := p.snapshot()
	pr, err := probe.New(p.opts.Steady, probe.Options{
		ClockAddr: info.ClockAddr, URL: info.URL, Key: p.opts.Key, NoKernelTS: p.opts.NoKernelTS, Transport: p.opts.Transport, Batch: p.batch,
	})
	if err != nil {
		p.fail(err)
		return
	}
	defer pr.Close()
	for ctx.Err() == nil {
		wait := passiveLook
		if !p.snapshot().Passive {
			wait = p.step(ctx, pr)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-p.poke:
		}
		timer.Stop()
	}
}

func (p *peer) snapshot() Peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.info
}

// step makes one burst and returns when to make the next.
func (p *peer) step(ctx context.Context, pr *probe.Prober) time.Duration {
	n, slot := p.nextBurst()
	select {
	case slot <- struct{}{}:
	case <-ctx.Done():
		return 0
	}
	b, err := pr.Burst(ctx, n)
	<-slot
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		wait := p.fail(err)
		p.opts.OnUpdate(Update{Peer: p.snapshot(), Estimate: p.newest(), Err: err})
		return wait
	}
	p.prove(ctx, b.Peer)
	u := p.take(b)
	p.opts.OnUpdate(u)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ests) == 0 {
		return passiveLook // another peer has taken them over: this one is about to end
	}
	e := p.ests[len(p.ests)-1]
	every := e.Interval()
	if p.identity != nil && e.Stats().Exchanges >= joinBurst {
		every = identityEvery
	}
	wait := jitter(every, rand.Float64())
	if p.transport == probe.UDPKernel {
		wait = together(wait, p.start, time.Now())
	}
	return wait
}

// Bursts whose stamps are the kernel's begin on a raster of this process, so that one system call serves many peers: being
// woken costs more than a packet, and stamps of the kernel do not care who is served first. Short waits have a finer one.
const (
	raster     = time.Second
	fineRaster = raster / 5
)

// together moves the end of a wait to the raster, which began at start.
func together(wait time.Duration, start, now time.Time) time.Duration {
	grid := raster
	if wait < raster/2 {
		grid = fineRaster
	}
	since := now.Sub(start)
	return max((since+wait).Round(grid)-since, grid/2)
}

// nextBurst says how many exchanges the next burst has, and what bounds how many run beside it.
func (p *peer) nextBurst() (n int, slot chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	slot = p.slots.program
	if p.transport == probe.UDPKernel {
		slot = p.slots.kernel
	}
	if len(p.ests) == 0 || p.lastAt == 0 {
		return joinBurst, slot
	}
	return p.ests[len(p.ests)-1].BurstSize(p.opts.Burst), slot
}

// fail notes a burst without reply and returns when to try again.
func (p *peer) fail(err error) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.st.Failed++
	if p.st.LastErr != err.Error() {
		p.opts.Logger.Debug("clock burst failed", "peer", p.info.Name, "err", err)
	}
	p.st.LastErr = err.Error()
	wait := min(firstRetry<<min(p.failures, 8), lastRetry)
	p.failures++
	return jitter(wait, rand.Float64())
}

// prove tries once per process of the peer, and again now and then, whether it reads our own clock.
func (p *peer) prove(ctx context.Context, id clock.ID) {
	own := p.opts.Steady.ID()
	p.mu.Lock()
	try := id != p.proofFor || p.identity == nil && p.proofWait == 0
	if id != p.proofFor {
		p.identity = nil
	}
	if p.proofWait > 0 {
		p.proofWait--
	}
	try = try && id.Epoch() != "" && id.Epoch() == own.Epoch() && p.st.Contradicted == 0
	p.mu.Unlock()
	if !try {
		return
	}
	proof, err := kernel.Prove(ctx, p.opts.KernelDir, own, id)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proofFor, p.proofWait = id, retryProof
	if err != nil {
		p.opts.Logger.Debug("same epoch, but no proof of a shared kernel", "peer", p.info.Name, "err", err)
		return
	}
	p.identity = &proof
	p.opts.Logger.Info("peer reads our own clock", "peer", p.info.Name, "proof", proof.How)
}

// take gives a burst to the estimator of its epochs.
func (p *peer) take(b probe.Burst) Update {
	own := p.opts.Steady.ID()
	p.mu.Lock()
	defer p.mu.Unlock()
	if b.Peer == "" {
		b.Peer = foreignID(p.info.Name)
	}
	e := p.estimator(own, b.Peer)
	v := e.Add(estimate.Burst{Exchanges: b.Exchanges, Ref: b.Local, Local: b.Remote})
	p.transport, p.lastAt, p.failures = b.Transport, p.opts.Steady.Now(), 0
	p.st.LastErr = ""
	p.st.Lost += int64(b.Lost)
	p.seq++
	lo, up := bestBounds(b.Exchanges, e.Rho())
	p.checkIdentity(lo, up)
	if v.Bad() {
		p.opts.Logger.Warn("clock does not keep its declared limits", "peer", p.info.Name, "impossible", v.Impossible,
			"step", v.Step, "violation", v.Violation, "infeasible", v.Infeasible)
	}
	return Update{Peer: p.info, Estimate: p.estimateLocked(), Lower: lo, Upper: up, Verdict: v}
}

// checkIdentity holds a proven identity against a burst: 0 must lie within the bounds.
func (p *peer) checkIdentity(lo, up *Bound) {
	if p.identity == nil || lo == nil {
		return
	}
	e := p.identityErr()
	if lo.NS <= e && up.NS >= -e {
		return
	}
	p.identity = nil
	p.st.Contradicted++
	p.opts.Logger.Warn("peer was proven to read our clock, and its stamps say otherwise", "peer", p.info.Name, "lower_ns", lo.NS, "upper_ns", up.NS)
}

func (p *peer) identityErr() int64 { return p.opts.Steady.AnchorErrNS() + p.identity.AnchorErrNS }

// bestBounds is what a burst proves, as it is logged.
func bestBounds(xs []ntp.Exchange, rho float64) (lower, upper *Bound) {
	var lo, up Bound
	for _, x := range xs {
		if !x.Possible(rho) {
			continue
		}
		if l := x.Lower(); lower == nil || l > lo.NS {
			lo = Bound{x.T2, l}
		}
		if u := x.Upper(); lower == nil || u < up.NS {
			up = Bound{x.T3, u}
		}
		lower, upper = &lo, &up
	}
	return lower, upper
}

// foreignID names the clock of a worker that does not say which it reads.
func foreignID(name string) clock.ID {
	h := fnv.New64a()
	_, _ = h.Write([]byte("foreign " + name))
	return clock.MakeID(h.Sum64(), 0)
}

// estimator returns the one for this pair of epochs. An epoch that comes back within a minute means that two processes
// claim one name.
func (p *peer) estimator(own, id clock.ID) *estimate.Estimator {
	if n := len(p.seen); n == 0 || p.seen[n-1] != id {
		p.seen = append(slices.DeleteFunc(p.seen, func(o clock.ID) bool { return o == id }), id)
		p.seen = p.seen[max(0, len(p.seen)-maxSeen):]
	}
	for i, e := range p.ests {
		if e.Local().Epoch() != id.Epoch() || e.Reference().Epoch() != own.Epoch() {
			continue
		}
		if last := len(p.ests) - 1; i != last {
			p.ests = append(append(p.ests[:i:i], p.ests[i+1:]...), e)
			p.st.Conflicts++
			p.conflict = p.opts.Steady.Now() + int64(conflictFor)
		}
		e.Restarted(id)
		return e
	}
	e := estimate.New(own, id, p.opts.Limits)
	if h := p.past; h != nil && h.Reference == own.Epoch() {
		e.Restore(h.ByEpoch[id.Epoch()])
	}
	p.ests = append(p.ests, e)
	p.st.Epochs++
	if len(p.ests) > 1 {
		p.opts.Logger.Info("peer has a new clock epoch", "peer", p.info.Name, "clock", id)
	}
	if len(p.ests) > maxEstimators {
		p.ests = p.ests[1:]
	}
	return e
}

func (p *peer) newest() clock.Estimate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.estimateLocked()
}

func (p *peer) estimateLocked() clock.Estimate {
	own := p.opts.Steady.ID()
	if len(p.ests) == 0 {
		return clock.Estimate{Reference: own, Local: p.info.ClockID, State: clock.Joining}
	}
	e := p.ests[len(p.ests)-1]
	now := p.opts.Steady.Now()
	if p.identity != nil && e.Reference().Epoch() == own.Epoch() {
		return p.same(own, e, now)
	}
	r := e.Estimate(e.LocalAt(now))
	return p.finish(r, now)
}

// same is the estimate of a clock that is our own.
func (p *peer) same(own clock.ID, e *estimate.Estimator, at int64) clock.Estimate {
	w := p.identityErr()
	return clock.Estimate{
		Reference: own, Local: e.Local(), LowerNS: -w, UpperNS: w, AtNS: at, Seq: p.seq, State: clock.Identity,
		Transport: transportIdentity, Samples: e.Stats().Exchanges, RTTNS: e.RTTNS(),
	}
}

func (p *peer) finish(r clock.Estimate, now int64) clock.Estimate {
	r.Seq, r.Transport = p.seq, p.transport
	if now < p.conflict && r.Usable() {
		r.State = clock.Quarantined
	}
	return r
}

// at returns the estimate of clock id at its time n, if this peer has one.
func (p *peer) at(id clock.ID, n int64) (clock.Estimate, bool) {
	own := p.opts.Steady.ID()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.ests) - 1; i >= 0; i-- {
		e := p.ests[i]
		if e.Local().Epoch() != id.Epoch() || !slices.Contains(p.seen, id) {
			continue
		}
		if p.identity != nil && i == len(p.ests)-1 && own.Epoch() == e.Local().Epoch() {
			return p.same(own, e, n), true
		}
		return p.finish(e.Past(n), p.opts.Steady.Now()), true
	}
	return clock.Estimate{}, false
}

func (p *peer) hint(id clock.ID, x ntp.Exchange) Hinted {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.ests {
		if e.Local().Epoch() == id.Epoch() && e.Reference().Epoch() == p.opts.Steady.ID().Epoch() && slices.Contains(p.seen, id) {
			// The stamps come from another instance's anchor than the estimate, perhaps: an exchange may err by that.
			x.ErrNS += p.opts.Steady.AnchorErrNS() + anchorSlackNS
			switch {
			case e.Hint(x):
				return HintAgrees
			case e.Stats().Bursts > 0:
				return HintContradicts
			}
		}
	}
	return HintUnknown
}

// anchorSlackNS bounds the anchor of another process: the best of 1,000 brackets of its clock.
const anchorSlackNS = 1000

// learn takes what was measured elsewhere as a burst that proved the estimate's bounds.
func (p *peer) learn(e clock.Estimate) {
	own := p.opts.Steady.ID()
	if !e.Usable() || e.State == clock.Identity || e.Reference.Epoch() != own.Epoch() || e.Local.Epoch() == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.info.Passive {
		return
	}
	p.estimator(own, e.Local).AddBounds(estimate.Stored{LowerNS: e.LowerNS, LowerAtNS: e.AtNS, UpperNS: e.UpperNS, UpperAtNS: e.AtNS})
	p.transport, p.lastAt, p.seq = e.Transport, p.opts.Steady.Now(), e.Seq
}

func (p *peer) status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.st
	s.Peer, s.Estimate, s.AgeNS = p.info, p.estimateLocked(), -1
	if p.lastAt != 0 {
		s.AgeNS = p.opts.Steady.Now() - p.lastAt
	}
	if n := len(p.ests); n > 0 {
		s.Stats = p.ests[n-1].Stats()
	}
	return s
}
