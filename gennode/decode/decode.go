// Package decode owns what a generation node does beyond an engine's own work: it reserves room for a prompt, fetches its
// KV from the context node that computed it, and goes on from the first token that was sampled there. It does not serve
// HTTP (shared/worker does) and does not move bytes (gpu/kvwire does).
package decode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
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
	Reserve(context.Context, infer.Request) (ranks.Reservation, error)
}

// Decoder starts generation legs.
type Decoder struct {
	Engine   Engine
	Client   *kvwire.Client
	EOS      []int32
	Vocab    int                    // tokens of the model
	Knows    func(addr string) bool // tells whether addr is the KV listener of a node of this cluster
	Now      func() int64
	Logger   *slog.Logger
	PerBlock int // tokens of a KV block
	// BorrowLimit is how long a fetch from a peer may take, its wait for room included: what takes longer is computed. 0: 1 s.
	BorrowLimit time.Duration

	waiting waiting
}

// Aggregated is the worker.Runner of whole requests.
func (d *Decoder) Aggregated(ctx context.Context, l *worker.Leg) (worker.Sequence, error) {
	if p := l.Disagg; p != nil && p.CtxInfoEndpoint != nil {
		d.borrow(ctx, l)
	}
	seq, err := d.Engine.Submit(l.Request)
	if err != nil {
		return nil, err
	}
	l.Flush()
	return seq, nil
}

// defaultLimit is for a leg whose router gave no deadline.
const defaultLimit = 10 * time.Minute

// Generation is the worker.Runner of generation legs.
func (d *Decoder) Generation(ctx context.Context, l *worker.Leg) (worker.Sequence, error) {
	first, err := d.firstTokens(l.Disagg)
	if err != nil {
		return nil, err
	}
	if done := d.complete(l.Request, first); done != nil {
		l.Taken = len(first)
		l.Admitted()
		l.Flush()
		return &given{tokens: d.stamped(first), done: done}, nil // nothing is left to decode: no KV is needed
	}
	addr, err := d.endpoint(l.Disagg)
	if err != nil {
		return nil, err
	}
	g := &leg{d: d, l: l, first: first, moves: make(chan source), settled: make(chan struct{})}
	if err := g.open(ctx, addr); err != nil {
		g.release()
		return nil, err
	}
	return g, nil
}

// endpoint checks where the KV is to be fetched: only from a context node that is registered or was configured, so that
// no request can make this node dial elsewhere.
func (d *Decoder) endpoint(p *api.DisaggParams) (string, error) {
	const param = "disaggregated_params.ctx_info_endpoint"
	if p.CtxInfoEndpoint == nil {
		return "", api.Invalid(param, "generation_only needs ctx_info_endpoint")
	}
	addr := strings.TrimPrefix(*p.CtxInfoEndpoint, "tcp://")
	if !d.Knows(addr) {
		e := api.Invalid(param, "%q is no KV listener of a registered context node, nor one of --kv-peer", *p.CtxInfoEndpoint)
		e.Stage, e.Retryable = "gen", true // another generation node may know it: the registry reaches nodes at different times
		e.Code, e.Type, e.RetryAfter = http.StatusServiceUnavailable, api.TypeUnavailable, time.Second
		return "", e
	}
	return addr, nil
}

// firstTokens gives what the context node sampled, where the leg says it (context_first).
func (d *Decoder) firstTokens(p *api.DisaggParams) ([]infer.Token, error) {
	out := make([]infer.Token, 0, len(p.FirstGenTokens))
	for i, id := range p.FirstGenTokens {
		if id < 0 || int(id) >= d.Vocab {
			return nil, api.Invalid("disaggregated_params.first_gen_tokens", "first_gen_tokens[%d] is %d; this model's vocabulary has %d tokens", i, id, d.Vocab)
		}
		out = append(out, infer.Token{ID: id})
	}
	if len(p.FirstGenLogProbs) == 0 || string(p.FirstGenLogProbs) == "null" {
		return out, nil
	}
	var probs []kvwire.FirstToken
	if err := json.Unmarshal(p.FirstGenLogProbs, &probs); err != nil || len(probs) != len(out) {
		return nil, api.Invalid("disaggregated_params.first_gen_log_probs", "want one entry with id and logprob for each of first_gen_tokens")
	}
	return kvwire.Trailer{First: probs}.Tokens(), nil
}

// complete tells how first tokens end a request, nil if they do not.
func (d *Decoder) complete(r infer.Request, first []infer.Token) *infer.Done {
	for _, t := range first {
		if (!r.IgnoreEOS && slices.Contains(d.EOS, t.ID)) || slices.Contains(r.StopTokens, t.ID) {
			return &infer.Done{Reason: infer.FinishStop, StopToken: &t.ID}
		}
	}
	if len(first) > 0 && len(r.Output)+len(first) >= r.MaxTokens {
		return &infer.Done{Reason: infer.FinishLength}
	}
	return nil
}

func (d *Decoder) stamped(tokens []infer.Token) []infer.Token {
	now := d.Now()
	for i := range tokens {
		tokens[i].AtNS = now
	}
	return tokens
}

