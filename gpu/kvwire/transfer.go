package kvwire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// Sink takes the KV of one prompt. *engine.Reservation is one.
type Sink interface {
	// Write installs the canonical bytes of a span, in any order; it blocks until they are copied.
	Write(ctx context.Context, span infer.Span, src []byte) error
	// Pull installs a span out of the sender's blocks, which hold its tokens in order, and gives the time of the copy in ns.
	Pull(ctx context.Context, span infer.Span, from backend.Attached, blocks []int32) (int64, error)
}

// Transfer is one request on one connection. Not for concurrent use, but for Close by a deferred call.
type Transfer struct {
	c      *Client
	l      *peerLink
	addr   string
	id     int64
	from   *mapping           // the sender's KV; nil: it comes by the connection
	stop   context.CancelFunc // of the pings
	pinged chan struct{}
	report Report
	lent   bool // a peer's cached blocks, not a prefill's
	clean  bool // acknowledged: the connection can serve another
}

// Peer describes the other side.
func (t *Transfer) Peer() Hello { return t.l.peer }

// Report is what happened so far.
func (t *Transfer) Report() Report { return t.report }

// Claim holds the lease of a prefill that is done, until the request comes or the transfer is closed.
func (t *Transfer) Claim(ctx context.Context) error {
	return t.ask(ctx, func() error { return t.l.send(Header{Type: TypeClaim, Request: t.id}, nil) })
}

// Request asks for the KV of tokens from on; limit is how long the sender may take, prefill included.
func (t *Transfer) Request(ctx context.Context, from int, limit time.Duration) error {
	t.report.Peer, t.report.TokensHeld, t.report.RequestedNS = t.l.peer.Node, from, t.c.o.Now()
	return t.ask(ctx, func() error {
		return t.l.sendJSON(TypeRequest, t.id, Want{TokenFrom: from, DeadlineMS: limit.Milliseconds(), InPlace: t.from != nil})
	})
}

// Fetch asks for what the peer has cached of the beginning of a prompt, but for the first held tokens. Receive then takes it in;
// PromptTokens of its trailer says how many tokens are there.
func (t *Transfer) Fetch(ctx context.Context, prompt []int32, held int) error {
	if t.from != nil { // lent blocks come by the connection
		t.c.release(t.from)
		t.from = nil
	}
	t.lent = true
	t.report.Peer, t.report.TokensHeld, t.report.RequestedNS = t.l.peer.Node, held, t.c.o.Now()
	ids := make([]byte, 0, 4*len(prompt))
	for _, id := range prompt[:min(len(prompt), maxControl/4)] {
		ids = binary.LittleEndian.AppendUint32(ids, uint32(id))
	}
	return t.ask(ctx, func() error {
		return t.l.send(Header{Type: TypeFetch, Request: t.id, TokenFrom: uint32(held), TokenTo: uint32(len(prompt))}, ids)
	})
}

func (t *Transfer) ask(ctx context.Context, send func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return send()
}

// ping says from now until Close that the connection is wanted: what the transfer is for may be asked long after it was opened.
func (t *Transfer) ping() {
	ctx, cancel := context.WithCancel(context.Background())
	t.stop, t.pinged = cancel, make(chan struct{})
	go func() {
		defer close(t.pinged)
		t.l.ping(ctx, t.c.o.Timing.Ping)
	}()
}

// Close ends the transfer. The connection is kept after an acknowledged one; otherwise the sender is told and it is closed.
func (t *Transfer) Close() {
	t.stop()
	<-t.pinged
	if t.from != nil {
		t.c.release(t.from)
		t.from = nil
	}
	if t.clean {
		t.c.keep(t.addr, t.l)
		return
	}
	_ = t.l.send(Header{Type: TypeCancel, Request: t.id}, nil) // the end of the connection says the same, later
	_ = t.l.conn.Close()
}

// block is a KV frame on its way from the socket to the sink, its checksum not checked yet.
type block struct {
	head Header
	data []byte
}

