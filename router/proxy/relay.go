package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"

	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

const maxEvent = 8 << 20 // one event of a node

// relay passes the stream of the generation leg on until its end mark. Several events that are there at once become one
// write to the client.
func (a *attempt) relay(ctx context.Context) *api.Error {
	r := sse.NewReader(a.gen, maxEvent)
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
		if ready, _ := r.Ready(); !ready { // an error comes again with Next
			if e := a.flush(); e != nil {
				return e
			}
		}
	}
}

// cut explains a stream that ended before its end mark.
func (a *attempt) cut(ctx context.Context, err error) *api.Error {
	if errors.Is(err, io.EOF) && a.finish != "" {
		return a.ended() // a worker that sends no end mark
	}
	if errors.Is(err, sse.ErrTooLong) {
		return api.Failed("gen", false, "generation node %s sent an event that is too long", a.choice.Gen.Name)
	}
	return a.broken(ctx, "gen", a.choice.Gen, err)
}

// ended checks a stream that has ended as it should.
func (a *attempt) ended() *api.Error {
	if a.finish == "" {
		return api.Failed("gen", true, "generation node %s ended the stream without a finish_reason", a.choice.Gen.Name)
	}
	return a.flush()
}

// event takes one chunk.
func (a *attempt) event(data []byte) *api.Error {
	chunk, e := a.take(data)
	if e != nil {
		return e
	}
	if chunk.Error != nil {
		e := api.ParseError(502, chunk.Error, "gen")
		e.Stage, e.Retryable = stageOf(e.Stage, "gen"), true
		return e
	}
	if chunk.Usage != nil {
		var u api.Usage
		if json.Unmarshal(chunk.Usage, &u) == nil {
			a.genUsage = &u
		}
	}
	if n := countIDs(chunk); n > 0 {
		a.tokens += n
		a.stamps.LastTokenNS = a.now()
		if a.stamps.FirstTokenNS == nil {
			a.stamps.FirstTokenNS = a.stamps.LastTokenNS
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
func (a *attempt) take(data []byte) (api.Chunk, *api.Error) {
	var chunk api.Chunk
	var err error
	if a.s.out != nil {
		chunk, err = a.s.out.add(a, data)
	} else if chunk, err = api.ReadChunk(data, a.s.req.Chat); err == nil {
		a.sub.answer.add(chunk)
	}
	if err != nil {
		return chunk, api.Failed("gen", true, "generation node %s sent a malformed event", a.choice.Gen.Name)
	}
	return chunk, nil
}

// countIDs counts the tokens of a chunk; a foreign worker does not name them, so that a chunk with text counts as one.
func countIDs(c api.Chunk) int {
	if c.TokenIDs == nil {
		if len(c.Text) > 0 || c.Delta != nil {
			return 1
		}
		return 0
	}
	if len(c.TokenIDs) <= 2 {
		return 0
	}
	return bytes.Count(c.TokenIDs, []byte{','}) + 1
}

func (a *attempt) flush() *api.Error {
	if a.s.out == nil {
		return nil
	}
	if a.stamps.FirstTokenSentNS == nil && a.stamps.FirstTokenNS != nil {
		a.stamps.FirstTokenSentNS = a.now()
	}
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
	a.stamps.FirstTokenNS = a.stamps.CtxDoneNS
	a.stamps.LastTokenNS = a.stamps.CtxDoneNS
	a.tokens = 1
	if e := a.event(a.s.head.AppendChunk(nil, choice)); e != nil {
		return e
	}
	a.tokens = 1
	return a.flush()
}

func notNull(b json.RawMessage) []byte {
	if string(b) == "null" {
		return nil
	}
	return b
}

// usage is what the sub-request cost: the prompt by the numbers of its prefill, the output by those of its generation.
func (a *attempt) usage() api.Usage {
	u := api.Usage{PromptTokens: len(a.sub.ids), CompletionTokens: a.tokens}
	if a.genUsage != nil {
		u.PromptTokens, u.CompletionTokens = a.genUsage.PromptTokens, a.genUsage.CompletionTokens
		if a.style == Aggregated {
			u.PromptTokensDetails = a.genUsage.PromptTokensDetails
		}
	}
	if c := a.ctxAnswer; c != nil && c.Usage != nil {
		u.PromptTokens, u.PromptTokensDetails = c.Usage.PromptTokens, c.Usage.PromptTokensDetails
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}
