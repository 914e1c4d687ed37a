package kvwire

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"time"
)

// Timing holds the limits of waiting. The zero value means the defaults.
type Timing struct {
	Ping      time.Duration // a side that has something pending is heard at least this often; default 250 ms
	Lost      time.Duration // nothing heard for this long while something is pending: the peer is lost; default 1.5 s
	Idle      time.Duration // a connection that nobody uses is closed, so that a quiet node holds nothing; default 10 s
	Handshake time.Duration // for dialling and the handshake; default 2 s
}

func (t Timing) withDefaults() Timing {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&t.Ping, 250*time.Millisecond)
	set(&t.Lost, 1500*time.Millisecond)
	set(&t.Idle, 10*time.Second)
	set(&t.Handshake, 2*time.Second)
	return t
}

// link is one connection that speaks frames. One goroutine reads; any may write.
type link struct {
	conn  net.Conn
	r     *bufio.Reader
	epoch uint64 // ours, in every frame that we send
	lost  time.Duration

	wmu sync.Mutex // held for one whole frame
}

func newLink(c net.Conn, epoch uint64, lost time.Duration) *link {
	l := &link{conn: c, epoch: epoch, lost: lost}
	l.r = bufio.NewReaderSize(listener{l}, 4<<10) // for headers: what it holds of a payload is copied once more
	return l
}

// listener moves the deadline with every read, so that a large frame on a slow network is no lost peer while bytes come.
type listener struct{ l *link }

func (r listener) Read(p []byte) (int, error) {
	if r.l.lost > 0 {
		if err := r.l.conn.SetReadDeadline(time.Now().Add(r.l.lost)); err != nil {
			return 0, err
		}
	}
	return r.l.conn.Read(p)
}

// send writes one frame. A peer that takes no bytes for the lost time is lost.
func (l *link) send(h Header, payload []byte) error { return l.write(l.head(nil, h, payload), payload) }

// head appends the header of a frame of ours.
func (l *link) head(b []byte, h Header, payload []byte) []byte {
	h.Epoch = l.epoch
	return AppendHeader(b, h, payload)
}

// write writes one frame whose header is made.
func (l *link) write(head, payload []byte) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.writeLocked(head, payload)
}

func (l *link) writeLocked(head, payload []byte) error {
	if err := l.conn.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil {
		return fmt.Errorf("send to %s: %w", l.conn.RemoteAddr(), err)
	}
	var err error
	if len(payload) <= 16<<10 {
		_, err = l.conn.Write(append(head, payload...))
	} else {
		bufs := net.Buffers{head, payload}
		_, err = bufs.WriteTo(l.conn)
	}
	if err != nil {
		return fmt.Errorf("send to %s: %w", l.conn.RemoteAddr(), err)
	}
	return nil
}

// writeLimit is for one frame of at most maxKV bytes: 10 Mbit/s would still pass. A receiver that lives but does not read
// is closed by it; one that is dead is noticed by the missing pings.
const writeLimit = 5 * time.Second

func (l *link) sendJSON(t Type, id int64, v any) error {
	payload, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode payload of type %d: %w", t, err)
	}
	return l.send(Header{Type: t, Request: id}, payload)
}

// ping keeps the other side informed until ctx ends. A frame that is being written says the same, so it is not waited for.
func (l *link) ping(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !l.wmu.TryLock() {
			continue
		}
		err := l.writeLocked(l.head(nil, Header{Type: TypePing}, nil), nil)
		l.wmu.Unlock()
		if err != nil {
			return // the reader sees the same end of the connection and says so
		}
	}
}
