package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// Server is the node's side of an engine, in the process of its rank. It is made before the engine, which tells it things.
type Server struct {
	links  Links
	orders *link[packet, order]
	kv     *link[packet, order]
	out    outbox
	e      *engine.Engine
	told   Teller
	o      ServerOptions

	pumps sync.WaitGroup // goroutines that wait for the engine
	stop  func()         // ends the engine
	ended chan struct{}  // closed when it has, with err
	err   error
	heard bool // the node knows err; to be read after pumps

	mu      sync.Mutex // guards the fields below
	seqs    map[int64]*engine.Sequence
	exports map[int64]*engine.Export
	holds   map[int64]*hold
}

// Teller has the statistics that are left when the engine has ended.
type Teller interface {
	Left() (list []rows.Row, carried bool, iter int64)
	Last(iter int64) []rows.Row
}

// hold is a reservation, or the wait for one.
type hold struct {
	cancel context.CancelFunc
	h      *engine.Reservation // nil: it is waited for
}

// ServerOptions are those of a server.
type ServerOptions struct {
	Deadline time.Duration           // a node that takes nothing for so long hangs
	Now      func() int64            // the rank's steady clock in ns
	Cards    func() []clock.Estimate // of the clocks of its cards to that; nil: they have none of their own
}

// NewServer makes the server of a process.
func NewServer(l Links, o ServerOptions) *Server {
	return &Server{
		links: l, orders: newLink[packet, order](l.orders, o.Deadline), kv: newLink[packet, order](l.kv, o.Deadline), o: o,
		out: outbox{wake: make(chan struct{}, 1)}, ended: make(chan struct{}),
		seqs: map[int64]*engine.Sequence{}, exports: map[int64]*engine.Export{}, holds: map[int64]*hold{},
	}
}

// KVEvent passes on what the engine stores and drops, in the order of its tokens.
func (s *Server) KVEvent(ev kvevent.Event) { s.out.add(item{KV: &ev}) }

// LoadChanged makes the newest load known.
func (s *Server) LoadChanged() { s.out.touch() }

// Serve runs the engine for the node until that ends it or is gone, which is no error. Nor is one of the engine that the node was told.
func (s *Server) Serve(ctx context.Context, e *engine.Engine, t Teller, h Hello) error {
	s.e, s.told = e, t
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	s.stop = cancel
	leave := context.AfterFunc(ctx, s.links.close)
	defer leave()
	if err := s.orders.send(s.packet(&h, nil), nil); err != nil {
		s.links.close()
		return fmt.Errorf("remote: greet the node: %w", err)
	}
	s.pumps.Go(func() {
		s.err = e.Run(inner)
		e.Config().Peers.Member.Leave(s.err)
		close(s.ended)
		if inner.Err() == nil {
			s.out.add(item{Ended: true})
		}
	})
	var serving sync.WaitGroup
	writing, quit := context.WithCancel(context.Background())
	serving.Go(func() { s.write(writing) })
	serving.Go(s.serveKV)
	for {
		o, err := s.orders.receive()
		if err != nil {
			break // the node has ended, or is gone
		}
		s.obey(o)
	}
	cancel()
	s.links.close()
	s.release()
	s.pumps.Wait()
	quit()
	serving.Wait()
	if s.heard {
		return nil
	}
	return s.err
}

// release lets go of what waits for the node.
func (s *Server) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.holds {
		h.cancel()
	}
	for _, x := range s.exports {
		x.Release()
	}
}

// packet is what is sent, with how things are now. The load is read last: it must not be older than what the packet tells, nor lack
// what was taken.
func (s *Server) packet(h *Hello, items []item) *packet {
	p := &packet{Hello: h, Items: items, Taken: s.out.taken.Load()}
	p.Queued, p.Load = s.e.Queued(), s.e.Load()
	if s.o.Cards != nil && (h != nil || slices.ContainsFunc(items, func(it item) bool { return it.Done != nil })) {
		p.Cards = s.o.Cards()
	}
	return p
}

