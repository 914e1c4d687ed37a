// Package prefill owns what a context node does beyond an engine's own work: it puts the KV of a context leg on offer to
// the generation node while prefill runs, ends the answer at the first token, and tells in the record how the hand-over
// went. It does not serve HTTP (shared/worker does) and does not move bytes (gpu/kvwire does).
package prefill

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/worker"
)

// Engine runs requests. *ranks.Group is one.
type Engine interface {
	Submit(infer.Request) (ranks.Sequence, error)
}

// Prefiller starts context legs.
type Prefiller struct {
	Engine   Engine
	Server   *kvwire.Server
	Endpoint string // host:port of the KV listener, as others reach it
}

// Aggregated is the worker.Runner of whole requests.
func (p *Prefiller) Aggregated(_ context.Context, l *worker.Leg) (worker.Sequence, error) {
	seq, err := p.Engine.Submit(l.Request)
	if err != nil {
		return nil, err
	}
	l.Flush()
	return seq, nil
}

// Context is the worker.Runner of context legs.
func (p *Prefiller) Context(ctx context.Context, l *worker.Leg) (worker.Sequence, error) {
	var seq ranks.Sequence
	begin := func() (_ kvwire.Export, err error) {
		if seq, err = p.Engine.Submit(l.Request); err != nil {
			return nil, err
		}
		return seq.Export(), nil
	}
	var export kvwire.Export
	var err error
	if l.Style == "generation_first" { // its receiver waits with room for it
		export, err = begin()
	} else {
		export, err = p.Server.Lease(ctx, len(l.Request.Prompt)+len(l.Request.Output), begin)
	}
	if err != nil {
		return nil, err
	}
	offer, err := p.Server.Offer(l.Request.ID, export)
	if err != nil {
		seq.Cancel()
		export.Release()
		return nil, &api.Error{Code: http.StatusConflict, Type: api.TypeInvalid, Param: "disaggregated_params.disagg_request_id", Stage: "ctx", Message: err.Error()}
	}
	endpoint, id := "tcp://"+p.Endpoint, l.Request.ID
	rank, style := seq.Rank(), api.ContextFirst
	if l.Style == "generation_first" {
		style = api.GenerationFirst
	}
	l.Answer = &api.DisaggParams{
		RequestType: api.ContextOnly, DisaggRequestID: &id, CtxRequestID: &id, CtxInfoEndpoint: &endpoint, CtxDPRank: &rank,
		ScheduleStyle: &style, ConversationID: l.Disagg.ConversationID,
	}
	l.Settle = func() *phase.Error { return settle(l, offer) }
	return &leg{seq: seq, offer: offer, l: l}, nil
}

// settle waits for the end of the hand-over. Every offer ends: by its receiver, its lease or the server's end.
func settle(l *worker.Leg, offer *kvwire.Offer) *phase.Error {
	<-offer.Done()
	r, err := offer.Result()
	l.Transfer = transferOf(r)
	if err != nil {
		return &phase.Error{Stage: "kv", Type: api.TypeServer, Message: err.Error(), Retryable: true}
	}
	return nil
}

// transferOf puts a report into the record's words.
func transferOf(r kvwire.Report) *phase.Transfer {
	if r.RequestedNS == 0 {
		return nil // no receiver asked
	}
	reached := func(ns int64) *int64 {
		if ns == 0 {
			return nil
		}
		return &ns
	}
	return &phase.Transfer{
		Peer: r.Peer, Bytes: r.Bytes, Frames: r.Frames, Tokens: r.Tokens, TokensHeld: r.TokensHeld,
		RequestedNS: reached(r.RequestedNS), StartNS: reached(r.StartNS), LastByteNS: reached(r.LastByteNS),
		InstalledNS: reached(r.InstalledNS), WireNS: r.WireNS, InstallNS: r.InstallNS,
	}
}

// leg is the sequence of a context leg: its end settles the offer.
type leg struct {
	seq    ranks.Sequence
	offer  *kvwire.Offer
	l      *worker.Leg
	tokens []infer.Token
	over   atomic.Bool // cancelled here: the end of the offer says nothing
}

// Next waits for the first token. A receiver that goes away meanwhile ends the leg: nobody would decode it.
func (g *leg) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	sub, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		select {
		case <-g.offer.Done():
			if !g.over.Load() {
				cancel(errOfferEnded)
			}
		case <-sub.Done():
		}
	}()
	tokens, done, err := g.seq.Next(sub)
	cancel(nil)
	<-watching
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(sub), errOfferEnded) {
		g.over.Store(true)
		g.seq.Cancel()
		select { // who ended the other leg may have ended this one too, by another connection
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-time.After(bothLegs):
		}
		_, why := g.offer.Result()
		return nil, nil, api.Failed("kv", true, "the generation node went away during prefill: %v", why)
	}
	g.tokens = append(g.tokens, tokens...)
	if done != nil {
		g.finish(done)
	}
	return tokens, done, err
}

// bothLegs is how much later the end of this leg may be heard of than that of the other.
const bothLegs = 20 * time.Millisecond

var errOfferEnded = errors.New("prefill: the offer has ended")

// Cancel ends prefill and hand-over.
func (g *leg) Cancel() {
	g.over.Store(true)
	g.seq.Cancel()
	g.offer.Withdraw()
}

// finish tells the receiver what was sampled, or why nothing was.
func (g *leg) finish(done *infer.Done) {
	if done.Err != nil || len(g.tokens) == 0 {
		err := done.Err
		if err == nil {
			err = fmt.Errorf("prefill of request %d ended without a token: %s", g.seq.ID(), done.Reason)
		}
		g.offer.Fail(err)
		return
	}
	over := engine.Finished(g.l.Request, done)
	first := kvwire.TrailerOf(g.tokens)
	for _, t := range first {
		g.l.Answer.FirstGenTokens = append(g.l.Answer.FirstGenTokens, t.ID)
	}
	if g.l.Request.Sampling.Logprobs {
		g.l.Answer.FirstGenLogProbs, _ = json.Marshal(first) // plain numbers: cannot fail
	}
	if over && g.l.Style != "generation_first" {
		// The answer is complete and no generation leg will come.
		g.l.Settle = nil
		g.offer.Withdraw()
		return
	}
	g.offer.Ready(kvwire.Trailer{
		First: first, FinishReason: done.Reason, FinishedHere: over, StopToken: done.StopToken,
		PromptTokens: done.Report.PromptTokens, CachedTokens: done.Report.CachedTokens,
	})
}
