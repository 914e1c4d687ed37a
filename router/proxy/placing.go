package proxy

import (
	"meridian.internal/router/pool"
)

// ask is what a sub-request wants from the pool after so many tokens were given.
func (b *sub) ask(tried *exclusions, given int) pool.Ask {
	p := b.s.p
	aggregated, fallback := p.Serves()
	tokens := len(b.ids)
	if tokens == 0 {
		tokens = len(b.s.req.Body) / 4 // text that is not tokenized here: a rough guess
	}
	tokens += given // a resumed answer is prefilled too
	if b.ids != nil && b.blocks == nil {
		b.blocks = p.o.Pool.Hash(b.s.req.Model, b.ids)
	}
	return pool.Ask{
		Model: b.s.req.Model, Tokens: tokens, Prefix: b.blocks, Conversation: b.s.req.Conversation,
		Life:       b.s.left(),
		Aggregated: aggregated, Fallback: fallback, ExcludeCtx: tried.ctx, ExcludeGen: tried.gen,
	}
}

// Serves tells whether requests of this router's schedule are served by one node: always, or where no pair is.
func (p *Proxy) Serves() (aggregated, fallback bool) {
	return p.o.Schedule == Aggregated, p.o.Schedule == Auto
}

// NextID mints a disagg_request_id.
func (p *Proxy) NextID() int64 { return p.ids.next() }
