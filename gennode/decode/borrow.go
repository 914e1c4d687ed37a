package decode

import (
	"context"
	"fmt"
	"time"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/worker"
)

// defaultBorrowLimit is that of a Decoder that says none: a router asks for a fetch where it takes milliseconds.
const defaultBorrowLimit = time.Second

// borrow fetches the beginning of a prompt from a peer that has it cached, as the router asks. Whatever goes wrong, the
// request goes on: what was not fetched is computed.
func (d *Decoder) borrow(ctx context.Context, l *worker.Leg) {
	limit := d.BorrowLimit
	if limit == 0 {
		limit = defaultBorrowLimit
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := d.fetch(ctx, l); err != nil {
		d.Logger.Warn("kv was not fetched from a peer; it is computed", "request_id", l.Request.ID, "peer", *l.Disagg.CtxInfoEndpoint, "error", err)
	}
}

func (d *Decoder) fetch(ctx context.Context, l *worker.Leg) error {
	addr, err := d.endpoint(l.Disagg)
	if err != nil {
		return err
	}
	per, prompt := d.PerBlock, l.Request.Prompt
	prompt = prompt[:(len(prompt)-1)/per*per] // the last token is always computed
	if len(prompt) == 0 {
		return nil
	}
	wire, err := d.Client.Open(ctx, addr, l.Request.ID)
	if err != nil {
		return err
	}
	defer wire.Close()
	hold, err := d.Engine.Reserve(ctx, infer.Request{
		ID: l.Request.ID, Kind: infer.GenerationOnly, Prompt: prompt, MaxTokens: 1, Priority: l.Request.Priority, Pin: l.Request.Pin, Probe: true, // counted once: as the request itself
	})
	if err != nil {
		return fmt.Errorf("reserve room for the KV of a peer: %w", err)
	}
	defer hold.Cancel()
	if hold.Held() >= len(prompt) {
		return nil
	}
	if err := wire.Fetch(ctx, prompt, hold.Held()); err != nil {
		return err
	}
	t, err := wire.Receive(ctx, len(prompt), hold)
	l.Transfer = transferOf(wire.Report())
	if err != nil {
		return err
	}
	hold.Keep(t.PromptTokens / per * per)
	return nil
}
