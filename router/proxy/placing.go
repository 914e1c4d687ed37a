package proxy

import (
	"encoding/json"

	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
)

// ask is what a sub-request wants from the pool after so many tokens were given.
func (b *sub) ask(tried *exclusions, given int) pool.Ask {
	p := b.s.p
	tokens := len(b.ids)
	if tokens == 0 {
		tokens = len(b.s.req.Body) / 4 // text that is not tokenized here: a rough guess
	}
	tokens += given // a resumed answer is prefilled too
	if b.ids != nil && b.blocks == nil {
		b.blocks = p.o.Pool.Hash(b.s.req.Model, b.ids)
	}
	return pool.Ask{
		Model: b.s.req.Model, Tokens: tokens, Prefix: b.blocks, Conversation: conversation(b.s.req),
		Life:       b.s.left(),
		Aggregated: p.o.Schedule == Aggregated, Fallback: p.o.Schedule == Auto, ExcludeCtx: tried.ctx, ExcludeGen: tried.gen,
	}
}

// maxConversation bounds what a client may name a conversation.
const maxConversation = 512

// conversation is the name that the client gives to its conversation: conversation_params.conversation_id, or
// conversation_id; "" when it gives none, or none that is usable.
func conversation(r *api.Request) string {
	id := ""
	for _, f := range r.Fields {
		switch string(f.Key) {
		case "conversation_id":
			if id == "" {
				id = read[string](f.Value)
			}
		case "conversation_params":
			if in := read[conversationParams](f.Value); in.ID != "" {
				id = in.ID
			}
		}
	}
	if len(id) > maxConversation {
		return ""
	}
	return id
}

type conversationParams struct {
	ID string `json:"conversation_id"`
}

// read decodes a member; one of another type is the worker's to judge.
func read[T any](value []byte) (v T) {
	_ = json.Unmarshal(value, &v)
	return v
}

// Serves tells whether requests of this router's schedule are served by one node: always, or where no pair is.
func (p *Proxy) Serves() (aggregated, fallback bool) {
	return p.o.Schedule == Aggregated, p.o.Schedule == Auto
}

// NextID mints a disagg_request_id.
func (p *Proxy) NextID() int64 { return p.ids.next() }
