package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

const maxEvent = 8 << 20 // one event of a node

// relay passes the stream of the generation leg on until its end mark. Several events that are there at once become one
// write to the client.
func (a *attempt) relay(ctx context.Context) *api.Error {
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
	a.open = nil // it is made again, should another attempt need it: a stream may be open for long
	r := sse.NewReader(a.gen, maxEvent)
	var pace pace
	for {
		ev, err := r.Next()
		if err != nil {
			return a.cut(ctx, err)
		}
		if ev.Done() {
			return a.ended()
		}
		if e := a.event(ev.Data); e != nil {
			return e
		}
		if ready, _ := r.Ready(); !a.goesOn(ready) { // an error comes again with Next
			if e := a.flush(); e != nil {
				return e
			}
			if pace.burst(a.s.p.o.Steady.Now()) {
				time.Sleep(burstGap)
			}
		}
	}
}

// burstGap is how long a stream that brings tokens faster than that waits before it looks again: each look costs a read here
// and there, and a write. A stream whose tokens come slower never waits.
const burstGap = 500 * time.Microsecond

// pace knows how fast a stream is; the zero value has seen nothing.
type pace struct{ lastNS int64 }

// burst takes the time of a write, and tells whether the one before it was a moment ago.
func (p *pace) burst(now int64) bool {
	last := p.lastNS
	p.lastNS = now
	return last != 0 && now-last < 2*int64(burstGap)
}

// maxWaiting bounds what is kept for one write while more events are there already.
const maxWaiting = 16 << 10

// goesOn tells whether the next event is there, or on its way through buffers of this process, so that it shares a write.
func (a *attempt) goesOn(ready bool) bool {
	return (ready || a.gen.Ready()) && (a.s.out == nil || a.s.out.waiting() < maxWaiting)
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

// event takes one chunk.
func (a *attempt) event(data []byte) *api.Error {
	var chunk api.Chunk
	if e := a.take(&chunk, data); e != nil {
		return e
	}
	if chunk.Error != nil {
		e := api.ParseError(502, chunk.Error, "gen")
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
		before := a.times.lastToken
		a.stamps.LastTokenNS = a.stamp(&a.times.lastToken)
		if a.stamps.FirstTokenNS != nil {
			a.s.p.met.itl.Observe(float64(a.times.lastToken-before) / 1e9)
		} else {
			a.times.firstToken = a.times.lastToken
			a.stamps.FirstTokenNS = &a.times.firstToken
			a.kvThere.Store(true)
			if a.style == Aggregated {
				a.choice.Gen.PrefillDone()
			}
		}
	}
	if chunk.Finish != "" {
		a.finish = chunk.Finish
	}
	return nil
}

// take hands the chunk to the client's stream or to the answer that is being assembled.
func (a *attempt) take(chunk *api.Chunk, data []byte) *api.Error {
	var err error
	if a.s.out != nil {
		err = a.s.out.add(a, chunk, data)
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

// complete ends a sub-request that the context leg has finished at the first token: its answer is the whole answer.
func (a *attempt) complete(c api.CtxChoice) *api.Error {
	text := c.Text
	if a.s.req.Chat {
		text = c.Message.Content
	}
	choice := api.Choice{Text: text, Role: true, Finish: c.Finish, StopReason: c.Stop, RawLogprobs: notNull(c.Logprobs)}
	if e := a.event(a.s.head.AppendChunk(nil, choice)); e != nil {
		return e
	}
	a.stamps.FirstTokenNS, a.stamps.LastTokenNS, a.tokens = a.stamps.CtxDoneNS, a.stamps.CtxDoneNS, 1 // it came with the context leg
	return a.flush()
}

func notNull(b json.RawMessage) []byte {
	if string(b) == "null" {
		return nil
	}
	return b
}

// usage is what the sub-request cost: the prompt by the numbers of its prefill, the output by those of its generation.
func (b *sub) usage() api.Usage {
	u := api.Usage{PromptTokens: len(b.ids)}
	if a := b.last(); a != nil {
		u.CompletionTokens = a.had + a.tokens
		if g := a.genUsage; g != nil {
			u.PromptTokens, u.CompletionTokens = g.PromptTokens, g.CompletionTokens
		}
	}
	if a := b.beginner(); a != nil && a.ctxAnswer != nil && a.ctxAnswer.Usage != nil {
		u.PromptTokens, u.PromptTokensDetails = a.ctxAnswer.Usage.PromptTokens, a.ctxAnswer.Usage.PromptTokensDetails
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
