package model

import (
	"math"
	"testing"
)

func TestNarrowTypesSurviveWidening(t *testing.T) {
	for i := range 1 << 16 {
		b := uint16(i)
		if f := BF16ToFloat32(b); f == f && Float32ToBF16(f) != b {
			t.Fatalf("bf16 %#x became %g, then %#x", b, f, Float32ToBF16(f))
		}
		if f := F16ToFloat32(b); f == f && Float32ToF16(f) != b {
			t.Fatalf("f16 %#x became %g, then %#x", b, f, Float32ToF16(f))
		}
	}
}

func TestNarrowingRoundsToNearestEven(t *testing.T) {
	for _, tc := range []struct {
		name      string
		in        float32
		bf16, f16 uint16
	}{
		{"one", 1, 0x3f80, 0x3c00},
		{"half way down to even", 1 + 1.0/256, 0x3f80, 0x3c04},
		{"half way up to even", 1 + 3.0/256, 0x3f82, 0x3c0c},
		{"f16 half way down", 1 + 1.0/2048, 0x3f80, 0x3c00},
		{"f16 half way up", 1 + 3.0/2048, 0x3f80, 0x3c02},
		{"beyond f16", 65520, 0x4780, 0x7c00},
		{"the largest f16", 65519, 0x4780, 0x7bff},
		{"a subnormal f16", 3 * 0x1p-24, 0x3440, 0x0003},
		{"rounds up into the normal f16", 0x1p-14 - 0x1p-26, 0x3880, 0x0400},
		{"minus zero", float32(math.Copysign(0, -1)), 0x8000, 0x8000},
		{"infinity", float32(math.Inf(-1)), 0xff80, 0xfc00},
	} {
		if got := Float32ToBF16(tc.in); got != tc.bf16 {
			t.Errorf("%s: bf16 %#04x, want %#04x", tc.name, got, tc.bf16)
		}
		if got := Float32ToF16(tc.in); got != tc.f16 {
			t.Errorf("%s: f16 %#04x, want %#04x", tc.name, got, tc.f16)
		}
	}
	nan := float32(math.NaN())
	if b, h := BF16ToFloat32(Float32ToBF16(nan)), F16ToFloat32(Float32ToF16(nan)); b == b || h == h {
		t.Error("NaN became a number")
	}
}
