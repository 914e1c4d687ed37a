package engine

// meter shares the joules of the device among the requests that it ran for, by tokens. The device's counter moves now and
// then, not with each step: tokens wait for a price until it has moved. A request that ends before pays what a token cost
// when it last moved, and what it has paid is taken off the next bill, so that the sum over requests follows the counter.
// What the device draws while nothing runs is nobody's.
type meter struct {
	read func() (joules float64, ok bool) // newest reading; must not block. nil: nothing is measured
	last float64
	know bool // last was read
	// Tokens that wait for a price, and what ended requests have paid ahead of it.
	tokens int64
	paid   float64
	ran    int64   // tokens since the counter moved
	price  float64 // joules a token when it last moved; 0: not known yet
	slept  bool    // nothing ran
}

// ran counts the tokens of a step, and prices them if the counter has moved.
func (e *Engine) ran(f *flight) {
	m := &e.meter
	if m.read == nil {
		return
	}
	for i := range f.items {
		it := &f.items[i]
		if s := it.Seq.Data.(*Sequence); !s.ended {
			s.unpriced += int64(it.Tokens)
			m.tokens += int64(it.Tokens)
			m.ran += int64(it.Tokens)
		}
	}
	joules, ok := m.read()
	switch {
	case !ok || m.know && joules == m.last:
		return
	case !m.know || joules < m.last: // the first reading, or the counter began anew
		m.last, m.know = joules, true
		return
	}
	used := joules - m.last
	if m.last = joules; m.ran > 0 {
		m.price, m.ran = used/float64(m.ran), 0
	}
	bill := used - m.paid
	if bill <= 0 || m.tokens == 0 { // ended requests have paid more than all of it: the rest is taken off the next
		m.paid = max(-bill, 0)
		return
	}
	share := bill / float64(m.tokens)
	m.paid, m.tokens = 0, 0
	for _, q := range e.sched.Running() {
		q.Data.(*Sequence).pay(share)
	}
	for _, q := range e.sched.Waiting() { // preempted
		q.Data.(*Sequence).pay(share)
	}
}

// wakes begins anew after a time in which nothing ran.
func (m *meter) wakes() {
	if m.read == nil || !m.slept {
		return
	}
	m.slept = false
	if joules, ok := m.read(); ok {
		m.last, m.know, m.paid = joules, true, 0
	}
}

func (s *Sequence) pay(price float64) {
	if s.unpriced > 0 {
		s.energy += float64(s.unpriced) * price
		s.unpriced, s.priced = 0, true
	}
}

// settleEnergy gives the joules of a request that ends; nil if they cannot be known.
func (e *Engine) settleEnergy(s *Sequence) *float64 {
	m := &e.meter
	m.tokens -= s.unpriced
	if m.read == nil || m.price == 0 && !s.priced {
		return nil
	}
	before := s.energy
	s.pay(m.price)
	m.paid += s.energy - before
	joules := s.energy
	return &joules
}
