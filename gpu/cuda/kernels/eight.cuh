// Numbers of eight bits: E4M3, four bits of exponent and three of mantissa, at most 448. Every one of them is also a bfloat16. And
// what KV is made of.
typedef unsigned char u8;
#if BF16

// narrow8 rounds to the nearest, to even ones between two; what is too large becomes 448.
__device__ __forceinline__ u32 narrow8(float v) {
  u32 bits = __float_as_uint(v), sign = bits >> 24 & 0x80;
  float a = fabsf(v);
  if (!(a < 448.f)) return sign | 0x7e;
  if (a < 0.015625f) return sign | (u32)__float2int_rn(a * 512.f);  // steps of 2^-9 below 2^-6
  bits = (bits & 0x7fffffff) + 0x7ffff + (bits >> 20 & 1);
  return sign | ((bits >> 20) - (120 << 3));
}

// widen8x2 gives two numbers, which are the upper bytes of the halves of a, as bfloat16. Their bits, put where bfloat16 has its own, are
// numbers that are too small by 2^120, for subnormal ones too.
__device__ __forceinline__ u32 widen8x2(u32 a) {
  const u32 scale = 0x7b807b80, zero = 0x80008000;  // 2^120, -0
  u32 v;
  a = (a & 0x80008000) | (a & 0x7f007f00) >> 4;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(scale), "r"(zero));
  return v;
}

// widen8 gives the four numbers of w as two pairs of bfloat16.
__device__ __forceinline__ void widen8(u32 w, u32& lo, u32& hi) {
  lo = widen8x2(__byte_perm(w, 0, 0x1404));
  hi = widen8x2(__byte_perm(w, 0, 0x3424));
}

// widened gives one number.
__device__ __forceinline__ float widened(u8 v) { return __uint_as_float((u32)(v & 0x80) << 24 | (u32)(v & 0x7f) << 20) * 1.329227995784916e36f; }

// widen8x8 gives eight numbers as bfloat16.
__device__ __forceinline__ uint4 widen8x8(uint2 w) {
  uint4 v;
  widen8(w.x, v.x, v.y);
  widen8(w.y, v.z, v.w);
  return v;
}
#endif

// KV is what K and V are stored as: a value is the number times its head's scale. put stores one.
#if KV8
typedef u8 KV;
__device__ __forceinline__ float kvScale(const float* scales, int kv, int head) { return scales[kv * KVHEADS + head]; }
__device__ __forceinline__ void put(KV* to, float v, float scale) { *to = (u8)narrow8(v / scale); }
#else
typedef T KV;
__device__ __forceinline__ float kvScale(const float* scales, int kv, int head) { return 1.f; }
__device__ __forceinline__ void put(KV* to, float v, float scale) { *to = narrow(v); }
#endif
