package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"

	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

const maxEvent = 8 << 20 // one event of a node

// relay passes the stream of the generation leg on until its end mark. What has arrived together becomes one write to the
// client.
func (a *attempt) relay(ctx context.Context) *api.Error {
	a.open = nil // it is made again, should another attempt need it: a stream may be open for long
	a.split.Limit = maxEvent
	e := a.relayEvents(ctx)
	if e == nil {
		return nil
	}
	if gone := a.flush(); gone != nil { // what came before the failure is the client's
		return gone
	}
	return e
}

func (a *attempt) relayEvents(ctx context.Context) *api.Error {
	e, err := a.pass()
	for e == nil && err == nil {
		if e := a.flush(); e != nil {
			return e
		}
		e, err = a.await(ctx)
	}
	switch {
	case e != nil:
		return e
	case err == errEndMark: //nolint:errorlint // never wrapped
		return a.ended()
	}
	return a.cut(ctx, err)
}

var errEndMark = errors.New("proxy: end mark")

// pass takes what is here of the stream into the client's buffer, or into the answer. It returns a failure that the node
// tells of, or how the stream ended: errEndMark, or what reading met.
func (a *attempt) pass() (*api.Error, error) {
	if o := a.s.out; o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
	}
	read := batch{a: a}
	defer read.done()
	for {
		piece, err := a.gen.Next()
		if err != nil || len(piece) == 0 {
			if errors.Is(err, io.EOF) && a.split.Within() {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		for len(piece) > 0 {
			ev, rest, ok, err := a.split.Next(piece)
			switch {
			case err != nil:
				return nil, err
			case !ok:
			case ev.Done():
				return nil, errEndMark
			default:
				if e := read.event(ev.Data); e != nil {
					return e, nil
				}
			}
			piece = rest
		}
	}
}

// cut explains a stream that ended before its end mark.
func (a *attempt) cut(ctx context.Context, err error) *api.Error {
	if a.finish != "" && (ctx.Err() == nil || stopCause(ctx).Type == api.TypeServer) {
		return a.ended() // all is said: a worker that sends no end mark, or died before it
	}
	if errors.Is(err, sse.ErrTooLong) {
		return api.Failed("gen", false, "generation node %s sent an event that is too long", a.choice.Gen.Name)
	}
	return a.broken(ctx, "gen", a.choice.Gen, err)
}

// ended checks a stream that has ended as it should. Its last tokens stay in the buffer: they go out in one write with the
// end mark, unless others of the request go on.
func (a *attempt) ended() *api.Error {
	if a.finish == "" {
		return api.Failed("gen", true, "generation node %s ended the stream without a finish_reason", a.choice.Gen.Name)
	}
	if len(a.s.subs) > 1 {
		return a.flush()
	}
	a.sends()
	return nil
}

// batch is what is read of a stream at a time: its tokens have one stamp.
type batch struct {
	a      *attempt
	events int // that brought tokens
}

// event takes one chunk.
func (b *batch) event(data []byte) *api.Error {
	a := b.a
	var chunk api.Chunk
	if e := a.take(&chunk, data); e != nil {
		return e
	}
	if chunk.Error != nil {
		e := api.ParseEvent(chunk.Error, "gen")
		e.Stage = stageOf(e.Stage, "gen")
		e.Retryable = e.Retryable || e.Stage == "kv" // another pair may do what this one cannot
		return e
	}
	if chunk.Usage != nil {
		if u, err := api.ParseUsage(chunk.Usage); err == nil {
			a.genUsage = u
		}
	}
	if n := a.sub.note(&chunk); n > 0 {
		a.tokens += n
		b.events++
	}
	if chunk.Finish != "" {
		a.finish = chunk.Finish
	}
	return nil
}

// done stamps the tokens.
func (b *batch) done() {
	if b.events == 0 {
		return
	}
	a, before := b.a, b.a.times.lastToken
	a.stamps.LastTokenNS = a.stamp(&a.times.lastToken)
	if a.stamps.FirstTokenNS != nil {
		a.s.p.met.itl.add(a.times.lastToken-before, b.events)
		return
	}
	a.times.firstToken = a.times.lastToken
	a.stamps.FirstTokenNS = &a.times.firstToken
	a.s.p.met.itl.add(0, b.events-1)
	a.kvThere.Store(true)
	a.s.p.health.answers("gen", a.choice.Gen.Name)
	if a.style == Aggregated {
		a.choice.Gen.PrefillDone()
	}
}

// take hands the chunk to the client's stream or to the answer that is being assembled.
func (a *attempt) take(chunk *api.Chunk, data []byte) *api.Error {
	var err error
	if a.s.out != nil {
		err = a.s.out.add(a, chunk, data) // its mutex is held
	} else if *chunk, err = api.ReadChunk(data, a.s.req.Chat); err == nil {
		a.sub.answer.add(chunk)
	}
	if err != nil {
		return api.Failed("gen", true, "generation node %s sent a malformed event", a.choice.Gen.Name)
	}
	return nil
}

// note keeps the tokens of a chunk and returns how many there are; a foreign worker does not name them, so that a chunk
// with text counts as one.
func (b *sub) note(c *api.Chunk) int {
	if c.TokenIDs == nil {
		if len(c.Text) == 0 && c.Delta == nil {
			return 0
		}
		b.opaque = true
		return 1
	}
	before := len(b.given)
	given, ok := appendIDs(b.given, c.TokenIDs)
	if !ok { // not a list of ids: no node of ours
		b.opaque = true
		return 1
	}
	b.given = given
	return len(given) - before
}

// appendIDs reads a JSON array of token ids.
func appendIDs(dst []int32, list []byte) ([]int32, bool) {
	id, digits := int64(0), 0
	for i, c := range list {
		switch {
		case c >= '0' && c <= '9' && digits < 10:
			id, digits = id*10+int64(c-'0'), digits+1
		case (c == ',' || c == ']') && digits > 0:
			if id > math.MaxInt32 {
				return dst, false
			}
			dst, id, digits = append(dst, int32(id)), 0, 0
		case c == '[' && i == 0, c == ']', c == ' ':
		default:
			return dst, false
		}
	}
	return dst, true
}

// sends stamps the handing over of the first token.
func (a *attempt) sends() {
	if a.s.out != nil && a.stamps.FirstTokenSentNS == nil && a.stamps.FirstTokenNS != nil {
		a.stamps.FirstTokenSentNS = a.stamp(&a.times.firstSent)
	}
}

func (a *attempt) flush() *api.Error {
	if a.s.out == nil {
		return nil
	}
	a.sends()
	if err := a.s.out.flush(); err != nil {
		return &api.Error{Code: statusClientGone, Type: api.TypeCancelled, Stage: "relay", Message: "the client took nothing for too long, or is gone"}
	}
	return nil
}

// flushNow is flush for a client that has got something already, and never waits; false: what is left is for flush.
func (a *attempt) flushNow() (all bool) {
	if a.s.out == nil {
		return true
	}
	a.sends()
	return a.s.out.flushNow()
}

// complete ends a sub-request that the context leg has finished at the first token: its answer is the whole answer.
func (a *attempt) complete(c api.CtxChoice) *api.Error {
	text := c.Text
	if a.s.req.Chat {
		text = c.Message.Content
	}
	choice := api.Choice{Text: text, Role: true, Finish: c.Finish, StopReason: c.Stop, RawLogprobs: notNull(c.Logprobs)}
	if e := a.alone(a.s.head.AppendChunk(nil, choice)); e != nil {
		return e
	}
	a.stamps.FirstTokenNS, a.stamps.LastTokenNS, a.tokens = a.stamps.CtxDoneNS, a.stamps.CtxDoneNS, 1 // it came with the context leg
	return a.flush()
}

// alone takes one chunk that no stream brought.
func (a *attempt) alone(data []byte) *api.Error {
	if o := a.s.out; o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
	}
	return (&batch{a: a}).event(data)
}

