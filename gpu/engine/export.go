package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/infer"
)

// Export is the KV of a ContextOnly sequence, leased to a transfer from the sequence's admission until Release or the
// deadline, which runs from the end of prefill. One goroutine reads.
type Export struct {
	s *Sequence

	// Owned by the engine's goroutine.
	leased     bool
	deadlineNS int64

	columns []kv.Column // as of the admission: what of the windows is leased

	mu       sync.Mutex // guards the fields below
	tables   [][]int32  // block tables of all groups of layers; set at admission, before the first span
	spans    []infer.Span
	end      error // io.EOF when all spans are there, else why there will be no more
	copies   int   // in flight
	released bool
	wake     chan struct{} // capacity 1
}

func newExport(s *Sequence) *Export {
	return &Export{s: s, wake: make(chan struct{}, 1)}
}

// Tokens is the number of tokens whose KV is exported: prompt and Output.
func (x *Export) Tokens() int { return x.s.base }

// NextSpan waits for the next part of the KV that is written and was not returned yet: layer by layer and chunk by chunk
// while prefill runs. After the last it returns io.EOF; the error of the sequence if that ended otherwise, ErrCancelled
// after Release.
func (x *Export) NextSpan(ctx context.Context) (infer.Span, error) {
	return AwaitSpan(ctx, x.wake, x.next)
}

// AwaitSpan waits until next has a span or an error; wake says that it may have.
func AwaitSpan(ctx context.Context, wake <-chan struct{}, next func() (span infer.Span, ok bool, err error)) (infer.Span, error) {
	for {
		if span, ok, err := next(); ok {
			return span, err
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return infer.Span{}, ctx.Err()
		}
	}
}

func (x *Export) next() (span infer.Span, ok bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.released {
		return infer.Span{}, true, ErrCancelled
	}
	if x.end != nil && !errors.Is(x.end, io.EOF) {
		return infer.Span{}, true, x.end
	}
	if len(x.spans) > 0 {
		span = x.spans[0]
		x.spans = x.spans[1:]
		return span, true, nil
	}
	return infer.Span{}, x.end != nil, x.end
}

// Read copies a span that NextSpan returned to dst, which has SpanBytes bytes: for each block of the span in token order
// the canonical layout of backend.Region. It waits for the copy also when ctx ends, because the device writes to dst; not for a
// device that hangs.
func (x *Export) Read(ctx context.Context, span infer.Span, dst []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	regions, err := x.begin(span, len(dst))
	if err != nil {
		return err
	}
	c := x.s.e.watch.begun(x.s.e.b.CopyOut(regions, dst))
	err = x.s.e.watch.await(c)
	x.leave()
	if err != nil {
		return fmt.Errorf("copy kv %+v out: %w", span, err)
	}
	return nil
}

// Blocks gives the KV blocks that hold the tokens of a span that NextSpan returned, for a process that reads them where
// they lie. What it reads after the end of the lease may be another sequence's.
func (x *Export) Blocks(span infer.Span) ([]int32, error) {
	regions, err := x.begin(span, SpanBytes(x.s.e.info, span))
	if err != nil {
		return nil, err
	}
	x.leave()
	blocks := make([]int32, len(regions))
	for i, r := range regions {
		blocks[i] = r.Block
	}
	return blocks, nil
}

// begin enters a copy, which keeps the lease.
func (x *Export) begin(span infer.Span, size int) ([]backend.Region, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.released:
		return nil, fmt.Errorf("read kv %+v: %w", span, ErrCancelled)
	case x.over():
		return nil, fmt.Errorf("read kv %+v: %w", span, x.end)
	case x.tables == nil:
		return nil, fmt.Errorf("read kv %+v: %w: nothing is written yet", span, ErrInvalid)
	}
	if err := checkSpan(x.s.e.info, span, extent{0, x.s.base}, size); err != nil {
		return nil, fmt.Errorf("read kv: %w", err)
	}
	x.copies++
	return Regions(nil, x.s.e.info, x.tables, span), nil
}

// leave ends what begin has begun; the last one gives the blocks of an ended lease back.
func (x *Export) leave() {
	x.mu.Lock()
	x.copies--
	over := x.copies == 0 && x.over()
	x.mu.Unlock()
	if over {
		x.s.e.post(func() { x.s.e.unlease(x) })
	}
}

// over tells, with mu held, that the lease must not be used any more.
func (x *Export) over() bool { return x.released || (x.end != nil && !errors.Is(x.end, io.EOF)) }

// Release ends the lease, after the copy in flight if there is one. The blocks become cached or free. It may be called
// more than once, and before prefill has ended.
func (x *Export) Release() {
	x.mu.Lock()
	x.released, x.spans = true, nil
	x.mu.Unlock()
	x.signal()
	x.s.e.post(func() { x.s.e.unlease(x) })
}

// add announces a written span, on the device's goroutine.
func (x *Export) add(span infer.Span) {
	x.mu.Lock()
	if !x.released && x.end == nil {
		x.spans = append(x.spans, x.kept(span)...)
	}
	x.mu.Unlock()
	x.signal()
}

// fail ends the export: with io.EOF when all is written.
func (x *Export) fail(err error) {
	x.mu.Lock()
	if x.end == nil || (errors.Is(x.end, io.EOF) && !x.released) {
		x.end = err
	}
	x.mu.Unlock()
	x.signal()
}

