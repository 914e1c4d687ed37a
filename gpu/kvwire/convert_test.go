package kvwire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"meridian.internal/shared/infer"
)

func hello(kvType string, block int) Hello {
	return Hello{Node: "n", ModelHash: "m", Layers: 3, KVHeads: 2, HeadSize: 4, RoPE: "r", KVType: kvType, TokensPerBlock: block, Ranks: 1, Stages: 1}
}

// layout writes a value that names its place: it is the reference that walks blocks one after the other.
func layout(h Hello, s infer.Span, value func(layer, kv, token, i int) float32) []byte {
	var out []byte
	for from := s.TokenFrom; from < s.TokenTo; {
		to := min(from/h.TokensPerBlock*h.TokensPerBlock+h.TokensPerBlock, s.TokenTo)
		for layer := s.LayerFrom; layer < s.LayerTo; layer++ {
			for kv := range 2 {
				for t := from; t < to; t++ {
					for i := range h.KVHeads * h.HeadSize {
						var b [4]byte
						store(b[:], h.KVType, value(layer, kv, t, i))
						out = append(out, b[:h.rowBytes()/(h.KVHeads*h.HeadSize)]...)
					}
				}
			}
		}
		from = to
	}
	return out
}

func TestBlockSizesAndElementTypesAreConverted(t *testing.T) {
	place := func(layer, kv, token, i int) float32 { return float32(layer*64 + kv*32 + token%4*8 + i) } // exact in all three types
	spans := []infer.Span{
		{LayerFrom: 0, LayerTo: 3, TokenFrom: 0, TokenTo: 40}, {LayerFrom: 1, LayerTo: 2, TokenFrom: 5, TokenTo: 6},
		{LayerFrom: 0, LayerTo: 3, TokenFrom: 7, TokenTo: 33}, {LayerFrom: 2, LayerTo: 3, TokenFrom: 16, TokenTo: 32},
	}
	for _, s := range spans {
		for _, from := range []Hello{hello("f32", 16), hello("f16", 8), hello("bf16", 5)} {
			for _, to := range []Hello{hello("f32", 16), hello("f16", 32), hello("bf16", 3), hello("f32", 64)} {
				got, err := convert(nil, layout(from, s, place), s, from, to)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, layout(to, s, place)) {
					t.Errorf("%+v from %s/%d to %s/%d is laid out wrongly", s, from.KVType, from.TokensPerBlock, to.KVType, to.TokensPerBlock)
				}
			}
		}
	}
}

func TestAWrongSizeIsRefused(t *testing.T) {
	h := hello("f32", 16)
	if _, err := convert(nil, make([]byte, 7), infer.Span{LayerTo: 1, TokenTo: 1}, h, h); !errors.Is(err, ErrFrame) {
		t.Errorf("got %v, want a bad frame", err)
	}
}

func TestASpanIsCutIntoPartsThatTileIt(t *testing.T) {
	h := hello("f32", 16)
	h.KVHeads, h.HeadSize, h.Layers = 8, 128, 8 // 8 KiB per token and layer: 128 tokens fill a frame
	for _, s := range []infer.Span{{LayerTo: 8, TokenTo: 10}, {LayerFrom: 2, LayerTo: 3, TokenFrom: 5, TokenTo: 1000}, {LayerTo: 1, TokenFrom: 3, TokenTo: 3}} {
		seen := map[[2]int]int{}
		for _, p := range split(s, h) {
			if n := spanBytes(h, p); n > maxKV || n == 0 {
				t.Errorf("%+v: a part of %d bytes", s, n)
			}
			for l := p.LayerFrom; l < p.LayerTo; l++ {
				for k := p.TokenFrom; k < p.TokenTo; k++ {
					seen[[2]int{l, k}]++
				}
			}
		}
		if len(seen) != (s.LayerTo-s.LayerFrom)*(s.TokenTo-s.TokenFrom) {
			t.Errorf("%+v: %d token-layers are covered", s, len(seen))
		}
		for at, n := range seen {
			if n != 1 {
				t.Errorf("%+v: %v is sent %d times", s, at, n)
			}
		}
	}
}

func BenchmarkConvertBlocks(b *testing.B) {
	from, to := hello("bf16", 16), hello("f32", 32)
	from.KVHeads, from.HeadSize, to.KVHeads, to.HeadSize = 8, 128, 8, 128
	s := infer.Span{LayerTo: 1, TokenTo: 256}
	src, dst := make([]byte, spanBytes(from, s)), make([]byte, spanBytes(to, s))
	binary.LittleEndian.PutUint16(src, 0x3f80)
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		if _, err := convert(dst, src, s, from, to); err != nil {
			b.Fatal(err)
		}
	}
}
