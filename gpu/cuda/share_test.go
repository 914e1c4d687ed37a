//go:build cuda

package cuda

import (
	"bufio"
	"bytes"
	gocontext "context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/gpu/kvwire/loopback"
	"meridian.internal/shared/infer"
)

// lending is what the process that lends its KV is told.
type lending struct {
	Config        string
	GPU           int // of the lender; the borrower has card 0
	Block, Tokens int
	Chunk         int // tokens of a span
	Deterministic bool
	CacheDir      string
}

// content is what lies in the lender's KV blocks, in the canonical layout of whole blocks.
func content(i backend.Info) []byte {
	b := make([]byte, i.KVBytes(0, i.Layers)*i.TokensPerBlock*i.KVBlocks)
	rng := rand.New(rand.NewPCG(7, 8))
	for j := 0; j+8 <= len(b); j += 8 {
		v := rng.Uint64()
		for k := range 8 {
			b[j+k] = byte(v >> (8 * k))
		}
	}
	return b
}

func wholeBlocks(i backend.Info) []backend.Region {
	out := make([]backend.Region, i.KVBlocks)
	for b := range out {
		out[b] = backend.Region{Block: int32(b), LayerTo: i.Layers, HeadTo: i.KVHeads, TokenTo: i.TokensPerBlock}
	}
	return out
}

