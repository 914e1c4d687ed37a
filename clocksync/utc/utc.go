// Package utc owns the relation of the steady clock to UTC: it asks several NTP servers, holds each one's answers in an
// estimator, lets them vote, and states UTC - steady with a bound, or nothing. It sets no clock, and nothing in a timeline
// depends on it.
//
// All four stamps of an exchange are taken on the steady clock, so a step of the wall clock does not matter. With t1, t4
// steady and t2, t3 of the server, whose own claim is λ = root delay/2 + root dispersion + precision,
//
//	t3 - λ - t4 <= UTC - steady <= t2 + λ - t1
package utc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/beevik/ntp"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/shared/clock"
)

// ID names UTC as a clock, so that estimates to it can be composed like others. No real epoch is this one.
const ID clock.ID = "7574630000000000.00000000"

// ErrUnanchored is returned when a server tells its own clock as UTC: it claims no error because it compares with nothing.
var ErrUnanchored = errors.New("utc: server is not anchored to UTC")

// Options of a Tracker.
type Options struct {
	Servers []string // host[:port]
	Steady  *clock.Steady
	Every   time.Duration // least time between two questions to a server; 0: 64 s
	Logger  *slog.Logger  // nil: silent
	// Query asks a server; nil: over the network.
	Query func(addr string, o ntp.QueryOptions) (*ntp.Response, error)
	// Unanchored accepts servers that are their own reference (a laboratory).
	Unanchored bool
}

const (
	defaultEvery = 64 * time.Second
	startEvery   = 2 * time.Second // RFC 5905's burst at the start
	startCount   = 4
	queryLimit   = 2 * time.Second
	maxEvery     = 1024 * time.Second
	// The steady clock is slewed by NTP, so its limits against UTC are wider than a crystal's.
	rhoPPM     = 600
	etaPPMPerS = 1
)

// Server is what is known of one server.
type Server struct {
	Addr     string `json:"addr"`
	OffsetNS *int64 `json:"offset_ns"` // UTC - steady; null: not known
	BoundNS  *int64 `json:"bound_ns"`
	Agrees   bool   `json:"agrees"` // lies with the majority
	Queries  int64  `json:"queries"`
	Error    string `json:"error,omitempty"`
}

// State is UTC - steady as the majority has it.
type State struct {
	clock.Estimate
	Bound   int64    `json:"bound_ns"`
	Agree   int      `json:"agree"`
	Servers []Server `json:"-"`
}

// Tracker follows UTC.
type Tracker struct {
	opts    Options
	servers []*server
}

type server struct {
	addr string

	mu      sync.Mutex // guards what follows; short
	est     *estimate.Estimator
	queries int64
	err     error
}

// New returns a tracker; with no servers it knows nothing for ever.
func New(o Options) *Tracker {
	if o.Every <= 0 {
		o.Every = defaultEvery
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Query == nil {
		o.Query = ntp.QueryWithOptions
	}
	t := &Tracker{opts: o}
	for _, a := range o.Servers {
		t.servers = append(t.servers, &server{addr: a})
	}
	return t
}

// Run asks until ctx ends.
func (t *Tracker) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, s := range t.servers {
		wg.Go(func() { t.follow(ctx, s) })
	}
	wg.Wait()
	return nil
}

