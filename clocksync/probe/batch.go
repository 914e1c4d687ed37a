package probe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/stamp"
	"meridian.internal/shared/clock"
)

const (
	// gather is how long bursts are waited for that begin at the same time, and replies that come at the same time. Stamps of
	// the kernel do not care when they are read; a system call and a wake-up for many packets cost little more than for one.
	gather = time.Millisecond
	// lastGather bounds the growing wait for replies of far peers.
	lastGather = 8 * time.Millisecond
	// volley is how many packets of a burst are sent at once. The first finds the path cold, which costs it some µs on both ways
	// even by stamps of the kernel; the reply to the last brings the exact stamp of the one before. On a loaded machine the two
	// ends of a packet that waits for its predecessor's reply are both cold.
	volley = 3

	queued = 1024 // bursts that wait to be begun; more wait in their goroutines
)

var (
	errLate  = errors.New("no clock reply")            // is why an exchange was given up
	errBatch = errors.New("probe: no batch to be had") // is returned when Run is over or there is no socket
)

// Batch makes the bursts of many peers together, over one socket per address family: one system call sends to all, one
// reads all replies, one all stamps of what was sent. Run's goroutine owns all state but the queue.
type Batch struct {
	steady *clock.Steady
	key    []byte
	jobs   chan *job
	ended  chan struct{}

	lines  map[bool]*line // by whether the addresses are IPv6's
	active int            // jobs under way
	local  *ntp.Pair      // read once a round; nil: not known

	// Room that send and read use again: garbage costs more here than the arithmetic.
	packets []byte
	out     []stamp.Datagram
	sending []passage
	landed  []passage
}

// line is a socket and what is under way on it.
type line struct {
	sock    *stamp.Many
	ready   []*job             // have packets to send, and none under way
	flights map[uint32]passage // by seq: await a reply
	stamps  map[uint32]*flight // by number of the send: await the kernel's stamp
}

// passage is an exchange of a job.
type passage struct {
	job    *job
	flight *flight
}

// job is one burst.
type job struct {
	talk
	to       netip.AddrPort
	left     int // packets to send
	open     int // exchanges under way
	timeout  time.Duration
	deadline int64       // of what is under way
	failure  error       // not nil: the burst proves nothing
	answer   chan result // holds one
}

type result struct {
	burst Burst
	err   error
}

// NewBatch returns a batch that does nothing before Run.
func NewBatch(s *clock.Steady, key []byte) *Batch {
	return &Batch{steady: s, key: key, jobs: make(chan *job, queued), ended: make(chan struct{}), lines: map[bool]*line{}}
}

// burst makes n exchanges with the peer at to.
func (b *Batch) burst(ctx context.Context, to netip.AddrPort, n int, timeout time.Duration) (Burst, error) {
	j := &job{to: to, left: n, timeout: timeout, answer: make(chan result, 1), talk: talk{burst: Burst{Transport: UDP, Exchanges: make([]ntp.Exchange, 0, 2*n)}}}
	select {
	case b.jobs <- j:
	case <-b.ended:
		return Burst{}, errBatch
	case <-ctx.Done():
		return Burst{}, ctx.Err()
	}
	select {
	case r := <-j.answer:
		return r.burst, r.err
	case <-b.ended:
		return Burst{}, errBatch
	case <-ctx.Done():
		return Burst{}, ctx.Err() // the exchanges that are under way end by their deadline
	}
}