// scattered is a block table that names every block once, not in order.
func scattered(n int) []int32 {
	out := blocksFrom(0, n)
	rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// prompt is the KV of a prompt that is all written. It is a kvwire.Export.
type prompt struct {
	b      *Backend
	blocks []int32
	spans  []infer.Span
}

func (p *prompt) NextSpan(gocontext.Context) (infer.Span, error) {
	if len(p.spans) == 0 {
		return infer.Span{}, io.EOF
	}
	s := p.spans[0]
	p.spans = p.spans[1:]
	return s, nil
}

func (p *prompt) Read(_ gocontext.Context, s infer.Span, dst []byte) error {
	c := p.b.CopyOut(engine.Regions(nil, p.b.info, [][]int32{p.blocks}, s), dst)
	<-c.Done()
	return c.Err
}

func (p *prompt) Blocks(s infer.Span) ([]int32, error) {
	per := p.b.info.TokensPerBlock
	return p.blocks[s.TokenFrom/per : (s.TokenTo-1)/per+1], nil
}

func (p *prompt) Release() {}

// lend runs in a process of its own: it fills KV and offers it again and again, until its input ends.
func lend(job string) error {
	var l lending
	if err := json.Unmarshal([]byte(job), &l); err != nil {
		return err
	}
	m, err := parseNoise(l.Config)
	if err != nil {
		return err
	}
	b, err := New(m, Options{GPU: l.GPU, TokensPerBlock: l.Block, KVBlocks: (l.Tokens + l.Block - 1) / l.Block, Deterministic: l.Deterministic, CacheDir: l.CacheDir, Now: now})
	if err != nil {
		return err
	}
	defer b.Close()
	if c := b.CopyIn(wholeBlocks(b.info), content(b.info)); true {
		if <-c.Done(); c.Err != nil {
			return c.Err
		}
	}
	shared, ok := b.Share()
	if !ok {
		return errors.New("the system does not let memory be shared")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := kvwire.NewServer(kvwire.ServerOptions{Hello: kvwire.HelloOf("lender", "aa.1", b.info, 1), Epoch: 1, Shared: &shared, Buffers: b, Now: now, Lease: time.Minute, Logger: slog.Default()})
	ctx, cancel := gocontext.WithCancel(gocontext.Background())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	fmt.Println(ln.Addr())
	if err := json.NewEncoder(os.Stdout).Encode(shared); err != nil {
		return err
	}
	for in, id := bufio.NewScanner(os.Stdin), int64(0); in.Scan(); id++ { // a line asks for an offer
		p := &prompt{b: b, blocks: scattered(b.info.KVBlocks)}
		for at := 0; at < l.Tokens; at += l.Chunk {
			p.spans = append(p.spans, infer.Span{LayerTo: b.info.Layers, TokenFrom: at, TokenTo: min(at+l.Chunk, l.Tokens)})
		}
		o, err := s.Offer(id, p)
		if err != nil {
			return err
		}
		o.Ready(kvwire.Trailer{First: []kvwire.FirstToken{{ID: 1}}})
		fmt.Println("offered")
	}
	cancel()
	return <-served
}

// borrower takes KV from a lender. It is a kvwire.Sink.
type borrower struct {
	*Backend
	blocks []int32
	addr   string
	lent   backend.Shared
	ask    func() // for one more offer
	next   int64
}

func (b *borrower) Write(_ gocontext.Context, s infer.Span, src []byte) error {
	c := b.CopyIn(engine.Regions(nil, b.info, [][]int32{b.blocks}, s), src)
	<-c.Done()
	return c.Err
}

func (b *borrower) Pull(_ gocontext.Context, s infer.Span, from backend.Attached, blocks []int32) (int64, error) {
	per := b.info.TokensPerBlock
	c := from.Pull(backend.Pull{
		LayerFrom: s.LayerFrom, LayerTo: s.LayerTo, TokenFrom: s.TokenFrom, TokenTo: s.TokenTo,
		From: blocks, To: b.blocks[s.TokenFrom/per : (s.TokenTo-1)/per+1],
	})
	<-c.Done()
	return c.EndNS - c.StartNS, c.Err
}

// client takes KV in place, or by TCP.
func (b *borrower) client(inPlace bool) *kvwire.Client {
	o := kvwire.ClientOptions{Hello: kvwire.HelloOf("borrower", "aa.2", b.info, 1), Epoch: 2, Buffers: b, Now: now, Logger: slog.Default()}
	if shared, ok := b.Share(); ok && inPlace {
		o.Hello.Shares, o.Attach = shared.Kind, b.Attach
	}
	return kvwire.NewClient(o)
}

// fetch takes the tokens from `from` on.
func (b *borrower) fetch(tb testing.TB, c *kvwire.Client, from, tokens int) kvwire.Report {
	tb.Helper()
	b.ask()
	ctx, cancel := gocontext.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	tr, err := c.Open(ctx, b.addr, b.next)
	if err != nil {
		tb.Fatal(err)
	}
	defer tr.Close()
	b.next++
	if err := tr.Request(ctx, from, time.Minute); err != nil {
		tb.Fatal(err)
	}
	if _, err := tr.Receive(ctx, tokens, b); err != nil {
		tb.Fatal(err)
	}
	return tr.Report()
}

// borrow opens the card here and a lender in a process of its own.
func borrow(tb testing.TB, l lending, block int) *borrower {
	tb.Helper()
	l.CacheDir = cacheDir
	m, err := parseNoise(l.Config)
	if err != nil {
		tb.Fatal(err)
	}
	n := (l.Tokens + block - 1) / block
	b := &borrower{Backend: open(tb, m, Options{TokensPerBlock: block, KVBlocks: n, Deterministic: l.Deterministic}), blocks: scattered(n)}
	tb.Cleanup(func() { shut(tb, b.Backend) })
	job, err := json.Marshal(l)
	if err != nil {
		tb.Fatal(err)
	}
	child := exec.CommandContext(tb.Context(), os.Args[0])
	child.Env, child.Stderr = append(os.Environ(), "MERIDIAN_TEST_LENDER="+string(job)), os.Stderr
	in, err := child.StdinPipe()
	out, err2 := child.StdoutPipe()
	if err := errors.Join(err, err2, child.Start()); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = in.Close(); _ = child.Wait() })
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		tb.Fatal("the lender does not begin")
	}
	b.addr = lines.Text()
	if !lines.Scan() {
		tb.Fatal("the lender does not say what it lends")
	}
	if err := json.Unmarshal(lines.Bytes(), &b.lent); err != nil {
		tb.Fatal(err)
	}
	b.ask = func() {
		if _, err := fmt.Fprintln(in); err != nil || !lines.Scan() {
			tb.Fatalf("the lender has ended: %v", err)
		}
	}
	return b
}

