package decode

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"meridian.internal/gpu/kvwire"
	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/worker"
)

// borrowed runs a whole request on the generation side, which is told of a peer.
func (p *pair) borrowed(t *testing.T, r infer.Request, addr string) ([]int32, *infer.Done, *worker.Leg) {
	t.Helper()
	endpoint := "tcp://" + addr
	l := &worker.Leg{Request: r, Disagg: &api.DisaggParams{RequestType: api.ContextAndGeneration, CtxInfoEndpoint: &endpoint}}
	seq, err := p.decoder.Aggregated(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	var ids []int32
	for {
		tokens, done, err := seq.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range tokens {
			ids = append(ids, x.ID)
		}
		if done != nil {
			return ids, done, l
		}
	}
}

// alone runs a request on the context side only.
func (p *pair) alone(t *testing.T, r infer.Request) []int32 {
	t.Helper()
	seq, err := p.ctx.Engine.Submit(r)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := drain(t.Context(), seq)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func lendingPair(t *testing.T, ctxBlock, genBlock int) *pair {
	p := newPair(t, "cpu", ctxBlock, genBlock)
	p.decoder.Logger = slog.New(slog.DiscardHandler)
	p.lend, p.decoder.PerBlock = p.ctx.Lend, genBlock
	return p
}

func TestAPrefixIsFetchedFromAPeer(t *testing.T) {
	p := lendingPair(t, 16, 16)
	p.decoder.BorrowLimit = time.Minute // it may wait for a processor
	defer p.stop()
	r := rand.New(rand.NewPCG(1, 1))
	req := infer.Request{Kind: infer.Aggregated, Prompt: promptOf(r, 100, p.ctx.Info.Vocab), MaxTokens: 8, IgnoreEOS: true, ID: 1}
	want := p.alone(t, req)
	got, done, l := p.borrowed(t, req, p.addr)
	if !slices.Equal(got, want) {
		t.Errorf("text %v, want %v", got, want)
	}
	if c := done.Report.CachedTokens; c != 96 || l.Transfer == nil || l.Transfer.Tokens != 96 || l.Transfer.Peer != "ctx0" || l.Transfer.Bytes == 0 {
		t.Errorf("%d tokens cached, transfer %+v, want 96 tokens of the peer", c, l.Transfer)
	}
	again, done, l := p.borrowed(t, req, p.addr)
	if !slices.Equal(again, want) || done.Report.CachedTokens < 96 || l.Transfer != nil {
		t.Errorf("again: %v, %d cached, transfer %+v: nothing was missing", again, done.Report.CachedTokens, l.Transfer)
	}
	longer := req
	longer.Prompt = slices.Concat(req.Prompt, want[:7], promptOf(r, 20, p.ctx.Info.Vocab))
	if got, done, _ := p.borrowed(t, longer, p.addr); !slices.Equal(got, p.alone(t, longer)) || done.Report.CachedTokens < 96 {
		t.Errorf("a longer one: %v, %d cached", got, done.Report.CachedTokens)
	}
}

// TestWhatAPeerDoesNotGiveIsComputed: whatever is wrong with a peer, the text is right, in time.
func TestWhatAPeerDoesNotGiveIsComputed(t *testing.T) {
	p := lendingPair(t, 16, 16)
	defer p.stop()
	r := rand.New(rand.NewPCG(2, 2))
	other := p.ctx.Info
	other.ModelHash = "another"
	peers := map[string]string{
		"one that has nothing":       p.addr,
		"one that nobody registered": "127.0.0.1:1",
		"one of another model":       p.peer(t, kvwire.ServerOptions{Hello: kvwire.HelloOf("x", "", other, 1), Epoch: 3}),
		"one that dies while it lends": p.peer(t, kvwire.ServerOptions{Hello: kvwire.HelloOf("x", "", p.ctx.Info, 1), Epoch: 4,
			Lend: func([]int32) (kvwire.Export, int) { return dying{}, 64 }}),
		"one that is gone": closed(t),
	}
	p.decoder.Knows = func(addr string) bool { return addr != "127.0.0.1:1" }
	for name, addr := range peers {
		t.Run(name, func(t *testing.T) {
			req := infer.Request{Kind: infer.Aggregated, Prompt: promptOf(r, 100, p.ctx.Info.Vocab), MaxTokens: 8, IgnoreEOS: true, ID: r.Int64()}
			got, done, _ := p.borrowed(t, req, addr)
			if done.Report.CachedTokens >= 32 || !slices.Equal(got, p.alone(t, req)) {
				t.Errorf("%v with %d tokens cached", got, done.Report.CachedTokens)
			}
		})
	}
}

// peer is a KV listener of its own.
func (p *pair) peer(t *testing.T, o kvwire.ServerOptions) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Now, o.Logger = now, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- kvwire.NewServer(o).Serve(ctx, ln) }()
	t.Cleanup(func() { cancel(); <-done })
	return ln.Addr().String()
}

func closed(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// dying gives a part, and then an error.
type dying struct{ kvwire.Export }

func (dying) NextSpan(context.Context) (infer.Span, error) {
	return infer.Span{}, context.DeadlineExceeded
}
func (dying) Release() {}
