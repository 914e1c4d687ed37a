// Package service owns the clock-sync daemon: it finds routers and nodes in the registry, has them probed, composes
// node-to-router estimates, publishes and pushes them, and shows them. The arithmetic is in estimate, the probing in track.
//
// Several daemons may run: each probes, one leads (a lease in NATS) and alone publishes and pushes.
package service

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/track"
	"meridian.internal/clocksync/utc"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
)

// Options of the daemon.
type Options struct {
	Name      string
	Steady    *clock.Steady
	Conn      *bus.Conn
	Registry  *node.Registry
	Key       []byte
	KernelDir string
	Limits    estimate.Config
	Burst     int
	UTC       *utc.Tracker // nil: no NTP server is configured
	Workers   []Worker     // foreign workers, which are in no registry
	Logger    *slog.Logger
	// Transport shows the cluster's credentials to nodes; nil: there are none.
	Transport func(*http.Transport) http.RoundTripper
}

// Worker is a foreign worker: it knows GET and POST /steady_clock_offset with seconds alone.
type Worker struct{ Name, URL string }

// peerEvery is how often the registry is looked at for peers.
const peerEvery = 200 * time.Millisecond

// Service is the daemon.
type Service struct {
	opts    Options
	tracker *track.Tracker
	out     *publisher
	push    *pusher
	lead    *lease

	mu    sync.Mutex // guards roles; short reads and writes only
	roles map[string]role
}

// role is what a peer is here for.
type role struct {
	name    string // as it registered
	router  bool
	url     string
	foreign bool
}

// New returns a daemon that does nothing before Run.
func New(o Options) *Service {
	s := &Service{opts: o, roles: map[string]role{}}
	s.out = newPublisher(o.Conn, o.Logger)
	s.lead = newLease(o.Conn, o.Name+" "+o.Steady.ID().Instance(), o.Logger)
	s.push = newPusher(o.Logger, o.Transport)
	s.tracker = track.New(track.Options{
		Steady: o.Steady, Key: o.Key, KernelDir: o.KernelDir, Limits: o.Limits, Burst: o.Burst, Logger: o.Logger, OnUpdate: s.updated,
		Transport: o.Transport,
	})
	return s
}

// Run works until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.tracker.Run(ctx) })
	g.Go(func() error { return s.lead.run(ctx) })
	g.Go(func() error { return s.out.run(ctx) })
	g.Go(func() error { return s.push.run(ctx) })
	g.Go(func() error { return s.follow(ctx) })
	if s.opts.UTC != nil {
		g.Go(func() error { return s.opts.UTC.Run(ctx) })
		g.Go(func() error { return s.tellUTC(ctx) })
	}
	return g.Wait()
}

// follow keeps the set of peers equal to the living of the registry. A process that lost its lease stays a peer while the
// registry remembers it: it may only have lost NATS, and its clock goes on.
func (s *Service) follow(ctx context.Context) error {
	s.remember(ctx)
	tick := time.NewTicker(peerEvery)
	defer tick.Stop()
	for {
		s.tracker.SetPeers(s.peers(s.opts.Registry.Nodes()))
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (s *Service) peers(entries []node.Entry) []track.Peer {
	roles := map[string]role{}
	var ps []track.Peer
	for _, e := range entries {
		i := e.Info
		if i.Role == node.RoleClocksync {
			continue
		}
		key := string(i.Role) + "." + i.Name
		roles[key] = role{name: i.Name, router: i.Role == node.RoleRouter, url: i.URL}
		ps = append(ps, track.Peer{Name: key, ClockAddr: i.ClockAddr, URL: i.URL, ClockID: i.ClockID})
	}
	for _, w := range s.opts.Workers {
		key := "worker." + w.Name
		roles[key] = role{name: w.Name, url: w.URL, foreign: true}
		ps = append(ps, track.Peer{Name: key, URL: w.URL})
	}
	s.mu.Lock()
	s.roles = roles
	s.mu.Unlock()
	return ps
}

func (s *Service) snapshot() map[string]role {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.roles // replaced as a whole, never changed
}

// updated runs on a peer's goroutine after each burst: what the burst changed is composed and handed on.
func (s *Service) updated(u track.Update) {
	roles := s.snapshot()
	r, ok := roles[u.Peer.Name]
	if !ok || !s.lead.held() {
		return
	}
	edge := clock.Published{Node: r.name, By: s.opts.Name, Estimate: u.Estimate}
	if u.Lower != nil {
		edge.Lower, edge.Upper = (*clock.Constraint)(u.Lower), (*clock.Constraint)(u.Upper)
	}
	s.out.log(edge)
	for _, p := range s.pairs(u.Peer.Name, u.Estimate) {
		s.out.newest(p)
		s.push.offer(roles, p, s.leadingRouter(roles))
	}
}

// leadingRouter is the router whose clock is pushed to the nodes: the first by name, so that all daemons choose the same.
func (s *Service) leadingRouter(roles map[string]role) string {
	first := ""
	for _, r := range roles {
		if r.router && (first == "" || r.name < first) {
			first = r.name
		}
	}
	return first
}

// pairs composes what follows from a new estimate of one peer: of a node with every router, of a router with every node.
func (s *Service) pairs(key string, e clock.Estimate) []clock.Published {
	roles := s.snapshot()
	me := roles[key]
	var out []clock.Published
	for other, r := range roles {
		if r.router == me.router {
			continue
		}
		oe, ok := s.tracker.Newest(other)
		if !ok {
			continue
		}
		router, nodeName, re, ne := r.name, me.name, oe, e
		if me.router {
			router, nodeName, re, ne = me.name, r.name, e, oe
		}
		p := clock.Published{Router: router, Node: nodeName, By: s.opts.Name}
		p.Estimate = Compose(re, ne, s.opts.Name, s.opts.Steady.AnchorErrNS())
		out = append(out, p)
	}
	return out
}

// Compose turns the estimates of a router and of a node against our own clock into one of the node against the router. The
// bounds add. Where both read our very clock they read each other's, and our own anchor drops out.
func Compose(router, nodeE clock.Estimate, via string, anchor int64) clock.Estimate {
	if router.State == clock.Identity && nodeE.State == clock.Identity {
		e := nodeE
		w := router.BoundNS() + nodeE.BoundNS() - 2*anchor
		e.Reference, e.LowerNS, e.UpperNS, e.Via = router.Local, -w, w, via
		return e
	}
	if c, ok := clock.Compose(router.Invert(), nodeE, via); ok {
		return c
	}
	state := clock.Joining
	for _, s := range []clock.State{router.State, nodeE.State} {
		if s == clock.Void || s == clock.Quarantined {
			state = s
		}
	}
	return clock.Estimate{Reference: router.Local, Local: nodeE.Local, AtNS: nodeE.AtNS, State: state, Transport: nodeE.Transport, Via: via, Seq: nodeE.Seq}
}
