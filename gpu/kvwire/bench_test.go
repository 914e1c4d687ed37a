package kvwire

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kvwire/loopback"
	"meridian.internal/shared/infer"
)

// memory is KV in the host's memory that is all written: an Export, and a Sink of the same size.
type memory struct {
	h     Hello
	kv    []byte
	spans []infer.Span
}

func (m *memory) NextSpan(context.Context) (infer.Span, error) {
	if len(m.spans) == 0 {
		return infer.Span{}, io.EOF
	}
	s := m.spans[0]
	m.spans = m.spans[1:]
	return s, nil
}

// at is a place for a span, other ones for other tokens and layers.
func (m *memory) at(s infer.Span) []byte {
	from := s.TokenFrom*m.h.tokenBytes(m.h.Layers) + s.LayerFrom*(s.TokenTo-s.TokenFrom)*m.h.tokenBytes(1)
	return m.kv[from : from+spanBytes(m.h, s)]
}

func (m *memory) Read(_ context.Context, s infer.Span, dst []byte) error {
	copy(dst, m.at(s))
	return nil
}

func (m *memory) Write(_ context.Context, s infer.Span, src []byte) error {
	copy(m.at(s), src)
	return nil
}

func (*memory) Blocks(infer.Span) ([]int32, error) { return nil, io.EOF }
func (*memory) Pull(context.Context, infer.Span, backend.Attached, []int32) (int64, error) {
	return 0, io.EOF
}
func (*memory) Release() {}

// BenchmarkHandOver moves the KV of 8,192 tokens of 1.24 B layers (268 MB) from memory to memory over a TCP connection of this
// host, beside a plain copy of as many bytes over another one, in turn.
func BenchmarkHandOver(b *testing.B) {
	const tokens, chunk, piece = 8192, 2048, frameGoal
	h := Hello{Node: "here", ModelHash: "m", Layers: 16, KVHeads: 8, HeadSize: 64, KVType: "bf16", TokensPerBlock: 32, Ranks: 1, Stages: 1}
	bytes := tokens * h.tokenBytes(h.Layers)
	from, to := &memory{h: h, kv: make([]byte, bytes)}, &memory{h: h, kv: make([]byte, bytes)}
	for i := range from.kv {
		from.kv[i] = byte(i >> 8)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Skip("no loopback network: " + err.Error())
	}
	start := time.Now()
	now := func() int64 { return int64(time.Since(start)) }
	s := NewServer(ServerOptions{Hello: h, Epoch: 1, Now: now, Lease: time.Minute, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			b.Error(err)
		}
	}()
	c := NewClient(ClientOptions{Hello: h, Epoch: 2, Now: now, Logger: slog.New(slog.DiscardHandler)})
	defer c.Close()
	var plain, whole []float64
	for id := int64(1); b.Loop(); id++ {
		took, err := loopback.Copy(bytes, piece)
		if err != nil {
			b.Fatal(err)
		}
		plain = append(plain, took.Seconds()*1e3)
		for at := 0; at < tokens; at += chunk {
			from.spans = append(from.spans, infer.Span{LayerTo: h.Layers, TokenFrom: at, TokenTo: at + chunk})
		}
		r, err := handOver(ctx, s, c, ln.Addr().String(), id, tokens, from, to)
		if err != nil {
			b.Fatal(err)
		}
		whole = append(whole, float64(r.InstalledNS-r.StartNS)/1e6)
	}
	if !slices.Equal(from.kv, to.kv) {
		b.Error("what came is not what was sent")
	}
	slices.Sort(plain)
	slices.Sort(whole)
	p, w := plain[len(plain)/2], whole[len(whole)/2]
	b.ReportMetric(p, "plain-ms")
	b.ReportMetric(w, "installed-ms")
	fmt.Printf("KV of %d tokens by TCP from memory to memory: %.1f ms, %.0f %% of a plain loopback copy of the same bytes (%.1f ms)\n", tokens, w, 100*p/w, p)
}

func handOver(ctx context.Context, s *Server, c *Client, addr string, id int64, tokens int, from Export, to Sink) (Report, error) {
	o, err := s.Offer(id, from)
	if err != nil {
		return Report{}, err
	}
	o.Ready(someTrailer)
	tr, err := c.Open(ctx, addr, id)
	if err != nil {
		return Report{}, err
	}
	defer tr.Close()
	if err := tr.Request(ctx, 0, time.Minute); err != nil {
		return Report{}, err
	}
	_, err = tr.Receive(ctx, tokens, to)
	return tr.Report(), err
}