// Receive installs what comes into sink, acknowledges, and gives the trailer. prompt is the number of prompt tokens: no
// frame beyond it is accepted.
func (t *Transfer) Receive(ctx context.Context, prompt int, sink Sink) (Trailer, error) {
	r := &receiver{t: t, prompt: prompt, sink: sink, blocks: make(chan block, inFlight), mem: newFrames(t.c.o.Buffers)}
	defer r.mem.close()
	sub, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(sub, func() { _ = t.l.conn.Close() }) // a read that waits ends now
	var trailer Trailer
	var both sync.WaitGroup
	both.Go(func() {
		defer close(r.blocks)
		var err error
		if trailer, err = r.read(sub); err != nil {
			cancel(err)
		}
	})
	both.Go(func() {
		for b := range r.blocks {
			if err := r.install(sub, b); err != nil {
				cancel(err)
			}
			r.mem.give(b.data)
		}
	})
	both.Wait()
	if !stop() {
		return Trailer{}, fmt.Errorf("kv of request %d from %s: %w", t.id, t.l.peer.Node, context.Cause(sub))
	}
	if err := t.l.send(Header{Type: TypeAck, Request: t.id}, nil); err != nil {
		return Trailer{}, err
	}
	t.clean = true
	return trailer, nil
}

// receiver is the state of one Receive: read owns the wire half of the report, install the other.
type receiver struct {
	t      *Transfer
	prompt int
	sink   Sink
	blocks chan block // has room for all frames that there are
	mem    *frames
	low    int // tokens x layers received, to see that nothing is missing

	scratch []byte // of install: converted KV
}

// read takes frames until the trailer.
func (r *receiver) read(ctx context.Context) (Trailer, error) {
	for {
		buf, err := r.mem.take(ctx)
		if err != nil {
			return Trailer{}, err
		}
		h, payload, err := r.frame(&buf)
		if err == nil && (h.Type == TypeKV || h.Type == TypeWritten) {
			r.blocks <- block{h, payload}
			continue
		}
		if err == nil {
			err = h.check(payload)
		}
		var t Trailer
		switch {
		case err != nil:
		case h.Type == TypeTrailer:
			t, err = r.end(payload)
		case h.Type == TypeError:
			var f Fault
			f, err = parseJSON[Fault](h.Type, payload)
			err = errors.Join(fmt.Errorf("%w: %s", ErrRemote, f.Message), err)
		}
		r.mem.give(buf)
		if err != nil || h.Type == TypeTrailer {
			return t, err
		}
	}
}