// write sends what gathers.
func (s *Server) write(ctx context.Context) {
	for {
		select {
		case <-s.out.wake:
		case <-ctx.Done():
			return
		}
		if err := s.orders.send(s.packet(nil, s.out.take()), nil); err != nil {
			s.links.close() // the reader ends
		}
	}
}

// obey carries an order out. What takes long is done beside.
func (s *Server) obey(o *order) {
	switch o.Do {
	case submit:
		s.out.taken.Add(1)
		q, err := s.e.Submit(s.timed(o))
		s.answer(o, item{Fault: faultOf(err)})
		if err == nil {
			s.follow(o.Of, q)
		}
	case reserve:
		s.out.taken.Add(1)
		s.reserve(o)
	case start:
		s.start(o)
	case cancel:
		if q := at(s, s.seqs, o.Of); q != nil {
			q.Cancel()
		}
	case give, keep:
		s.end(o)
	case release:
		if x := s.drop(o.Of); x != nil {
			x.Release()
		}
	case sign:
		s.out.touch()
	case drain:
		s.e.Drain()
		s.pumps.Go(func() {
			select {
			case <-s.e.Drained():
				s.out.add(item{Drained: true})
			case <-s.ended:
			}
		})
	default:
		s.beside(o)
	}
}

// beside carries out what waits for the engine.
func (s *Server) beside(o *order) {
	s.pumps.Go(func() {
		switch o.Do {
		case lend:
			s.answer(o, item{Count: s.lend(o)})
		case audit:
			n, books := s.audit()
			s.answer(o, item{Count: n, Books: books})
		case profile, cease:
			s.answer(o, s.profile(o))
		case stop:
			s.stop()
			<-s.ended
			it := item{Fault: faultOf(s.err)}
			it.Count, it.Books = s.audit()
			it.Rows, it.Carry, it.Iter = s.told.Left()
			s.answer(o, it)
			s.heard = true
		case last:
			s.answer(o, item{Rows: s.told.Last(o.Iter)})
		default:
			s.answer(o, item{Fault: faultOf(fmt.Errorf("%w: order %d", engine.ErrInvalid, o.Do))})
		}
	})
}

func (s *Server) answer(o *order, it item) {
	it.Call = o.Call
	s.out.add(it)
}

func (s *Server) timed(o *order) infer.Request {
	r := o.Request
	if o.Left > 0 {
		r.DeadlineNS = s.o.Now() + o.Left.Nanoseconds()
	}
	return r
}

// follow passes on what a sequence and its export give.
func (s *Server) follow(handle int64, q *engine.Sequence) {
	s.mu.Lock()
	s.seqs[handle] = q
	s.mu.Unlock()
	s.pumps.Go(func() {
		for {
			tokens, d, err := q.Next(context.Background()) // the end of the engine is its end
			if err != nil {
				break
			}
			s.out.add(item{Of: handle, Tokens: tokens, Done: doneOf(d)})
		}
		s.mu.Lock()
		delete(s.seqs, handle)
		s.mu.Unlock()
	})
	if x := q.Export(); x != nil {
		s.offer(handle, x)
	}
}

// offer passes on what is written of an export, until the node releases it.
func (s *Server) offer(handle int64, x *engine.Export) {
	s.mu.Lock()
	s.exports[handle] = x
	s.mu.Unlock()
	s.pumps.Go(func() {
		for {
			span, err := x.NextSpan(context.Background()) // ends with the engine, or released
			if err != nil {
				s.out.add(item{Of: handle, End: faultOf(err)})
				return
			}
			s.out.add(item{Of: handle, Spans: []infer.Span{span}})
		}
	})
}

func (s *Server) drop(handle int64) *engine.Export {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.exports[handle]
	delete(s.exports, handle)
	return x
}

func at[T any](s *Server, m map[int64]T, handle int64) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return m[handle]
}

func (s *Server) lend(o *order) int {
	x := s.e.Lend(o.Tokens)
	if x == nil {
		return 0
	}
	s.offer(o.Of, x)
	return x.Tokens()
}