func notNull(b json.RawMessage) []byte {
	if string(b) == "null" {
		return nil
	}
	return b
}

// usage is what the sub-request cost: the prompt by the numbers of its prefill, the output by those of its generation. Where
// neither the router nor a worker has counted the prompt, nobody knows it.
func (b *sub) usage() api.Usage {
	u := api.Usage{PromptTokens: len(b.ids), NoPrompt: b.ids == nil}
	prompt := func(told *api.Usage) {
		if !told.NoPrompt {
			u.PromptTokens, u.NoPrompt = told.PromptTokens, false
		}
	}
	if a := b.last(); a != nil {
		u.CompletionTokens = a.had + a.tokens
		if g := a.genUsage; g != nil {
			prompt(g)
			if !g.NoCompletion {
				u.CompletionTokens = g.CompletionTokens
			}
		}
	}
	if a := b.beginner(); a != nil && a.ctxAnswer != nil && a.ctxAnswer.Usage != nil {
		prompt(a.ctxAnswer.Usage)
		u.PromptTokensDetails = a.ctxAnswer.Usage.PromptTokensDetails
	} else if a != nil && a.style == Aggregated && a.genUsage != nil {
		u.PromptTokensDetails = a.genUsage.PromptTokensDetails
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

// beginner is the attempt that began the answer: its prefill was the client's, one that goes on after a cut is the
// cluster's own cost. Nil when nothing was tried.
func (b *sub) beginner() *attempt {
	for _, a := range slices.Backward(b.tries) {
		if a.had == 0 {
			return a
		}
	}
	return nil
}
