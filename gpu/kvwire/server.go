package kvwire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"meridian.internal/gpu/backend"
)

// ServerOptions configure the sending side.
type ServerOptions struct {
	Hello    Hello
	Epoch    uint64        // incarnation of this process, in every frame
	Lease    time.Duration // how long an offer waits for a receiver after prefill; default 5 s
	Blocks   int           // KV blocks of the device; see Lease
	MaxConns int           // further connections are closed at once; default 1024
	Timing   Timing
	Shared   *backend.Shared // KV that receivers on this host may read where it lies; nil: none
	// Lend leases what is cached of the beginning of a prompt, for a peer that lacks it, and says how many tokens that are; nil: nothing is lent.
	Lend    func(tokens []int32) (x Export, n int)
	Buffers Buffers      // memory of KV frames; nil: Go's
	Key     []byte       // of the cluster: a receiver must prove that it knows it; nil: everybody is served
	Now     func() int64 // steady clock, ns
	Logger  *slog.Logger
}

// Server offers KV to receivers.
type Server struct {
	o     ServerOptions
	lease time.Duration
	room  *room
	slots chan struct{}
	wg    sync.WaitGroup

	mu      sync.Mutex // guards the maps and closed
	offers  map[int64]*Offer
	waiters map[int64]chan *Offer // requests that came before their offer
	closed  bool
}

// NewServer makes a server; Serve runs it.
func NewServer(o ServerOptions) *Server {
	if o.Lease <= 0 {
		o.Lease = 5 * time.Second
	}
	if o.MaxConns <= 0 {
		o.MaxConns = 1024
	}
	o.Timing = o.Timing.withDefaults()
	if o.Shared != nil {
		o.Hello.Shares = o.Shared.Kind
	}
	return &Server{
		o: o, lease: o.Lease, room: newRoom(o.Blocks, o.Hello.TokensPerBlock), slots: make(chan struct{}, o.MaxConns),
		offers: map[int64]*Offer{}, waiters: map[int64]chan *Offer{},
	}
}

// Serve accepts connections until ctx ends, then closes them, ends all offers and waits for its goroutines.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	var err error
	for {
		var c net.Conn
		if c, err = ln.Accept(); err != nil {
			if ctx.Err() != nil {
				err = nil
				break
			}
			if errors.Is(err, net.ErrClosed) {
				break
			}
			s.o.Logger.Warn("accept kv connection", "error", err)
			if wait(ctx, 50*time.Millisecond) != nil { // too many open files ends by itself; do not spin on it
				err = nil
				break
			}
			continue
		}
		select {
		case s.slots <- struct{}{}:
			s.wg.Go(func() {
				defer func() { <-s.slots }()
				s.serveConn(ctx, c)
			})
		default:
			s.o.Logger.Warn("kv connection refused", "peer", hostOf(c), "limit", s.o.MaxConns)
			_ = c.Close()
		}
	}
	s.shut()
	s.wg.Wait()
	return err
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func (s *Server) shut() {
	s.mu.Lock()
	s.closed = true
	offers := make([]*Offer, 0, len(s.offers))
	for _, o := range s.offers {
		offers = append(offers, o)
	}
	s.mu.Unlock()
	for _, o := range offers {
		o.Withdraw()
	}
}

// Offer puts an export under lease. The caller must end it with Ready, Fail or Withdraw; the server releases the export.
func (s *Server) Offer(id int64, x Export) (*Offer, error) {
	o := &Offer{id: id, server: s, export: x, ready: make(chan struct{}), done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	if _, ok := s.offers[id]; ok {
		return nil, fmt.Errorf("%w: %d", ErrDuplicate, id)
	}
	s.offers[id] = o
	if w, ok := s.waiters[id]; ok {
		delete(s.waiters, id)
		w <- o // holds one
	}
	return o, nil
}

// Withdraw ends the offer of an id; false if there is none.
func (s *Server) Withdraw(id int64) bool {
	s.mu.Lock()
	o := s.offers[id]
	s.mu.Unlock()
	if o == nil {
		return false
	}
	o.Withdraw()
	return true
}

// Pending counts the offers that have not ended.
func (s *Server) Pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.offers)
}

func (s *Server) forget(o *Offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.offers[o.id] == o {
		delete(s.offers, o.id)
	}
}

// take gives the offer of an id, waiting for it until ctx ends.
func (s *Server) take(ctx context.Context, id int64) (*Offer, error) {
	s.mu.Lock()
	if o := s.offers[id]; o != nil {
		s.mu.Unlock()
		return o, nil
	}
	_, asked := s.waiters[id]
	switch {
	case s.closed:
		s.mu.Unlock()
		return nil, ErrClosed
	case asked:
		s.mu.Unlock()
		return nil, fmt.Errorf("%w: %d", ErrDuplicate, id)
	}
	w := make(chan *Offer, 1)
	s.waiters[id] = w
	s.mu.Unlock()
	select {
	case o := <-w:
		return o, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiters[id] == w {
		delete(s.waiters, id)
	}
	return nil, context.Cause(ctx)
}