// Run makes the bursts that are asked for until ctx ends. It may be called once.
func (b *Batch) Run(ctx context.Context) {
	defer close(b.ended)
	defer func() {
		for _, l := range b.lines {
			l.sock.Close()
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	wait := gather
	for {
		if b.active == 0 {
			select {
			case <-ctx.Done():
				return
			case j := <-b.jobs:
				b.admit(j)
			}
			wait = gather
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if b.round() {
			wait = gather
		} else {
			wait = min(2*wait, lastGather)
		}
	}
}

// round reads what has come and sends what is due. Not busy: nothing was sent.
func (b *Batch) round() (busy bool) {
	for more := true; more; {
		select {
		case j := <-b.jobs:
			b.admit(j)
		default:
			more = false
		}
	}
	b.local = localPair(b.steady)
	now := b.steady.Now()
	for _, l := range b.lines {
		if len(l.flights) > 0 {
			b.read(l)
			b.expire(l, now)
		}
		for len(l.ready) > 0 {
			busy = true
			b.send(l)
			if len(l.ready) > 0 {
				b.read(l) // before the replies to the next part fill the socket's buffer
			}
		}
	}
	return busy
}

func (b *Batch) admit(j *job) {
	v6 := j.to.Addr().Is6()
	l := b.lines[v6]
	if l == nil {
		sock, err := stamp.OpenMany(b.steady, v6)
		if err != nil {
			j.answer <- result{err: fmt.Errorf("%w: %w", errBatch, err)}
			return
		}
		l = &line{sock: sock, flights: map[uint32]passage{}, stamps: map[uint32]*flight{}}
		b.lines[v6] = l
	}
	l.ready = append(l.ready, j)
	b.active++
}

// send sends the next packets, as many as one system call carries.
func (b *Batch) send(l *line) {
	own, ds, buf, ps := b.steady.ID(), b.out[:0], b.packets[:0], b.sending[:0]
	for len(l.ready) > 0 && len(ps)+volley <= stamp.BatchSize {
		j := l.ready[0]
		l.ready = l.ready[1:]
		for range min(j.left, volley) {
			f, q := j.begin(own, l.nonce())
			buf = q.Append(buf, b.key)
			ds = append(ds, stamp.Datagram{To: j.to, Data: buf[len(buf)-ntp.Size:]})
			p := passage{j, f}
			ps, l.flights[f.seq] = append(ps, p), p
			j.left--
			j.open++
		}
	}
	b.out, b.packets, b.sending = ds, buf, ps
	for len(ps) > 0 {
		n, before, first, err := l.sock.Send(ds)
		if err != nil {
			clear(l.stamps) // counted anew
			b.lost(l, ps[0], err)
			n = 1
		} else {
			for i, p := range ps[:n] {
				p.flight.t1, p.job.deadline = before, before+int64(p.job.timeout)
				l.stamps[first+uint32(i)] = p.flight
			}
		}
		ps, ds = ps[n:], ds[n:]
	}
}

// nonce draws a number that no exchange under way has.
func (l *line) nonce() uint32 {
	for {
		seq := rand.Uint32()
		if _, taken := l.flights[seq]; !taken {
			return seq
		}
	}
}

// read takes the replies and sending stamps that have come.
func (b *Batch) read(l *line) {
	landed := b.landed[:0]
	ok := l.sock.Receive(func(from netip.AddrPort, data []byte, rx stamp.RX) {
		r, err := ntp.ParsePacket(data, b.key)
		if err != nil || !r.Reply {
			return
		}
		p, ok := l.flights[r.Seq]
		if !ok || p.job.to != from {
			return // a leftover, a replay or a forgery
		}
		delete(l.flights, r.Seq)
		p.flight.reply, p.flight.t4 = r, rx
		landed = append(landed, p)
	})
	ok = l.sock.Sent(func(tx stamp.TX) {
		if f := l.stamps[tx.ID]; f != nil {
			f.tx, f.hasTX = tx, true
			delete(l.stamps, tx.ID)
		}
	}) && ok
	if !ok {
		clear(l.stamps) // the wall clock was stepped
	}
	for _, p := range landed {
		j := p.job
		j.open--
		if err := j.take(p.flight); err != nil {
			j.failure, j.left = err, 0
		}
		b.next(l, j)
	}
	b.landed = landed
}

// next goes on with a burst that has no exchange under way.
func (b *Batch) next(l *line, j *job) {
	switch {
	case j.open > 0:
	case j.left > 0:
		l.ready = append(l.ready, j)
	case j.failure != nil:
		b.finish(l, j, result{err: j.failure})
	default:
		j.burst.Local = b.local
		r, err := j.end()
		b.finish(l, j, result{r, err})
	}
}

func (b *Batch) finish(l *line, j *job, r result) {
	b.active--
	if r.err != nil {
		r.err = fmt.Errorf("ask the clock at %s: %w", j.to, r.err)
	}
	j.answer <- r
	if b.active == 0 {
		clear(l.stamps) // of some sends the kernel gives none
	}
}

// expire gives up exchanges whose time is over.
func (b *Batch) expire(l *line, now int64) {
	for _, p := range l.flights {
		if now >= p.job.deadline {
			b.lost(l, p, fmt.Errorf("%w after %v", errLate, p.job.timeout))
		}
	}
}

// lost ends an exchange without reply.
func (b *Batch) lost(l *line, p passage, err error) {
	j := p.job
	delete(l.flights, p.flight.seq)
	j.open--
	if j.lose(err) {
		j.left = 0
	}
	b.next(l, j)
}