// check compares every token with what the lender holds.
func (b *borrower) check(tb testing.TB, there backend.Info, from, to int) {
	tb.Helper()
	want, table := content(there), scattered(there.KVBlocks)
	row := there.KVHeads * there.HeadSize * backend.ElementSize(there.KVType)
	got := make([]byte, 2*there.Layers*row)
	for t := from; t < to; t++ {
		c := b.CopyOut(engine.Regions(nil, b.info, [][]int32{b.blocks}, infer.Span{LayerTo: there.Layers, TokenFrom: t, TokenTo: t + 1}), got)
		if <-c.Done(); c.Err != nil {
			tb.Fatal(c.Err)
		}
		block, per := int(table[t/there.TokensPerBlock]), there.TokensPerBlock
		for i := range 2 * there.Layers {
			at := ((block*2*there.Layers+i)*per + t%per) * row
			if !bytes.Equal(got[i*row:(i+1)*row], want[at:at+row]) {
				tb.Fatalf("token %d, part %d of %d is not what the lender holds", t, i, 2*there.Layers)
			}
		}
	}
}

func TestAnotherProcessReadsKVInPlace(t *testing.T) {
	const shape = `{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": %d, "head_dim": %d, "max_position_embeddings": 512}`
	for _, tc := range []struct {
		heads, size, there, here int
		deterministic            bool
	}{{2, 32, 16, 16, false}, {2, 32, 16, 32, true}, {4, 64, 32, 8, false}, {1, 20, 8, 24, false}} {
		t.Run(fmt.Sprintf("%d heads of %d, blocks of %d and %d, %t", tc.heads, tc.size, tc.there, tc.here, tc.deterministic), func(t *testing.T) {
			const tokens = 250
			b := borrow(t, lending{Config: fmt.Sprintf(shape, tc.heads, tc.size), Block: tc.there, Tokens: tokens, Chunk: 70, Deterministic: tc.deterministic}, tc.here)
			there := b.info
			there.TokensPerBlock, there.KVBlocks = tc.there, (tokens+tc.there-1)/tc.there
			for _, inPlace := range []bool{true, false} {
				c := b.client(inPlace)
				defer c.Close()
				for _, from := range []int{0, 61} {
					clear := b.CopyIn(wholeBlocks(b.info), make([]byte, len(content(b.info))))
					if <-clear.Done(); clear.Err != nil {
						t.Fatal(clear.Err)
					}
					if r := b.fetch(t, c, from, tokens); (r.InstallNS == 0) != inPlace {
						t.Errorf("in place %t: %+v", inPlace, r)
					}
					b.check(t, there, from, tokens)
				}
			}
		})
	}
}

func TestPullsBeyondEitherSideAreRefused(t *testing.T) {
	here := backend.Info{Layers: 2, Stage: backend.Stage{End: 2}, TokensPerBlock: 16, KVBlocks: 4, KVType: "bf16", KVHeads: 2, HeadSize: 8}
	there := backend.Shared{Kind: shareKind, Handle: make([]byte, handleBytes), LayerTo: 2, TokensPerBlock: 32, KVBlocks: 2, KVType: "bf16", KVHeads: 2, HeadSize: 8}
	good := backend.Pull{LayerTo: 2, TokenFrom: 10, TokenTo: 40, From: []int32{0, 1}, To: []int32{3, 1, 0}}
	if err := errors.Join(attachable(here, there), checkPull(here, there, good)); err != nil {
		t.Error(err)
	}
	for _, tc := range []struct {
		want string
		edit func(*backend.Pull)
	}{
		{"layers [0, 3)", func(p *backend.Pull) { p.LayerTo = 3 }},
		{"tokens [40, 40)", func(p *backend.Pull) { p.TokenFrom = 40 }},
		{"1 blocks there, want 2", func(p *backend.Pull) { p.From = p.From[:1] }},
		{"2 blocks here, want 3", func(p *backend.Pull) { p.To = p.To[:2] }},
		{"block 2 there, there are 2", func(p *backend.Pull) { p.From = []int32{0, 2} }},
		{"block -1 here, there are 4", func(p *backend.Pull) { p.To = []int32{3, -1, 0} }},
	} {
		p := good
		p.From, p.To = slices.Clone(p.From), slices.Clone(p.To)
		if tc.edit(&p); true {
			if err := checkPull(here, there, p); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		}
	}
	for _, edit := range []func(*backend.Shared){
		func(s *backend.Shared) { s.Kind = "other" }, func(s *backend.Shared) { s.Handle = s.Handle[:8] },
		func(s *backend.Shared) { s.KVType = "f32" }, func(s *backend.Shared) { s.KVHeads = 4 },
		func(s *backend.Shared) { s.LayerTo = 1 }, func(s *backend.Shared) { s.TokensPerBlock = 0 },
	} {
		s := there
		edit(&s)
		if attachable(here, s) == nil {
			t.Errorf("%+v can be attached", s)
		}
	}
}