func (t *Tracker) follow(ctx context.Context, s *server) {
	every := startEvery
	for n := 0; ctx.Err() == nil; n++ {
		wait := t.ask(s)
		if n >= startCount-1 {
			every = t.opts.Every
		}
		timer := time.NewTimer(time.Duration(float64(max(every, wait)) * (0.95 + 0.1*rand.Float64())))
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// ask makes one exchange and returns how long the server wants to be left alone.
func (t *Tracker) ask(s *server) time.Duration {
	steady := t.opts.Steady
	// Stamps are steady time told as a date of this era; the base cancels.
	base := time.Now().Unix() - steady.Now()/1e9
	r, err := t.opts.Query(s.addr, ntp.QueryOptions{Timeout: queryLimit, GetSystemTime: func() time.Time {
		return time.Unix(base, steady.Now())
	}})
	wait := time.Duration(0)
	if err == nil {
		wait = min(r.Poll, maxEvery)
		if r.KissCode != "" {
			wait = maxEvery
		}
		err = t.acceptable(r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queries++
	if err != nil {
		if s.err == nil { // how it goes on is told in the status; texts differ by local ports
			t.opts.Logger.Warn("NTP server gives no UTC", "server", s.addr, "err", err)
		}
		s.err = err
		return wait
	}
	s.err = nil
	s.take(bounds(r, base), steady.ID())
	if s.queries < startCount {
		return 0 // the burst at the start
	}
	return wait
}

func (t *Tracker) acceptable(r *ntp.Response) error {
	if err := r.Validate(); err != nil {
		return fmt.Errorf("answer is not usable: %w", err)
	}
	// 127.127.1.x is the driver of a computer's own clock.
	if r.Stratum < 16 && r.ReferenceID>>8 == 127<<16|127<<8|1 && !t.opts.Unanchored {
		return ErrUnanchored
	}
	if r.RootDelay < 0 || r.RootDispersion < 0 || r.Timestamps.ServerXmit.Before(r.Timestamps.ServerRecv) {
		return errors.New("utc: impossible answer")
	}
	return nil
}

// bounds is what an answer proves.
func bounds(r *ntp.Response, base int64) estimate.Stored {
	local := func(t time.Time) int64 { return (t.Unix()-base)*1e9 + int64(t.Nanosecond()) }
	lambda := int64(r.RootDelay/2+r.RootDispersion+r.Precision) + 2 // and the rounding of NTP's fractions
	t1, t4 := local(r.Timestamps.ClientXmit), local(r.Timestamps.ClientRecv)
	return estimate.Stored{
		LowerAtNS: t4, LowerNS: r.Timestamps.ServerXmit.UnixNano() - lambda - t4,
		UpperAtNS: t1, UpperNS: r.Timestamps.ServerRecv.UnixNano() + lambda - t1,
	}
}

func (s *server) take(b estimate.Stored, own clock.ID) {
	if s.est == nil || s.est.Local().Epoch() != own.Epoch() {
		s.est = estimate.New(ID, own, estimate.Config{
			RhoPPM: rhoPPM, EtaPPMPerS: etaPPMPerS, MinExchanges: 1, MaxErr: time.Second, VoidErr: 2 * time.Second, VoidAfter: 2 * time.Hour,
			History: 6 * time.Hour,
		})
	}
	s.est.AddBounds(b)
}

// at returns what the server proves of UTC - steady at steady time n.
func (s *server) at(n int64, own clock.ID) (clock.Estimate, Server, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := Server{Addr: s.addr, Queries: s.queries}
	if s.err != nil {
		out.Error = s.err.Error()
	}
	if s.est == nil || s.est.Local().Epoch() != own.Epoch() {
		return clock.Estimate{}, out, false
	}
	e := s.est.Estimate(n)
	if !e.Usable() {
		return e, out, false
	}
	bound := e.BoundNS()
	out.OffsetNS, out.BoundNS = &e.OffsetNS, &bound
	return e, out, true
}

// Now states UTC - steady now. Not ok: no server is configured, or no majority of them agrees; then there is no UTC. The
// servers are stated anyway.
func (t *Tracker) Now() (State, bool) {
	n, own := t.opts.Steady.Now(), t.opts.Steady.ID()
	st := State{Servers: []Server{}}
	var in []interval
	var es []clock.Estimate
	at := map[int]int{} // server to interval
	for i, s := range t.servers {
		e, row, ok := s.at(n, own)
		st.Servers = append(st.Servers, row)
		if ok {
			at[i] = len(in)
			in = append(in, interval{e.LowerNS, e.UpperNS})
			es = append(es, e)
		}
	}
	voted, ok := vote(in, len(t.servers))
	if !ok {
		return st, false
	}
	best := clock.Estimate{State: clock.Void}
	for i, k := range at {
		if !in[k].contains(voted.won) {
			continue
		}
		st.Servers[i].Agrees = true
		if best.State == clock.Void || es[k].BoundNS() < best.BoundNS() {
			best = es[k]
		}
	}
	best.OffsetNS = min(max(best.OffsetNS, voted.won.lo), voted.won.up)
	best.LowerNS, best.UpperNS = voted.bound.lo, voted.bound.up
	best.Transport = "ntp"
	st.Estimate, st.Bound, st.Agree = best, best.BoundNS(), voted.agree
	return st, true
}