// reserve waits for a place beside.
func (s *Server) reserve(o *order) {
	ctx, cancel := context.WithCancel(context.Background())
	h := &hold{cancel: cancel}
	s.mu.Lock()
	s.holds[o.Of] = h
	s.mu.Unlock()
	s.pumps.Go(func() {
		r, err := s.e.Reserve(ctx, s.timed(o))
		if err == nil {
			s.mu.Lock()
			if h.h = r; s.holds[o.Of] != h { // given back meanwhile
				err = engine.ErrCancelled
			}
			s.mu.Unlock()
			if err != nil {
				r.Cancel()
			}
		}
		if err != nil {
			s.forget(o.Of)
			s.answer(o, item{Fault: faultOf(err)})
			return
		}
		s.answer(o, item{Held: r.Held(), Report: r.Report()})
	})
}

// forget takes a reservation away, and ends the wait for it; nil if there is none, or not yet.
func (s *Server) forget(handle int64) *engine.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.holds[handle]
	if h == nil {
		return nil
	}
	delete(s.holds, handle)
	h.cancel()
	return h.h
}

func (s *Server) held(handle int64) *engine.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.holds[handle]; h != nil {
		return h.h
	}
	return nil
}

func (s *Server) start(o *order) {
	r := s.held(o.Of)
	if r == nil {
		s.answer(o, item{Fault: faultOf(errNoHold)})
		return
	}
	q, err := r.Start(o.First)
	if err == nil {
		s.forget(o.Of)
	}
	s.answer(o, item{Fault: faultOf(err)})
	if err == nil {
		s.follow(o.Of, q)
	}
}

var errNoHold = fmt.Errorf("%w: the rank has no such reservation", engine.ErrCancelled)

// end ends a reservation: what it holds is given back, or kept in the cache.
func (s *Server) end(o *order) {
	switch r := s.forget(o.Of); {
	case r == nil: // it has started or ended by itself, or whoever waits for it gives it back
	case o.Do == keep:
		r.Keep(o.Count)
	default:
		r.Cancel()
	}
}

func (s *Server) audit() (leaked int, books *fault) {
	return s.e.LeakedBlocks(), faultOf(s.e.Check())
}

func (s *Server) profile(o *order) item {
	var w rows.ProfileWindow
	var err error
	ctx := context.Background() // the engine's end is that of its window
	if o.Do == cease {
		w, err = s.e.StopProfile(ctx)
	} else {
		var r rows.ProfileRequest
		if err = json.Unmarshal(o.JSON, &r); err == nil {
			w, err = s.e.StartProfile(ctx, r)
		}
	}
	b, bad := json.Marshal(w)
	return item{JSON: b, Fault: faultOf(errors.Join(err, bad))}
}

// serveKV copies KV out and in, each copy beside the others.
func (s *Server) serveKV() {
	var copies sync.WaitGroup
	defer copies.Wait()
	for {
		o, err := s.kv.receive()
		if err != nil {
			return
		}
		src, err := s.kv.payload(o.Payload, nil)
		if err != nil {
			s.links.close()
			return
		}
		copies.Go(func() {
			dst, err := s.copy(o, src)
			p := &packet{Items: []item{{Call: o.Call, Fault: faultOf(err)}}, Payload: len(dst)}
			if err := s.kv.send(p, dst); err != nil {
				s.links.close()
			}
		})
	}
}

// copy gives the bytes of a read; a copy that has begun is waited for.
func (s *Server) copy(o *order, src []byte) (dst []byte, err error) {
	ctx := context.Background()
	if o.Do == write {
		if r := s.held(o.Of); r != nil {
			return nil, r.Write(ctx, o.Span, src)
		}
		return nil, errNoHold
	}
	x := at(s, s.exports, o.Of)
	if x == nil {
		return nil, fmt.Errorf("%w: the rank has no such export", engine.ErrCancelled)
	}
	if o.Count < 0 || o.Count > maxPayload {
		return nil, fmt.Errorf("%w: a span of %d bytes", engine.ErrInvalid, o.Count)
	}
	dst = make([]byte, o.Count)
	if err := x.Read(ctx, o.Span, dst); err != nil {
		return nil, err
	}
	return dst, nil
}