// BenchmarkHandOver moves the KV of 8,192 tokens of the 1.24 B shape, in spans of 2,048: by the driver's plain copy, in place
// and by TCP, this beside a plain copy of as many bytes over a connection of this host; from a process on the same card, and from
// one on the next card where there is one.
func BenchmarkHandOver(b *testing.B) {
	const tokens = 8192
	for gpu, cards := range []string{"one card", "two cards"} {
		b.Run(cards, func(b *testing.B) {
			if c, err := openContext(gpu); err != nil {
				b.Skipf("card %d: %v", gpu, err)
			} else if err := c.close(); err != nil {
				b.Fatal(err)
			}
			r := borrow(b, lending{Config: bench1B, GPU: gpu, Block: 32, Tokens: tokens, Chunk: 2048}, 32)
			b.Run("copy", func(b *testing.B) { r.plain(b) })
			for _, inPlace := range []bool{true, false} {
				b.Run(map[bool]string{true: "in place", false: "TCP"}[inPlace], func(b *testing.B) {
					c := r.client(inPlace)
					defer c.Close()
					r.fetch(b, c, 0, tokens)
					var wire, install, whole, plain []float64
					for b.Loop() {
						if !inPlace {
							took, err := loopback.Copy(tokens*r.info.KVBytes(0, r.info.Layers), 1<<20)
							if err != nil {
								b.Fatal(err)
							}
							plain = append(plain, took.Seconds()*1e3)
						}
						got := r.fetch(b, c, 0, tokens)
						wire = append(wire, float64(got.WireNS)/1e6)
						install = append(install, float64(got.InstallNS)/1e6)
						whole = append(whole, float64(got.InstalledNS-got.RequestedNS)/1e6)
						b.SetBytes(got.Bytes)
					}
					b.ReportMetric(median(wire), "wire-ms")
					b.ReportMetric(median(whole), "asked-to-installed-ms")
					if !inPlace {
						p, w := median(plain), median(whole)
						fmt.Printf("KV of %d tokens by TCP, %s: installed after %.1f ms (%.1f in reads of the socket, %.1f in copies to the card), %.0f %% of a plain loopback copy of the same bytes (%.1f ms; goal 70)\n",
							tokens, cards, w, median(wire), median(install), 100*p/w, p)
					}
				})
			}
		})
	}
}

// plain measures what the link gives: one copy of all lent bytes by the driver.
func (b *borrower) plain(t *testing.B) {
	l, err := openLibrary([]string{"libcuda.so.1"}, []string{"cuMemcpyDtoDAsync_v2"})
	if err != nil {
		t.Fatal(err)
	}
	a, err := b.Attach(b.lent)
	if err != nil {
		t.Skipf("the KV of the lender cannot be opened here: %v", err)
	}
	defer a.Close()
	bytes := b.info.KVBytes(0, b.info.Layers) * b.info.TokensPerBlock * min(b.info.KVBlocks, b.lent.KVBlocks)
	t.SetBytes(int64(bytes))
	var wire []float64
	for t.Loop() {
		took := make(chan time.Duration, 1)
		failed := make(chan error, 1)
		if !b.pulls.Push(func(i *importer, err error) {
			start := now()
			failed <- firstOf(err, status("cuMemcpyDtoDAsync_v2", l.call("cuMemcpyDtoDAsync_v2", uintptr(i.kv), uintptr(a.(*attached).at), uintptr(bytes), i.handle)), i.wait())
			took <- time.Duration(now() - start)
		}) {
			t.Fatal(backend.ErrClosed)
		}
		if err := <-failed; err != nil {
			t.Fatal(err)
		}
		wire = append(wire, float64((<-took).Nanoseconds())/1e6)
	}
	t.ReportMetric(median(wire), "wire-ms")
}
