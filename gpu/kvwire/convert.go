package kvwire

import (
	"encoding/binary"
	"fmt"
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// elementCode is 0 for an element type that is not converted.
func elementCode(kvType string) int {
	switch kvType {
	case "f32":
		return 1
	case "f16":
		return 2
	case "bf16":
		return 3
	}
	return 0
}

// spanBytes is the size of a span in the canonical layout.
func spanBytes(h Hello, s infer.Span) int {
	return (s.TokenTo - s.TokenFrom) * h.tokenBytes(s.LayerTo-s.LayerFrom)
}

// convert gives the bytes of a span, laid out by the blocks of from, as the blocks and elements of to. The result is src
// itself where nothing differs, else it lies in buf if that is large enough.
func convert(buf, src []byte, s infer.Span, from, to Hello) ([]byte, error) {
	if want := spanBytes(from, s); len(src) != want {
		return nil, fmt.Errorf("%w: %d bytes of KV for %+v, want %d", ErrFrame, len(src), s, want)
	}
	if from.KVType == to.KVType && (from.TokensPerBlock == to.TokensPerBlock || sameBlocks(s, from, to)) {
		return src, nil
	}
	n := spanBytes(to, s)
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	srcRow, dstRow := from.rowBytes(), to.rowBytes()
	for layer := s.LayerFrom; layer < s.LayerTo; layer++ {
		for kv := range 2 {
			for t := s.TokenFrom; t < s.TokenTo; t++ {
				a := rowIndex(s, layer, kv, t, from.TokensPerBlock) * srcRow
				b := rowIndex(s, layer, kv, t, to.TokensPerBlock) * dstRow
				convertRow(buf[b:b+dstRow], src[a:a+srcRow], to.KVType, from.KVType)
			}
		}
	}
	return buf, nil
}

// sameBlocks tells whether a span lies in one block on both sides, so that both lay it out alike.
func sameBlocks(s infer.Span, a, b Hello) bool {
	one := func(n int) bool { return s.TokenFrom/n == (s.TokenTo-1)/n }
	return s.TokenTo > s.TokenFrom && one(a.TokensPerBlock) && one(b.TokensPerBlock)
}

// rowIndex is the place, in rows of one token's K or V, of (layer, kv, token) in the canonical layout of a span cut into
// blocks of n tokens: block, layer, K then V, token. All blocks before t's are whole inside the span but the first.
func rowIndex(s infer.Span, layer, kv, t, n int) int {
	layers := s.LayerTo - s.LayerFrom
	blockFrom := max(t/n*n, s.TokenFrom)
	blockTo := min(t/n*n+n, s.TokenTo)
	inBlock := blockTo - blockFrom
	return (blockFrom-s.TokenFrom)*2*layers + ((layer-s.LayerFrom)*2+kv)*inBlock + t - blockFrom
}

func convertRow(dst, src []byte, to, from string) {
	if to == from {
		copy(dst, src)
		return
	}
	sn, dn := backend.ElementSize(from), backend.ElementSize(to)
	for i := range len(src) / sn {
		store(dst[i*dn:], to, load(src[i*sn:], from))
	}
}

func load(b []byte, kvType string) float32 {
	switch kvType {
	case "f32":
		return math.Float32frombits(binary.LittleEndian.Uint32(b))
	case "bf16":
		return model.BF16ToFloat32(binary.LittleEndian.Uint16(b))
	}
	return model.F16ToFloat32(binary.LittleEndian.Uint16(b))
}

func store(b []byte, kvType string, v float32) {
	switch kvType {
	case "f32":
		binary.LittleEndian.PutUint32(b, math.Float32bits(v))
	case "bf16":
		binary.LittleEndian.PutUint16(b, model.Float32ToBF16(v))
	default:
		binary.LittleEndian.PutUint16(b, model.Float32ToF16(v))
	}
}
