//go:build cuda

package cuda

import (
	"bytes"
	"testing"

	"meridian.internal/gpu/backend"
)

func TestPiecesAreLentOnceAndOtherMemoryWhenNoneIsLeft(t *testing.T) {
	p := &pins{}
	p.use(make([]byte, 3*pinBytes))
	var out [][]byte
	for i := range 3 {
		b := p.Take(100 + i)
		for _, o := range out {
			if &o[0] == &b[0] {
				t.Error("a piece was lent twice")
			}
		}
		if !p.hold(b) || len(b) != 100+i || cap(b) != pinBytes {
			t.Errorf("piece %d: %d bytes of %d", i, len(b), cap(b))
		}
		out = append(out, b[:pinBytes][:1]) // its user may cut it
	}
	for _, n := range []int{1, pinBytes + 1} {
		b := p.Take(n)
		if len(b) != n || p.hold(b) {
			t.Errorf("other memory of %d bytes: %d, held %t", n, len(b), p.hold(b))
		}
		p.Give(b)
	}
	for _, b := range out {
		p.Give(b)
	}
	if len(p.free) != 3 {
		t.Errorf("%d pieces came back", len(p.free))
	}
	if b := p.Take(pinBytes + 1); p.hold(b) || len(p.free) != 3 {
		t.Error("a piece is larger than it is")
	}
}

func TestPartsAreCopiedOnce(t *testing.T) {
	for _, n := range []int{0, 1, leastCopied - 1, leastCopied, 5*leastCopied + 13} {
		src, dst := make([]byte, n), make([]byte, n+1)
		for i := range src {
			src[i] = byte(i*7 + i>>8)
		}
		if spread(dst, src); !bytes.Equal(dst[:n], src) || dst[n] != 0 {
			t.Errorf("%d bytes were copied wrongly", n)
		}
	}
	seen := make([]int, 1000)
	inParts(len(seen), 7, func(from, to int) {
		for i := from; i < to; i++ {
			seen[i]++
		}
	})
	for i, n := range seen {
		if n != 1 {
			t.Fatalf("place %d was visited %d times", i, n)
		}
	}
}

// TestKVIsTheSameThroughPinnedAndOtherMemory: of large and small regions, of whole blocks and parts of them, of more than two stages.
func TestKVIsTheSameThroughPinnedAndOtherMemory(t *testing.T) {
	const blocks, per = 96, 32
	m := noiseModel(t, `{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 512, "intermediate_size": 64,
"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096}`)
	b := open(t, m, Options{TokensPerBlock: per, KVBlocks: blocks})
	defer shut(t, b)
	moved := func(c *backend.Copy) {
		t.Helper()
		if <-c.Done(); c.Err != nil {
			t.Fatal(c.Err)
		}
	}
	want := content(b.info)
	moved(b.CopyIn(wholeBlocks(b.info), want))
	all := make([]byte, len(want))
	if moved(b.CopyOut(wholeBlocks(b.info), all)); !bytes.Equal(all, want) {
		t.Fatal("whole blocks came back otherwise")
	}
	if !b.hold(b.Take(1)) {
		t.Fatal("no memory is pinned")
	}
	block := len(want) / blocks
	for i, r := range []backend.Region{
		{LayerTo: 2, HeadTo: 8, TokenTo: per},               // a copy of its own
		{LayerFrom: 1, LayerTo: 2, HeadTo: 8, TokenTo: per}, // likewise, of one layer
		{LayerTo: 2, HeadTo: 8, TokenTo: 1},                 // packed
		{LayerTo: 2, HeadFrom: 1, HeadTo: 7, TokenFrom: 3, TokenTo: 30},
	} {
		regions := []backend.Region{r, r, r}
		for j := range regions {
			regions[j].Block = int32(7*i + 40*j/3)
		}
		n := len(regions) * elements(b.info, r) * backend.ElementSize(b.info.KVType)
		pinned, other := b.Take(n), make([]byte, n)
		moved(b.CopyOut(regions, pinned))
		moved(b.CopyOut(regions, other))
		if !bytes.Equal(pinned, other) {
			t.Errorf("%+v is other in pinned memory", r)
		}
		if at := int(regions[1].Block)*block + r.LayerFrom*block/2; r.TokenTo == per && !bytes.Equal(pinned[n/3:2*n/3], want[at:at+n/3]) {
			t.Errorf("%+v is not what was written", r)
		}
		for j := range pinned {
			pinned[j] ^= byte(j)
		}
		moved(b.CopyIn(regions, pinned))
		if moved(b.CopyOut(regions, other)); !bytes.Equal(pinned, other) {
			t.Errorf("%+v was not written out of pinned memory", r)
		}
		b.Give(pinned)
	}
}
