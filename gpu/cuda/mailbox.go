//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"hash/fnv"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"meridian.internal/shared/clock"
)

// mailbox asks the card's clock. A kernel of one thread answers a burst of questions through pinned memory and ends after a
// millisecond at the latest, so that nothing waits for it.
type mailbox struct {
	*launcher
	box  pinned // question, answer (4 bytes each, 64 apart), the card's time
	now  func() int64
	seq  uint32
	asks []exchange
}

const (
	burstQuestions = 48
	burstNS        = 1_000_000 // of the card's clock, at most
	boxBytes       = 256
	lostNS         = 30_000_000_000 // a long prefill may be before it
)

func newMailbox(c *context, k *kernels, now func() int64) (*mailbox, error) {
	s, err := c.newStream()
	if err != nil {
		return nil, err
	}
	m := &mailbox{launcher: newLauncher(s, k), now: now}
	if err := c.growPinned(&m.box, boxBytes); err != nil {
		return nil, errors.Join(err, m.close())
	}
	clear(m.box.bytes())
	return m, nil
}

// burst asks as often as the kernel lives, up to burstQuestions times.
func (m *mailbox) burst() ([]exchange, error) {
	m.asks = m.asks[:0]
	m.launch("mailbox", grid{threads: 1}, uint64(m.box.at), uint64(m.seq), burstQuestions, burstNS)
	if err := m.taken(); err != nil {
		return nil, err
	}
	b, first := box(m.box.bytes()), m.seq+1
	for range burstQuestions {
		m.seq++
		x, ok, err := b.ask(m.seq, first, m.now)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		m.asks = append(m.asks, x)
	}
	return m.asks, m.wait()
}

// box is the memory through which the host and the kernel speak, its words 64 bytes apart: the number of the newest question, that
// of the newest answer, the time of that answer, and at the end of a burst the number of its first question.
type box []byte

func (b box) word(i int) *uint32 { return (*uint32)(unsafe.Pointer(&b[64*i])) }

func (b box) card() uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[128]))) }

// ask puts question seq of the burst that began with first, and waits for its answer. false: the kernel has ended without it.
//
// The kernel writes the time, waits until that is in the host's memory, and then writes the number of its answer: a round trip later.
// The time that is seen first ends the exchange, if it is still there with the answer: then it was whole.
func (b box) ask(seq, first uint32, now func() int64) (x exchange, ok bool, err error) {
	const answer, ended = 1, 3
	before := b.card()
	x.ask = now()
	atomic.StoreUint32(b.word(0), seq)
	for spins := 1; atomic.LoadUint32(b.word(answer)) != seq; spins++ {
		if card := b.card(); x.answer == 0 && card != before {
			x.answer, x.card = now(), int64(card)
		}
		if spins%4096 == 0 && now()-x.ask > lostNS {
			return x, false, fmt.Errorf("cuda: the card has not answered question %d about its clock for %d ns", seq, now()-x.ask)
		}
		if atomic.LoadUint32(b.word(ended)) == first && atomic.LoadUint32(b.word(answer)) != seq {
			return x, false, nil // its time was over
		}
	}
	if card := int64(b.card()); x.answer == 0 || card != x.card {
		x.answer, x.card = now(), card
	}
	return x, true, nil
}

func (m *mailbox) close() error {
	return firstOf(m.freePinned(&m.box), m.do("cuStreamDestroy_v2", m.handle))
}

// cardClock is the estimate that the asker makes and others read.
type cardClock struct {
	id      clock.ID // of the card's clock
	mu      sync.Mutex
	edge    edge // guarded by mu
	clashes int64
	pairs   int64
}

// convert puts a time of the card on the steady clock.
func (c *cardClock) convert(card int64) (steadyNS, boundNS int64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	lo, hi, ok := c.edge.at(card)
	return card + lo + (hi-lo)/2, (hi - lo + 1) / 2, ok
}

// compare counts a duration that was measured twice: by events and by stamps of the stream.
func (c *cardClock) compare(eventsNS, stampsNS int64) {
	const slackNS = 2000
	d := max(eventsNS-stampsNS, stampsNS-eventsNS)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pairs++
	if d > max(slackNS, stampsNS/100) {
		c.clashes++
	}
}

// ClockState is what is known of the card's clock.
type ClockState struct {
	Estimate clock.Estimate // of the process's steady clock, for the card's
	Bursts   int64          // of questions
	Restarts int64          // of the estimate
	Pairs    int64          // durations measured by events and by stamps
	Clashes  int64          // pairs that differ by more than 1 % and 2 µs
}

// Clock says what is known of the card's clock at its time of the newest burst; false: nothing.
func (b *Backend) Clock() (ClockState, bool) {
	c := &b.clock
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.edge.anchors) == 0 {
		return ClockState{}, false
	}
	e, ok := c.edge.estimate(c.edge.newest(), c.id)
	return ClockState{e, c.edge.bursts, c.edge.restarts, c.pairs, c.clashes}, ok
}

// The first bursts come quickly, so that the rates are known soon.
var burstPauses = []time.Duration{5 * time.Millisecond, 20 * time.Millisecond, 75 * time.Millisecond, 200 * time.Millisecond, 700 * time.Millisecond}

// burstEvery is the pause between later bursts.
const burstEvery = 500 * time.Millisecond

// ask is the goroutine that keeps the card's clock. Before asked is closed it has made the first bursts.
func (b *Backend) ask(c *context, k *kernels, asked chan<- error, closing <-chan struct{}) {
	runtime.LockOSThread()
	var m *mailbox
	err := c.current()
	if err == nil {
		m, err = newMailbox(c, k, b.now)
	}
	for n := 0; err == nil; n++ {
		var burst []exchange
		if burst, err = m.burst(); err != nil {
			break
		}
		b.clock.mu.Lock()
		b.clock.edge.add(burst)
		b.clock.mu.Unlock()
		pause := burstEvery
		if n < len(burstPauses) {
			pause = burstPauses[n]
		}
		if n == 2 {
			close(asked)
			asked = nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
			continue
		case <-closing:
			timer.Stop()
		}
		break
	}
	if asked != nil {
		if err != nil {
			asked <- err
		}
		close(asked)
	}
	if m != nil {
		err = firstOf(err, m.close())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = firstOf(b.err, err)
}

// cardID names a card's clock.
func cardID(uuid [16]byte) clock.ID {
	h := fnv.New64a()
	h.Write(uuid[:])
	return clock.MakeID(h.Sum64(), 0)
}