// frame reads one frame into buf, or into a larger one that takes its place, and counts it.
func (r *receiver) frame(buf *[]byte) (Header, []byte, error) {
	t, t0 := r.t, int64(0)
	h, payload, err := readUnchecked(t.l.r, func(n int) []byte {
		*buf = r.mem.fit(*buf, n)
		return *buf
	}, func(h Header) error {
		t0 = t.c.o.Now()
		return r.accept(h)
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return h, nil, fmt.Errorf("the context node sent nothing for %s, not even a heartbeat: %w", t.c.o.Timing.Lost, err)
	case err != nil:
		return h, nil, fmt.Errorf("read frame: %w", err)
	case h.Type == TypeKV || h.Type == TypeWritten:
		r.note(h.Type, t0, spanOf(h))
	}
	return h, payload, nil
}

func (r *receiver) end(payload []byte) (Trailer, error) {
	t, err := parseJSON[Trailer](TypeTrailer, payload)
	if err != nil {
		return Trailer{}, err
	}
	if r.t.lent {
		return t, r.endLent(t)
	}
	if len(t.First) == 0 {
		return Trailer{}, fmt.Errorf("%w: a trailer without first token", ErrFrame)
	}
	want, here := 0, r.t.c.o.Hello
	for layer := range here.Layers {
		want += r.prompt - max(r.t.report.TokensHeld, here.firstKept(layer, r.prompt))
	}
	if !t.FinishedHere && r.low != want {
		return Trailer{}, fmt.Errorf("%w: %d of %d token-layers came", ErrFrame, r.low, want)
	}
	if r.t.report.Tokens = r.prompt - r.t.report.TokensHeld; r.low != want {
		r.t.report.Tokens = r.low / max(1, here.Layers)
	}
	return t, nil
}

// endLent verifies that all of what the peer says to have lent came.
func (r *receiver) endLent(t Trailer) error {
	got := t.PromptTokens - r.t.report.TokensHeld
	if got <= 0 || t.PromptTokens > r.prompt || r.low != got*r.t.c.o.Hello.Layers {
		return fmt.Errorf("%w: %d token-layers of %d tokens came", ErrFrame, r.low, got)
	}
	r.t.report.Tokens = got
	return nil
}

// note counts a KV frame; only read calls it.
func (r *receiver) note(kind Type, t0 int64, span infer.Span) {
	p := &r.t.report
	if p.StartNS == 0 {
		p.StartNS = t0
	}
	if kind == TypeKV { // else the copy on the card is the wire: see install
		p.LastByteNS = r.t.c.o.Now()
		p.WireNS += p.LastByteNS - t0
	}
	p.Bytes += int64(spanBytes(r.t.l.peer, span))
	p.Frames++
	r.low += (span.TokenTo - span.TokenFrom) * (span.LayerTo - span.LayerFrom)
}

func spanOf(h Header) infer.Span {
	return infer.Span{LayerFrom: int(h.LayerFrom), LayerTo: int(h.LayerTo), TokenFrom: int(h.TokenFrom), TokenTo: int(h.TokenTo)}
}

// accept checks a header before a byte of its payload is read: who sent it, for what, and that its size is its range's.
func (r *receiver) accept(h Header) error {
	t := r.t
	if h.Epoch != t.l.peerEpoch {
		return fmt.Errorf("%w: epoch %016x, the connection began with %016x", ErrFrame, h.Epoch, t.l.peerEpoch)
	}
	switch h.Type {
	case TypePing:
		return nil
	case TypeTrailer, TypeError:
		if h.Request != t.id {
			return fmt.Errorf("%w: type %d for request %d, asked was %d", ErrFrame, h.Type, h.Request, t.id)
		}
		return nil
	case TypeKV, TypeWritten:
		if (h.Type == TypeWritten) != (t.from != nil) {
			return fmt.Errorf("%w: type %d, KV in place was asked for: %t", ErrFrame, h.Type, t.from != nil)
		}
	default:
		return fmt.Errorf("%w: type %d is not a sender's", ErrFrame, h.Type)
	}
	s, here := spanOf(h), t.c.o.Hello
	if h.Request != t.id || s.LayerFrom >= s.LayerTo || s.LayerTo > here.Layers || s.TokenFrom >= s.TokenTo ||
		s.TokenFrom < t.report.TokensHeld || s.TokenTo > r.prompt {
		return fmt.Errorf("%w: kv %+v of request %d, asked was request %d, tokens %d to %d of %d layers", ErrFrame, s,
			h.Request, t.id, t.report.TokensHeld, r.prompt, here.Layers)
	}
	if h.HeadFrom != 0 || int(h.HeadTo) != here.KVHeads {
		return fmt.Errorf("%w: heads %d to %d, want all %d", ErrFrame, h.HeadFrom, h.HeadTo, here.KVHeads)
	}
	want := spanBytes(t.l.peer, s)
	if h.Type == TypeWritten {
		want = 4 * spanBlocks(t.l.peer, s)
	}
	if int(h.Length) != want {
		return fmt.Errorf("%w: %d bytes for %+v, want %d", ErrFrame, h.Length, s, want)
	}
	return nil
}

// install checks a block and writes it into the sink; after the end of ctx it does nothing.
func (r *receiver) install(ctx context.Context, b block) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := b.head.check(b.data); err != nil {
		return fmt.Errorf("read frame: %w", err)
	}
	t, span := r.t, spanOf(b.head)
	if b.head.Type == TypeWritten {
		return r.pull(ctx, span, b.data)
	}
	t0 := t.c.o.Now()
	data, err := convert(r.scratch, b.data, span, t.l.peer, t.c.o.Hello)
	if err != nil {
		return err
	}
	if len(data) > 0 && &data[0] != &b.data[0] {
		r.scratch = data
	}
	// Not cancelled in the middle: the copy in flight ends before the blocks are freed.
	if err := r.sink.Write(context.WithoutCancel(ctx), span, data); err != nil {
		return fmt.Errorf("install kv %+v: %w", span, err)
	}
	t.report.InstalledNS = t.c.o.Now()
	t.report.InstallNS += t.report.InstalledNS - t0
	return nil
}