// leg is the sequence of a generation leg: first it takes the KV in, then it decodes.
type leg struct {
	d     *Decoder
	l     *worker.Leg
	first []infer.Token
	hold  ranks.Reservation
	held  int // tokens whose KV is here already
	wire  *kvwire.Transfer
	seq   worker.Sequence // nil until the KV is here

	moves   chan source   // other places to fetch the KV from
	settled chan struct{} // closed when the leg waits for KV no longer
}

// open reserves room and asks for the KV. With context_first the prefill is done and its lease runs, so it is claimed
// before the wait for room.
func (g *leg) open(ctx context.Context, addr string) (err error) {
	if g.wire, err = g.d.Client.Open(ctx, addr, g.l.Request.ID); err != nil {
		return kvFault(ctx, err)
	}
	if g.l.Style == "context_first" {
		if err := g.wire.Claim(ctx); err != nil {
			return kvFault(ctx, err)
		}
	}
	if g.hold, err = g.d.Engine.Reserve(ctx, g.l.Request); err != nil {
		return err
	}
	report := g.hold.Report()
	g.l.Held = &report
	g.held = g.hold.Held()
	if err := g.wire.Request(ctx, g.held, g.left()); err != nil {
		return kvFault(ctx, err)
	}
	g.d.waiting.enter(g)
	g.l.Admitted()
	g.l.Flush() // generation_first: the router sends the context leg now
	return nil
}

// left is how long the hand-over may take.
func (g *leg) left() time.Duration {
	if g.l.Request.DeadlineNS == 0 {
		return defaultLimit
	}
	return max(time.Duration(g.l.Request.DeadlineNS-g.d.Now()), time.Millisecond)
}

// kvFault is an error of the hand-over as the router sees it. Another pair may do better; an incompatible one never will,
// but others may be.
func kvFault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	e := api.Failed("kv", true, "%v", err)
	if errors.Is(err, kvwire.ErrIncompatible) {
		e.Retryable = false
	}
	return e
}

// Next takes the KV in at the first call.
func (g *leg) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	if g.seq == nil {
		if err := g.fetch(ctx); err != nil {
			g.release()
			return nil, nil, err
		}
	}
	return g.seq.Next(ctx)
}

func (g *leg) fetch(ctx context.Context) error {
	t, err := g.receive(ctx)
	g.d.waiting.leave(g)
	g.l.Transfer = transferOf(g.wire.Report())
	if err != nil {
		return kvFault(ctx, err)
	}
	first := t.Tokens()
	if len(g.first) > 0 { // the leg's own words win: the client may have seen them already
		first = g.first
	}
	g.l.Taken = len(first)
	g.wire.Close()
	g.wire = nil
	if t.FinishedHere {
		g.hold.Cancel()
		g.hold = nil
		g.seq = &given{tokens: g.d.stamped(first), done: &infer.Done{Reason: t.FinishReason, StopToken: t.StopToken}}
		return nil
	}
	seq, err := g.hold.Start(first)
	if err != nil {
		return fmt.Errorf("start after the hand-over: %w", err)
	}
	g.hold, g.seq = nil, seq
	return nil
}

// receive takes the KV in, from the last source that the leg was told. Where a transfer breaks, the leg waits a while for
// another source, if its router wants to name one.
func (g *leg) receive(ctx context.Context) (kvwire.Trailer, error) {
	for {
		sub, cancel := context.WithCancel(ctx)
		told := make(chan *source, 1)
		go func() {
			select {
			case s := <-g.moves:
				told <- &s
				cancel()
			case <-sub.Done():
				told <- nil
			}
		}()
		t, err := g.wire.Receive(sub, g.hold.Tokens(), g.hold)
		cancel()
		next := <-told
		if err == nil {
			if next != nil {
				next.taken <- false
			}
			return t, nil
		}
		if next == nil {
			if next = g.another(ctx); next == nil {
				return t, err
			}
		}
		g.wire.Close()
		g.wire, g.l.Handle = next.wire, next.id
		next.taken <- true
	}
}

// another waits for another source.
func (g *leg) another(ctx context.Context) *source {
	timer := time.NewTimer(g.l.KVWait)
	defer timer.Stop()
	select {
	case s := <-g.moves:
		return &s
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// Cancel ends the leg: the transfer's frame in flight ends before its blocks are freed. It is called between calls of
// Next.
func (g *leg) Cancel() {
	if g.seq != nil {
		g.seq.Cancel()
		return
	}
	g.release()
	g.seq = &given{done: &infer.Done{Reason: infer.FinishCancelled, Err: engine.ErrCancelled}}
}

func (g *leg) release() {
	g.d.waiting.leave(g)
	if g.wire != nil {
		g.wire.Close()
		g.wire = nil
	}
	if g.hold != nil {
		g.hold.Cancel()
		g.hold = nil
	}
}

// transferOf puts a report into the record's words.
func transferOf(r kvwire.Report) *phase.Transfer {
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

// given is a sequence that is over before it begins.
type given struct {
	tokens []infer.Token
	done   *infer.Done
}

// Next gives everything at once.
func (g *given) Next(context.Context) ([]infer.Token, *infer.Done, error) {
	if g.done == nil {
		return nil, nil, io.EOF
	}
	tokens, done := g.tokens, g.done
	g.tokens, g.done = nil, nil
	return tokens, done, nil
}

// Cancel does nothing.
func (g *given) Cancel() {}
