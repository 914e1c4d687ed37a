package kvwire

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// prefill is an Export of a prompt whose chunks are written when the test says so.
type prefill struct {
	h        Hello
	tokens   int
	spans    chan infer.Span
	failed   chan error
	released atomic.Int32
	reading  atomic.Int32
}

func newPrefill(h Hello, tokens int) *prefill {
	return &prefill{h: h, tokens: tokens, spans: make(chan infer.Span, 100), failed: make(chan error, 1)}
}

// run writes the prompt in chunks, layer by layer.
func (p *prefill) run(chunk int) *prefill {
	for from := 0; from < p.tokens; from += chunk {
		for l := range p.h.Layers {
			p.spans <- infer.Span{LayerFrom: l, LayerTo: l + 1, TokenFrom: from, TokenTo: min(from+chunk, p.tokens)}
		}
	}
	close(p.spans)
	return p
}

func (p *prefill) NextSpan(ctx context.Context) (infer.Span, error) {
	select {
	case s, ok := <-p.spans:
		if !ok {
			return s, io.EOF
		}
		return s, nil
	case err := <-p.failed:
		return infer.Span{}, err
	case <-ctx.Done():
		return infer.Span{}, ctx.Err()
	}
}

func (p *prefill) Read(_ context.Context, s infer.Span, dst []byte) error {
	p.reading.Add(1)
	defer p.reading.Add(-1)
	copy(dst, layout(p.h, s, place))
	return nil
}

// firstBlock is the number of the block that holds the first tokens of every prefill.
const firstBlock = 1000

func (p *prefill) Blocks(s infer.Span) ([]int32, error) {
	var out []int32
	for b := s.TokenFrom / p.h.TokensPerBlock; b*p.h.TokensPerBlock < s.TokenTo; b++ {
		out = append(out, int32(firstBlock+b))
	}
	return out, nil
}

func (p *prefill) Release() {
	if p.reading.Load() != 0 {
		panic("released under a read")
	}
	p.released.Add(1)
}

func place(layer, kv, token, i int) float32 { return float32(layer*64 + kv*32 + token%4*8 + i) }

// cache is a Sink that remembers what was written where.
type cache struct {
	h    Hello
	mu   sync.Mutex
	got  map[infer.Span][]byte
	fail error

	pulled int // spans that came in place
}

func (c *cache) Write(_ context.Context, s infer.Span, src []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return c.fail
	}
	c.got[s] = bytes.Clone(src)
	return nil
}

func (c *cache) Pull(_ context.Context, s infer.Span, from backend.Attached, blocks []int32) (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return 0, c.fail
	}
	copied := from.Pull(backend.Pull{LayerFrom: s.LayerFrom, LayerTo: s.LayerTo, TokenFrom: s.TokenFrom, TokenTo: s.TokenTo, From: blocks})
	<-copied.Done()
	if copied.Err != nil {
		return 0, copied.Err
	}
	c.got[s] = layout(c.h, s, place)
	c.pulled++
	return copied.EndNS - copied.StartNS, nil
}

// check says whether exactly tokens [from, to) of all layers are there, with the right content.
func (c *cache) check(t *testing.T, from, to int) {
	t.Helper()
	n := 0
	for s, b := range c.got {
		n += (s.TokenTo - s.TokenFrom) * (s.LayerTo - s.LayerFrom)
		if !bytes.Equal(b, layout(c.h, s, place)) {
			t.Errorf("%+v holds the wrong bytes", s)
		}
		if s.TokenFrom < from || s.TokenTo > to {
			t.Errorf("%+v travelled, wanted was %d to %d", s, from, to)
		}
	}
	if n != (to-from)*c.h.Layers {
		t.Errorf("%d token-layers arrived, want %d", n, (to-from)*c.h.Layers)
	}
}

// patient is for real time, in which a peer that is there may wait for a processor.
var patient = Timing{Lost: time.Minute, Idle: time.Minute, Handshake: time.Minute}

// pair is a server and a client of it over in-memory connections, so that time is the bubble's.
type pair struct {
	server *Server
	client *Client
	ln     *pipes
	stop   func()
}

// pipes is a listener whose connections are pipes.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	last  net.Conn // server side of the newest
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }
func (p *pipes) dial(context.Context, string) (net.Conn, error) {
	a, b := net.Pipe()
	p.last = b
	p.conns <- b
	return a, nil
}

func start(t *testing.T, sender, receiver Hello) *pair {
	now := func() int64 { return time.Now().UnixNano() }
	log := slog.New(slog.DiscardHandler)
	p := &pair{ln: &pipes{conns: make(chan net.Conn, 16), done: make(chan struct{})}}
	mem := &counted{}
	t.Cleanup(func() {
		if n := mem.out.Load(); n != 0 {
			t.Errorf("%d buffers were not given back", n)
		}
	})
	p.server = NewServer(ServerOptions{Hello: sender, Epoch: 7, Now: now, Logger: log, Buffers: mem})
	p.client = NewClient(ClientOptions{Hello: receiver, Epoch: 8, Now: now, Logger: log, Dial: p.ln.dial, Buffers: mem})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := p.server.Serve(ctx, p.ln); err != nil {
			t.Error(err)
		}
	})
	p.stop = func() {
		p.client.Close()
		cancel()
		wg.Wait()
		if n := p.server.Pending(); n != 0 {
			t.Errorf("%d offers are left", n)
		}
	}
	return p
}

// counted are Buffers that know how many are out.
type counted struct{ out atomic.Int64 }

func (c *counted) Take(n int) []byte { c.out.Add(1); return make([]byte, n) }
func (c *counted) Give(b []byte)     { clear(b); c.out.Add(-1) } // who still uses it sees zeros

func (p *pair) fetch(ctx context.Context, id int64, from, prompt int, sink Sink) (Trailer, Report, error) {
	tr, err := p.client.Open(ctx, "ctx0", id)
	if err != nil {
		return Trailer{}, Report{}, err
	}
	defer tr.Close()
	if err := tr.Request(ctx, from, time.Minute); err != nil {
		return Trailer{}, Report{}, err
	}
	t, err := tr.Receive(ctx, prompt, sink)
	return t, tr.Report(), err
}

func (p *pair) offer(t *testing.T, id int64, x Export) *Offer {
	t.Helper()
	o, err := p.server.Offer(id, x)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

var someTrailer = Trailer{First: []FirstToken{{ID: 42, Logprob: -1, Top: []FirstLogprob{{ID: 42, Logprob: -1}}}}, FinishReason: infer.FinishLength, PromptTokens: 100}
