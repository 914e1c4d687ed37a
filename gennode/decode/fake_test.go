package decode

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/device"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/worker"
)

func now() int64 { return time.Now().UnixNano() }

// patient is for a peer that is there and waits for a processor.
var patient = kvwire.Timing{Lost: time.Minute, Idle: time.Minute, Handshake: time.Minute}

// pair is a context side (engine and KV listener) and a decoder, both with devices of their own.
type pair struct {
	ctx, gen *device.Device
	server   *kvwire.Server
	decoder  *Decoder
	addr     string
	lend     func([]int32) (kvwire.Export, int) // of the context side; nil: it lends nothing
	stop     func()
}

func options(name string, block int) device.Options {
	return device.Options{
		Device: name, MaxNumTokens: 48, MaxBatchSize: 16, MaxWaiting: 512, TokensPerBlock: block, KVBlocks: 200, Ranks: 1, PP: 1,
		Overlap: true, PrefixReuse: true, Sim: device.Sim{Step: 50 * time.Microsecond},
	}
}

func openDevice(t *testing.T, o device.Options) *device.Device {
	t.Helper()
	d, err := device.Open(t.Context(), o, now, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// newPair starts both; stop ends them and checks that no block leaked.
func newPair(t *testing.T, name string, ctxBlock, genBlock int) *pair {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Skip("no loopback network: " + err.Error())
	}
	p := &pair{ctx: openDevice(t, options(name, ctxBlock)), gen: openDevice(t, options(name, genBlock)), addr: ln.Addr().String()}
	log := slog.New(slog.DiscardHandler)
	p.server = kvwire.NewServer(kvwire.ServerOptions{Hello: kvwire.HelloOf("ctx0", "", p.ctx.Info, 1), Epoch: 1, Blocks: p.ctx.Info.KVBlocks, Timing: patient, Now: now, Logger: log, Lend: func(tokens []int32) (kvwire.Export, int) {
		if p.lend == nil {
			return nil, 0
		}
		return p.lend(tokens)
	}})
	client := kvwire.NewClient(kvwire.ClientOptions{Hello: kvwire.HelloOf("gen0", "", p.gen.Info, 1), Epoch: 2, Timing: patient, Now: now, Logger: log})
	p.decoder = &Decoder{Engine: p.gen.Engine, Client: client, EOS: p.gen.Model.Config.EOS, Vocab: p.gen.Info.Vocab, Now: now, Knows: func(a string) bool { return a == p.addr }}
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() { _ = p.server.Serve(ctx, ln) })
	for _, d := range []*device.Device{p.ctx, p.gen} {
		run.Go(func() {
			if err := d.Engine.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	p.stop = func() {
		late, done := context.WithTimeout(context.Background(), time.Minute) // for both
		defer done()
		for side, d := range map[string]*device.Device{"context": p.ctx, "generation": p.gen} {
			d.Engine.Drain()
			select {
			case <-d.Engine.Drained():
			case <-late.Done():
				t.Errorf("%s engine is not idle: %+v", side, d.Engine.Load())
			}
			if n := d.Engine.LeakedBlocks(); n != 0 {
				t.Errorf("%s engine leaked %d blocks", side, n)
			}
			if err := d.Engine.Check(); err != nil {
				t.Errorf("%s engine: %v", side, err)
			}
		}
		client.Close()
		cancel()
		run.Wait()
		if err := errors.Join(p.ctx.Close(), p.gen.Close()); err != nil {
			t.Error(err)
		}
	}
	return p
}

// prefill runs the context side of a request; it gives the disaggregated_params that a context node answers with.
func (p *pair) prefill(ctx context.Context, style string, r infer.Request) (*api.DisaggParams, error) {
	r.Kind = infer.ContextOnly
	var seq ranks.Sequence
	begin := func() (_ kvwire.Export, err error) {
		if seq, err = p.ctx.Engine.Submit(r); err != nil {
			return nil, err
		}
		return seq.Export(), nil
	}
	var export kvwire.Export
	var err error
	if style == "context_first" {
		export, err = p.server.Lease(ctx, len(r.Prompt), begin)
	} else {
		export, err = begin()
	}
	if err != nil {
		return nil, err
	}
	offer, err := p.server.Offer(r.ID, export)
	if err != nil {
		return nil, err
	}
	tokens, done, err := seq.Next(ctx)
	if err == nil && done == nil {
		_, done, err = seq.Next(ctx)
	}
	if err != nil || done.Err != nil {
		seq.Cancel()
		offer.Withdraw()
		return nil, errors.Join(err, errors.New("prefill ended"))
	}
	offer.Ready(kvwire.Trailer{
		First: kvwire.TrailerOf(tokens), FinishReason: done.Reason, FinishedHere: engine.Finished(r, done), StopToken: done.StopToken,
		PromptTokens: len(r.Prompt),
	})
	d := p.params(r.ID, api.ContextFirst)
	for _, t := range tokens {
		d.FirstGenTokens = append(d.FirstGenTokens, t.ID)
	}
	return d, nil
}

func (p *pair) params(id int64, style int) *api.DisaggParams {
	endpoint := "tcp://" + p.addr
	return &api.DisaggParams{RequestType: api.GenerationOnly, DisaggRequestID: &id, CtxRequestID: &id, CtxInfoEndpoint: &endpoint, ScheduleStyle: &style}
}

// run serves one request in a style and gives its tokens.
func (p *pair) run(ctx context.Context, style string, r infer.Request) ([]int32, *worker.Leg, error) {
	return p.runUntil(ctx, style, r, func() {})
}

// runUntil is run, and calls admitted when the generation leg has its place and waits for KV.
func (p *pair) runUntil(ctx context.Context, style string, r infer.Request, admitted func()) ([]int32, *worker.Leg, error) {
	l := &worker.Leg{Request: r, Style: style, Limit: time.Minute}
	l.Request.Kind = infer.GenerationOnly
	if style == "aggregated" {
		l.Request.Kind = infer.Aggregated
		seq, err := p.decoder.Aggregated(ctx, l)
		if err != nil {
			return nil, l, err
		}
		out, err := drain(ctx, seq)
		return out, l, err
	}
	var other sync.WaitGroup
	defer other.Wait()
	l.Disagg = p.params(r.ID, api.GenerationFirst)
	if style == "context_first" {
		d, err := p.prefill(ctx, style, r)
		if err != nil {
			return nil, l, err
		}
		l.Disagg = d
	}
	seq, err := p.decoder.Generation(ctx, l)
	if err != nil {
		return nil, l, err
	}
	admitted()
	if style == "generation_first" {
		other.Go(func() { _, _ = p.prefill(ctx, style, r) })
	}
	out, err := drain(ctx, seq)
	return out, l, err
}

// drain reads a sequence to its end, as a face does: what is given up is cancelled.
func drain(ctx context.Context, seq worker.Sequence) ([]int32, error) {
	var out []int32
	for {
		tokens, done, err := seq.Next(ctx)
		for _, t := range tokens {
			out = append(out, t.ID)
		}
		if err != nil {
			seq.Cancel()
			return out, err
		}
		if done != nil {
			return out, done.Err
		}
	}
}
