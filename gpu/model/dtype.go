package model

import "math"

// DType is the element type of a tensor.
type DType uint8

// The element types that weights may have. Their elements are little endian.
const (
	BF16 DType = iota + 1
	F16
	F32
)

// Size is the size of one element in bytes.
func (t DType) Size() int {
	if t == F32 {
		return 4
	}
	return 2
}

// String gives the name that safetensors uses.
func (t DType) String() string {
	switch t {
	case BF16:
		return "BF16"
	case F16:
		return "F16"
	case F32:
		return "F32"
	}
	return "unknown"
}

func dtypeOf(name string) (DType, bool) {
	switch name {
	case "BF16":
		return BF16, true
	case "F16":
		return F16, true
	case "F32":
		return F32, true
	}
	return 0, false
}

// BF16ToFloat32 widens a bfloat16, exactly.
func BF16ToFloat32(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F16ToFloat32 widens an IEEE 754 half, exactly.
func F16ToFloat32(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch {
	case exp == 0x1f: // infinity and NaN; a NaN becomes quiet, as the processor's own conversion does
		if frac != 0 {
			frac |= 0x200
		}
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case exp != 0:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	}
	v := float32(frac) * (1.0 / (1 << 24)) // subnormal: frac * 2^-24, exact
	return math.Float32frombits(math.Float32bits(v) | sign)
}

// Float32ToBF16 rounds to the nearest bfloat16, ties to even. NaN stays NaN.
func Float32ToBF16(f float32) uint16 {
	b := math.Float32bits(f)
	if f != f {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32ToF16 rounds to the nearest half, ties to even. Values beyond the range become infinite.
func Float32ToF16(f float32) uint16 {
	b := math.Float32bits(f)
	sign := uint16(b >> 16 & 0x8000)
	a := b & 0x7fffffff
	switch {
	case a > 0x7f800000:
		return sign | 0x7e00
	case a >= 0x477ff000: // 65520 and up round to infinity
		return sign | 0x7c00
	case a < 0x38800000: // below the smallest normal half, 2^-14: count units of 2^-24
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(a))*(1<<24)))
	}
	a -= 112 << 23
	return sign | uint16((a+0xfff+a>>13&1)>>13)
}
