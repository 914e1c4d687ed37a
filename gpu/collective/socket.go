package collective

import (
	"bufio"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// message is what a socket carries, in gob. From a rank: arrivals, and why it leaves. To a rank: calls, rounds and the failure of
// all.
type message[T any] struct {
	Kind  kind
	Round int64 // arrival, call, round
	Word  T     // arrival
	Words []T   // round
	Text  string
}

type kind int

const (
	arrival kind = iota + 1
	call
	over
	failure
	leave
)

// writeLimit is for one message: a process that takes nothing for so long hangs.
const writeLimit = 5 * time.Second

// wire is one side of a connection. One goroutine reads; any may write.
type wire[T any] struct {
	conn net.Conn
	in   *gob.Decoder

	mu  sync.Mutex // held for one whole message
	buf *bufio.Writer
	out *gob.Encoder
}

func newWire[T any](c net.Conn) *wire[T] {
	w := &wire[T]{conn: c, in: gob.NewDecoder(bufio.NewReader(c)), buf: bufio.NewWriter(c)}
	w.out = gob.NewEncoder(w.buf)
	return w
}

func (w *wire[T]) send(m message[T]) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.conn.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil {
		return err
	}
	if err := w.out.Encode(m); err != nil {
		return err
	}
	return w.buf.Flush()
}

func (w *wire[T]) receive() (message[T], error) {
	var m message[T]
	err := w.in.Decode(&m)
	return m, err
}

// Host seats the rank of another process at the end of a connection until it leaves, which it tells by nil; or until it is gone or
// ctx ends. Then the caller says why: Leave.
func (h *Hub[T]) Host(ctx context.Context, rank int, c net.Conn) error {
	defer c.Close()
	sub, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(sub, func() { _ = c.Close() })
	defer stop()
	s, w := h.seats[rank], newWire[T](c)
	var forwarding sync.WaitGroup
	forwarding.Go(func() {
		if err := s.forward(sub, w); errors.Is(err, os.ErrDeadlineExceeded) {
			cancel() // it hangs. One that has closed its end may have said something before, which take reads up to the end
		}
	})
	err := s.take(w)
	cancel()
	forwarding.Wait()
	return err
}

// take hands what the rank says to its place, until it leaves; the error is nil if it left in peace.
func (s *seat[T]) take(w *wire[T]) error {
	for {
		m, err := w.receive()
		switch {
		case err != nil:
			return fmt.Errorf("its process is gone: %w", err)
		case m.Kind == leave && m.Text == "":
			return nil
		case m.Kind == leave:
			return errors.New(m.Text)
		case m.Kind != arrival:
			return fmt.Errorf("message of kind %d is none of a rank", m.Kind)
		}
		if err := s.Arrive(m.Round, m.Word); err != nil {
			if err := w.send(message[T]{Kind: failure, Round: m.Round, Text: err.Error()}); err != nil {
				return err
			}
		}
	}
}

// forward tells the rank what happens at its place.
func (s *seat[T]) forward(ctx context.Context, w *wire[T]) error {
	for {
		m := message[T]{Kind: call}
		select {
		case <-ctx.Done():
			return nil
		case <-s.called:
			s.hub.mu.Lock()
			m.Round = s.hub.round
			s.hub.mu.Unlock()
		case r := <-s.released:
			m = message[T]{Kind: over, Round: r.Number, Words: r.Words}
			if r.Err != nil {
				m.Kind, m.Text = failure, r.Err.Error()
			}
		}
		if err := w.send(m); err != nil {
			return err
		}
	}
}

// remote is the place of a rank in another process.
type remote[T any] struct {
	w        *wire[T]
	rank     int
	called   chan struct{}
	released chan Round[T]
	ended    chan struct{} // the reader has

	mu    sync.Mutex // guards the fields below
	round int64      // at which this rank has arrived last
	err   error
}

// Join takes the place of a rank whose hub hosts the other end of the connection, which Leave closes.
func Join[T any](c net.Conn, rank int) Member[T] {
	r := &remote[T]{
		w: newWire[T](c), rank: rank, called: make(chan struct{}, 1), released: make(chan Round[T], 1), ended: make(chan struct{}),
	}
	go func() { // Leave waits for it
		defer close(r.ended)
		r.read()
	}()
	return r
}

// read takes in what the hub says, until the connection ends.
func (r *remote[T]) read() {
	for {
		m, err := r.w.receive()
		switch {
		case err != nil:
			r.fail(fmt.Errorf("%w: the process of the ranks' meeting point: %w", ErrLost, err))
			return
		case m.Kind == call:
			r.call(m.Round)
		case m.Kind == over:
			select {
			case r.released <- Round[T]{Number: m.Round, Words: m.Words}:
			default: // the rank takes one before it arrives again
				r.fail(fmt.Errorf("%w: rank %d heard of round %d too early", ErrOutOfStep, r.rank, m.Round))
			}
		case m.Kind == failure:
			r.fail(told(m.Text))
		}
	}
}

// told is an error that the hub gave its ranks.
type told string

func (t told) Error() string { return string(t) }
func (t told) Unwrap() error { return ErrLost }

// call passes a call on, unless this rank came before it was heard.
func (r *remote[T]) call(round int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if round <= r.round {
		return
	}
	select {
	case r.called <- struct{}{}:
	default:
	}
}

func (r *remote[T]) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return
	}
	r.err = err
	select {
	case r.released <- Round[T]{Number: r.round, Err: err}:
	default:
	}
}

// Arrive implements Member.
func (r *remote[T]) Arrive(round int64, word T) error {
	r.mu.Lock()
	err := r.err
	r.round = max(r.round, round)
	select {
	case <-r.called:
	default:
	}
	r.mu.Unlock()
	if err != nil {
		return err
	}
	if err := r.w.send(message[T]{Kind: arrival, Round: round, Word: word}); err != nil {
		return fmt.Errorf("%w: rank %d: %w", ErrLost, r.rank, err)
	}
	return nil
}

// Called implements Member.
func (r *remote[T]) Called() <-chan struct{} { return r.called }

// Released implements Member.
func (r *remote[T]) Released() <-chan Round[T] { return r.released }

// Leave implements Member.
func (r *remote[T]) Leave(err error) {
	m := message[T]{Kind: leave}
	if err != nil {
		m.Text = err.Error()
	}
	_ = r.w.send(m) // a broken connection says as much
	_ = r.w.conn.Close()
	<-r.ended
}