func (x *Export) signal() {
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// lease gives the blocks of an admitted sequence to its export, unless nobody wants it any more.
func (e *Engine) lease(x *Export) {
	q := &x.s.q
	x.mu.Lock()
	if x.released {
		x.mu.Unlock()
		return
	}
	x.tables, x.columns = q.Tables(), slices.Clone(q.Columns)
	if n := q.Cached - q.Copy.Tokens; n > 0 { // the first step brings the copied part
		st := e.info.Stage
		x.spans = append(x.spans, x.kept(infer.Span{LayerFrom: st.First, LayerTo: st.End, TokenTo: n})...)
	}
	x.mu.Unlock()
	e.pool.Lease(q.Blocks)
	for i, w := range e.windows {
		w.Lease(x.columns[i].Kept())
	}
	x.leased = true
	e.exports[x] = struct{}{}
	x.signal()
}

// unlease gives the blocks back unless a copy is in flight; its end calls again.
func (e *Engine) unlease(x *Export) {
	x.mu.Lock()
	busy := x.copies > 0
	x.mu.Unlock()
	if busy || !x.leased {
		return
	}
	x.leased = false
	delete(e.exports, x)
	e.pool.Unlease(x.tables[0])
	for i, w := range e.windows {
		w.Unlease(x.columns[i].Kept())
	}
}

// endExport goes with the end of the sequence.
func (e *Engine) endExport(x *Export, done infer.Done, now int64) {
	if done.Err != nil {
		x.fail(done.Err)
		e.unlease(x)
		return
	}
	x.deadlineNS = now + e.cfg.ExportDeadline.Nanoseconds()
	e.noteDeadline(x.deadlineNS)
	x.fail(io.EOF)
}

// SpanBytes is the size of a span's KV in the canonical layout.
func SpanBytes(info backend.Info, span infer.Span) int {
	return info.KVBytes(span.LayerFrom, span.LayerTo) * (span.TokenTo - span.TokenFrom)
}

// kept is what of a span is still there when prefill has ended, cut where the group of layers changes.
func (x *Export) kept(span infer.Span) []infer.Span {
	info := &x.s.e.info
	if len(info.Windows) == 0 {
		return []infer.Span{span}
	}
	var parts []infer.Span
	for from := span.LayerFrom; from < span.LayerTo; {
		part := span
		part.LayerFrom = from
		_, part.LayerTo = info.Run(from, span.LayerTo)
		part.TokenFrom = max(span.TokenFrom, firstKept(info, from, x.s.base))
		if part.TokenFrom < part.TokenTo {
			parts = append(parts, part)
		}
		from = part.LayerTo
	}
	return parts
}

// firstKept is the first token that a layer keeps of so many.
func firstKept(info *backend.Info, layer, tokens int) int {
	if g := info.Group(layer); g > 0 {
		return kv.FirstBlock(info.Windows[g-1].Tokens, tokens, info.TokensPerBlock) * info.TokensPerBlock
	}
	return 0
}

// Regions appends the parts of the blocks that a span covers, in token order. Tables are the block tables of the groups of
// layers.
func Regions(dst []backend.Region, info backend.Info, tables [][]int32, span infer.Span) []backend.Region {
	per := info.TokensPerBlock
	for at := span.TokenFrom; at < span.TokenTo; {
		i := at / per
		end := min((i+1)*per, span.TokenTo)
		for from := span.LayerFrom; from < span.LayerTo; {
			group, to := info.Run(from, span.LayerTo)
			dst = append(dst, backend.Region{
				Block: tables[group][i], LayerFrom: from, LayerTo: to, HeadTo: info.KVHeads,
				TokenFrom: at - i*per, TokenTo: end - i*per,
			})
			from = to
		}
		at = end
	}
	return dst
}

// wholeBlock is all of a block of a group of layers.
func wholeBlock(info backend.Info, group int, block int32) []backend.Region {
	var dst []backend.Region
	for from := info.Stage.First; from < info.Stage.End; {
		g, to := info.Run(from, info.Stage.End)
		if g == group {
			dst = append(dst, backend.Region{Block: block, LayerFrom: from, LayerTo: to, HeadTo: info.KVHeads, TokenTo: info.TokensPerBlock})
		}
		from = to
	}
	return dst
}

// extent is a range of tokens of a prompt: those from held on travel, but for what the windows of the whole leave behind.
type extent struct{ held, tokens int }

// checkSpan verifies that a span lies within the stage's layers and the extent, and the size of its buffer.
func checkSpan(info backend.Info, span infer.Span, x extent, size int) error {
	st := info.Stage
	if span.LayerFrom < st.First || span.LayerFrom >= span.LayerTo || span.LayerTo > st.End ||
		span.TokenFrom < x.held || span.TokenFrom >= span.TokenTo || span.TokenTo > x.tokens {
		return fmt.Errorf("%w: span %+v is not a part of layers [%d, %d), tokens [%d, %d)", ErrInvalid, span, st.First, st.End, x.held, x.tokens)
	}
	for i := range info.Windows {
		for _, layer := range info.Windows[i].Layers {
			if first := firstKept(&info, layer, x.tokens); span.LayerFrom <= layer && layer < span.LayerTo && span.TokenFrom < first {
				return fmt.Errorf("%w: span %+v has tokens before %d, which layer %d with its window does not keep", ErrInvalid, span, first, layer)
			}
		}
	}
	if want := SpanBytes(info, span); size != want {
		return fmt.Errorf("%w: span %+v has %d bytes, the buffer %d", ErrInvalid, span, want, size)
	}
	return nil
}
