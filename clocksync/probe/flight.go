package probe

import (
	"fmt"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/stamp"
	"meridian.internal/shared/clock"
)

// flight is one exchange under way or done.
type flight struct {
	seq   uint32
	prev  *flight  // the exchange before it, whose T3 by the kernel the reply may bring; nil: none
	t1    int64    // before the write
	tx    stamp.TX // the kernel's stamp of the request
	hasTX bool
	t4    stamp.RX
	reply ntp.Packet
	done  bool // the reply has come
	exact bool // the kernel's stamp of the reply came back
}

// sent is when the request left: the kernel's stamp where it is possible, else the program's.
func (f *flight) sent() (ns, errNS int64, kernel bool) {
	if x := f.tx; f.hasTX && x.NS >= f.t1-x.ErrNS && x.NS <= f.t4.NS+x.ErrNS+f.t4.ErrNS {
		return x.NS, x.ErrNS, true
	}
	return f.t1, 0, false
}

func (f *flight) exchange(t3, t3Err int64) ntp.Exchange {
	t1, t1Err, _ := f.sent()
	remote := max(int64(f.reply.ErrNS), t3Err)
	return ntp.Exchange{T1: t1, T2: f.reply.T2, T3: t3, T4: f.t4.NS, ErrNS: max(t1Err, f.t4.ErrNS) + remote}
}

// talk is a burst of exchanges with one peer.
type talk struct {
	burst   Burst
	clock   clockWords // the peer's; meaningless before the first reply
	newest  *flight    // the latest that was begun
	lastErr error
}

// clockWords are a clock id as it travels; to compare them costs nothing.
type clockWords struct {
	epoch    uint64
	instance uint32
}

func (w clockWords) id() clock.ID { return clock.MakeID(w.epoch, w.instance) }

// begin returns the next exchange, and its request.
func (t *talk) begin(own clock.ID, seq uint32) (*flight, ntp.Packet) {
	epoch, instance, _ := own.Words() // our own id is well formed
	q := ntp.Packet{Seq: seq, Epoch: epoch, Instance: instance}
	f := &flight{seq: seq, prev: t.newest}
	if f.prev != nil {
		q.PrevSeq = f.prev.seq
	}
	t.newest = f
	return f, q
}

// lose notes an exchange without reply and says whether the burst is hopeless.
func (t *talk) lose(err error) (hopeless bool) {
	t.burst.Lost++
	t.lastErr = err
	return t.burst.Lost >= 2 && len(t.burst.Exchanges) == 0
}

// take adds what the reply of f proves: about f with what is known already, about the previous exchange exactly.
func (t *talk) take(f *flight) error {
	r, b, prev := f.reply, &t.burst, f.prev
	f.done, f.prev = true, nil
	if id := (clockWords{r.Epoch, r.Instance}); b.Peer == "" {
		t.clock, b.Peer = id, id.id()
	} else if t.clock != id {
		return fmt.Errorf("%w: %s and %s", ErrTwoClock, b.Peer, id.id())
	}
	if r.HasPair {
		b.Remote = &ntp.Pair{AtNS: r.T3, DiffNS: r.RawDiffNS, ErrNS: int64(r.PairErrNS)}
	}
	b.Exchanges = append(b.Exchanges, f.exchange(r.T3, 0))
	if r.HasPrevTX && prev != nil && prev.done && !prev.exact {
		prev.exact = true
		b.Exchanges = append(b.Exchanges, prev.exchange(r.PrevTX, int64(r.ErrNS)))
		if _, _, kernel := prev.sent(); kernel && prev.t4.Kernel && prev.reply.KernelRX {
			b.Transport = UDPKernel
		}
	}
	return nil
}

// end returns what the burst proved.
func (t *talk) end() (Burst, error) {
	if len(t.burst.Exchanges) == 0 && t.lastErr != nil {
		return Burst{}, fmt.Errorf("%w: %w", ErrNoReply, t.lastErr)
	}
	return t.burst.finish()
}
