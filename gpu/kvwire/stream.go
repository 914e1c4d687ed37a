package kvwire

import (
	"context"
	"errors"
	"fmt"
	"io"

	"meridian.internal/shared/infer"
)

// part is KV on its way from the export to the socket.
type part struct {
	span             infer.Span
	head, data       []byte // of its frame
	readNS, filledNS int64  // when its copy began and ended
}

// stream sends every span that the receiver lacks, then the trailer. This goroutine reads, one beside it sends; nothing of the
// export is read any more when it returns.
func (n *session) stream(ctx context.Context, o *Offer, w Want) error {
	sub, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	parts, mem := make(chan part, inFlight), newFrames(n.s.o.Buffers)
	defer mem.close()
	sent := make(chan error, 1)
	go func() { sent <- n.sendParts(sub, stop, o, parts, mem) }()
	top, err := n.readParts(sub, o, w, parts, mem)
	close(parts)
	if failed := <-sent; failed != nil {
		err = failed
	}
	if err != nil {
		return err
	}
	o.note(func(r *Report) { r.Tokens, r.TokensHeld = top-w.TokenFrom, w.TokenFrom })
	t, err := o.wait(ctx)
	if err != nil {
		return err
	}
	return n.l.sendJSON(TypeTrailer, o.id, t)
}

// readParts reads what the receiver lacks into free frames, or tells it where that lies, and gives the token behind the last.
func (n *session) readParts(ctx context.Context, o *Offer, w Want, parts chan<- part, mem *frames) (top int, err error) {
	top = w.TokenFrom
	for {
		span, err := o.export.NextSpan(ctx)
		if errors.Is(err, io.EOF) {
			return top, nil
		}
		if err != nil {
			return top, fmt.Errorf("kv of request %d: %w", o.id, err)
		}
		span.TokenFrom = max(span.TokenFrom, w.TokenFrom)
		top = max(top, span.TokenTo)
		if w.InPlace {
			if err := n.notify(ctx, o, span); err != nil {
				return top, err
			}
			continue
		}
		for _, s := range split(span, n.s.o.Hello) {
			data, err := mem.take(ctx)
			if err != nil {
				return top, err
			}
			p := part{span: s, data: mem.fit(data, spanBytes(n.s.o.Hello, s))}
			if err := n.read(ctx, o, &p); err != nil {
				mem.give(p.data)
				return top, err
			}
			parts <- p // has room for all that there are
		}
	}
}

// read fills a part out of the export. Its checksum is made here, so that the sending goroutine only sends.
func (n *session) read(ctx context.Context, o *Offer, p *part) error {
	p.readNS = n.s.o.Now()
	// Not cancelled in the middle: the copy in flight ends before the blocks are freed.
	if err := o.export.Read(context.WithoutCancel(ctx), p.span, p.data); err != nil {
		return fmt.Errorf("read kv of request %d: %w", o.id, err)
	}
	p.filledNS = n.s.o.Now()
	p.head = n.l.head(nil, headerOf(TypeKV, o.id, p.span, n.s.o.Hello), p.data)
	return nil
}

// sendParts sends parts until there are no more, and gives their frames back. After the end of ctx, or an error, which ends it, it
// sends none.
func (n *session) sendParts(ctx context.Context, stop context.CancelCauseFunc, o *Offer, parts <-chan part, mem *frames) (err error) {
	for p := range parts {
		if err == nil && ctx.Err() == nil {
			if err = n.sendSpan(o, p.span, p.head, p.data); err != nil {
				stop(err)
			} else {
				o.note(func(r *Report) { r.InstallNS += p.filledNS - p.readNS })
			}
		}
		mem.give(p.data)
	}
	return err
}

// sendSpan sends a frame about a span, its KV or where that lies, and counts it.
func (n *session) sendSpan(o *Offer, span infer.Span, head, payload []byte) error {
	from := n.s.o.Now()
	if err := n.l.write(head, payload); err != nil {
		_ = n.l.conn.Close() // half a frame may be out: nothing can follow it
		return err
	}
	to := n.s.o.Now()
	o.note(func(r *Report) {
		if r.StartNS == 0 {
			r.StartNS = from
		}
		r.Bytes += int64(spanBytes(n.s.o.Hello, span))
		r.Frames++
		r.WireNS += to - from
		r.LastByteNS = to
	})
	return nil
}

// split cuts a span into parts near frameGoal: by layers first, then by whole blocks, then by tokens.
func split(s infer.Span, h Hello) []infer.Span {
	var out []infer.Span
	tokens := s.TokenTo - s.TokenFrom
	if tokens <= 0 {
		return nil
	}
	layers := max(1, frameGoal/(tokens*h.tokenBytes(1)))
	step := max(1, frameGoal/h.tokenBytes(1))
	if step > h.TokensPerBlock {
		step = step / h.TokensPerBlock * h.TokensPerBlock
	}
	for l := s.LayerFrom; l < s.LayerTo; l += layers {
		to := min(l+layers, s.LayerTo)
		for t := s.TokenFrom; t < s.TokenTo; {
			end := min((t+step)/step*step, s.TokenTo) // on multiples of step, so that blocks stay whole
			out = append(out, infer.Span{LayerFrom: l, LayerTo: to, TokenFrom: t, TokenTo: end})
			t = end
		}
	}
	return out
}

// headerOf is the header of a frame about a span.
func headerOf(t Type, id int64, s infer.Span, h Hello) Header {
	return Header{
		Type: t, Request: id, HeadTo: uint16(h.KVHeads), LayerFrom: uint16(s.LayerFrom), LayerTo: uint16(s.LayerTo),
		TokenFrom: uint32(s.TokenFrom), TokenTo: uint32(s.TokenTo),
	}
}
